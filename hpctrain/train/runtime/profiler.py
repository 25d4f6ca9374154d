"""A look at some steps of some ranks by torch.profiler, without touching the program.

Which steps are known to all ranks: by the settings, or by a request that rank 0 broadcast when all
had agreed to hear it.

A profile must never break training: what fails is reported once, and profiling ends.
tests/engines/test_profile_run.py holds the promises.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hpctrain.core.base import clock
from hpctrain.core.device import synchronize
from hpctrain.core.settings.check import rank_set, step_range
from hpctrain.core.world import broadcast
from hpctrain.ledger.run.event_types import ProfileRequested, ProfileWritten
from hpctrain.observe.profile.trace import (
    OURS,
    PROBLEM,
    SNAPSHOT,
    STEP_MARK,
    TRACE,
    ProfileRequest,
    StepWindow,
    file_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hpctrain.core.settings.schema import ProfileSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.train.runtime.telemetry import Stopwatch

log = logging.getLogger("hpctrain.runtime")

MOST_ENTRIES = 200_000
"""Allocations that are remembered with their stacks; more would cost the host gigabytes."""
NEVER = sys.maxsize
WRITE_S = 60.0
"""So long a rank that ends waits for its trace to be written."""
ENOUGH_S = 20.0
"""With less left before the kill a trace is given up."""


@dataclass(frozen=True)
class Plan:
    """What is profiled next: which steps, of which ranks (None for all), with memory or not."""

    window: StepWindow
    ranks: tuple[int, ...] | None
    memory: bool

    def has(self, rank: int) -> bool:
        """Whether this rank is looked at."""
        return self.ranks is None or rank in self.ranks


class Profiler:
    """One rank's profiles.

    Attributes:
        due: Call `at` once so many updates are applied; `NEVER` where nothing is planned.
    """

    def __init__(
        self,
        world: World,
        settings: ProfileSettings,
        folder: Path | None,
        record: Callable[[LedgerFact], None],
        watches: Mapping[str, Stopwatch] | None = None,
    ) -> None:
        """Plan what the settings ask for.

        `folder` is the attempt's folder of profiles, None without a run directory. `tell` writes a
        fact into the ledger, on rank 0. `watches` are what hpctrain times, by the names in a trace.
        """
        self.due = NEVER
        self._recording = False
        self._watches = watches or {}
        self._world = world
        self._folder = folder
        self._record_fact = record
        self._plans: list[Plan] = []
        self._active = False
        self._tracer: Any = None
        self._mark: record_function | None = None
        self._traced: StepWindow | None = None
        self._writers: list[threading.Thread] = []
        self._history = MemoryHistory(world)
        steps = step_range(settings.steps) if folder is not None else None
        if steps is not None:
            ranks = rank_set(settings.ranks)
            self._plans.append(Plan(StepWindow(*steps), ranks, settings.memory))

    # ---- what the step loop calls

    def begin(self, step: int) -> None:
        """Plan what is next, with `step` updates applied."""
        self._plans = [plan for plan in self._plans if plan.window.last > step]
        self.due = max(step, self._plans[0].window.first - 2) if self._plans else NEVER

    def at(self, step: int) -> None:
        """Step `step + 1` begins and `due` has come: prepare, start, mark or end."""
        try:
            self._advance(step)
        except Exception as error:  # noqa: BLE001 - it costs the profile, never the training
            self._give_up(error)

    def asked(self, step: int, request: ProfileRequest | None) -> None:
        """Take a request that all ranks have agreed to hear; it begins in two steps.

        Collective: every rank calls it after the same exchange, at the same step. `request` is rank
        0's; None on the others, and if it was heard already.
        """
        plain = broadcast(self._world, None if request is None else asdict(request))
        if plain is None or self._folder is None:
            return
        request = ProfileRequest(**plain)
        first = max(step + 2, self._plans[0].window.last + 2 if self._active else 0)
        window = StepWindow(first, first + request.steps - 1)
        fact = ProfileRequested(**asdict(window), ranks=request.ranks, token=request.token)
        self._record_fact(fact)
        self._plans.append(Plan(window, request.ranks, request.memory))
        self._plans.sort(key=lambda one: one.window)
        if not self._active:
            self.begin(step)

    def close(self, left_s: float | None = None) -> None:
        """End the loop: write what was traced, if the `left_s` seconds until the kill allow it."""
        self.due = NEVER
        try:
            if self._recording and (left_s is None or left_s >= ENOUGH_S):
                self._end()
            elif self._recording:
                log.warning("the profile is given up: there is no time to write it")
        except Exception as error:  # noqa: BLE001 - the same
            self._give_up(error)
        self._set_recording(on=False)
        deadline = clock.monotonic() + min(WRITE_S, WRITE_S if left_s is None else left_s / 2)
        for writer in self._writers:
            writer.join(max(0.0, deadline - clock.monotonic()))

    # ---- one profile

    def _advance(self, step: int) -> None:
        plan = self._plans[0]
        coming = step + 1
        self.due, self._active = coming, True
        if coming > plan.window.last:
            self._end()
            self._active = False
            self.begin(step)
            if self.due <= step:
                self._advance(step)
            return
        is_profiled = plan.has(self._world.rank)
        if is_profiled and self._tracer is None:
            self._prepare(plan)
        if coming >= plan.window.first:
            self._traced = StepWindow(self._traced.first if self._traced else coming, coming)
            if is_profiled:
                self._next_mark(coming)

    def _prepare(self, plan: Plan) -> None:
        if plan.memory and not self._history.start():
            log.warning("profile.memory has nothing to record: this rank trains on a CPU")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints where it starts and stops
        is_cuda = self._world.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        self._tracer = profile(activities=activities)
        self._tracer.prepare_trace()

    def _next_mark(self, step: int) -> None:
        """End the span of the step before, if there is one, and begin the next one's."""
        if self._mark is None:
            synchronize(self._world.device)  # the work of the steps lies between their marks
            self._tracer.start_trace()
            self._set_recording(on=True)
        else:
            self._mark.__exit__(None, None, None)
        self._mark = record_function(f"{STEP_MARK}{step}")
        self._mark.__enter__()  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        """The last step of the profile is over: write, behind training."""
        window, plan, tracer = self._traced, self._plans[0], self._tracer
        self._traced = self._tracer = None
        self._set_recording(on=False)
        if window is None or self._folder is None:
            return
        if tracer is not None:
            synchronize(self._world.device)
            if self._mark is not None:
                self._mark.__exit__(None, None, None)
                self._mark = None
            tracer.stop_trace()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._history.stop(self._path(window, SNAPSHOT))
            writer = threading.Thread(
                target=self._write, args=(tracer, window), name="hpctrain-profile", daemon=True
            )
            writer.start()
            self._writers.append(writer)
        folder = str(self._folder)
        self._record_fact(ProfileWritten(**asdict(window), ranks=plan.ranks, folder=folder))

    def _write(self, tracer: profile, window: StepWindow) -> None:
        try:
            path = self._path(window, TRACE)
            staged = path.with_name(f"{path.name}.new.gz")
            tracer.export_chrome_trace(str(staged))
            staged.replace(path)
        except Exception as error:  # noqa: BLE001 - a full disk, mostly
            self._explain(error, window)

    def _set_recording(self, *, on: bool) -> None:
        """While steps are traced, what is timed shows in the trace under its name."""
        self._recording = on
        for name, watch in self._watches.items():
            watch.span = partial(record_function, f"{OURS}{name}") if on else None

    def _path(self, window: StepWindow, suffix: str) -> Path:
        assert self._folder is not None  # noqa: S101 - without one nothing is planned
        return self._folder / file_name(self._world.rank, window, suffix)

    def _give_up(self, error: Exception) -> None:
        """No more profiles on this rank; the others continue, since nothing is exchanged."""
        window = self._traced or (self._plans[0].window if self._plans else None)
        self.due = NEVER
        self._set_recording(on=False)
        self._plans, self._tracer, self._mark, self._traced = [], None, None, None
        self._explain(error, window)

    def _explain(self, error: Exception, window: StepWindow | None) -> None:
        """Say what went wrong in the rank's log, and beside the traces."""
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("profiling has ended: %s", why)
        if window is None or self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path(window, PROBLEM).write_text(f"{why}\n")
        except OSError:  # the log has it
            return


class MemoryHistory:
    """Remembers what allocates, from `start` to `stop`; nothing on a CPU."""

    def __init__(self, world: World) -> None:
        self._is_cuda = world.device.type == "cuda"
        self._recording = False

    def start(self) -> bool:
        """Begin to remember; False where there is nothing that could be remembered."""
        if self._is_cuda:
            # torch documents these two for users, under their private names.
            torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)  # noqa: SLF001
            self._recording = True
        return self._is_cuda

    def stop(self, path: Path) -> None:
        """Write what was remembered, for pytorch.org/memory_viz, and forget it."""
        if not self._recording:
            return
        self._recording = False
        try:
            dump: Callable[[str], None] = torch.cuda.memory._dump_snapshot  # noqa: SLF001
            dump(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
