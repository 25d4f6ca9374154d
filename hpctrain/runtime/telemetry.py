"""One rank's account of its steps: what they took, what they waited for, and who is told.

Every rank counts; rank 0 writes step marks into the ledger, the attempt's heartbeat, and now and
then what all ranks' time went to. What cannot be written costs the fact, never the training.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.run.heartbeat import Heartbeat, write_heartbeat
from hpctrain.runtime.own_work import OwnWork
from hpctrain.runtime.rank_times import (
    Gathering,
    append_sample,
    memory,
    row_of,
    sample_every_s,
    sample_of,
    sampled_before,
    slowest,
)
from hpctrain.runtime.step_log import StepMarks, mark_every_s, run_age_s

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    from hpctrain.run.fence import Attempt
    from hpctrain.run.layout import RunDir
    from hpctrain.world import World


class Stopwatch:
    """Adds up the seconds inside its ``with`` blocks; blocks of one watch may stand inside others.

    Attributes:
        seconds: So far, without a block that is still open.
        span: Makes the span that a trace shows of a block, while a profile is taken.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.span: Callable[[], AbstractContextManager[object]] | None = None
        self._open_span: AbstractContextManager[object] | None = None
        self._clock = clock
        self._depth = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since = self._clock()
            if self.span is not None:
                self._open_span = self.span()
                self._open_span.__enter__()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += self._clock() - self._since
            if self._open_span is not None:
                self._open_span.__exit__(None, None, None)
                self._open_span = None


class Telemetry:
    """Counts this rank's steps and their seconds.

    Attributes:
        saving: Around whatever stops training for a save.
    """

    def __init__(self, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        """Counts from the start; nothing is written before `open`."""
        self._world = world
        self._clock = clock
        self.saving = Stopwatch(clock)
        self._data = Stopwatch(clock)
        self._watches = {"data": self._data}
        self._own = OwnWork(None, elsewhere_s=self._elsewhere_s)
        self._book: _Book | None = None
        self._gathering = Gathering(world)
        self._told: dict[str, float] = {}
        self._before: int | None = None
        self._has_begun = False
        self._step_at = 0.0
        self._saving_before = 0.0
        self._steps, self._wall_s, self._data_before = 0, 0.0, 0.0
        self._step = 0

    def _elsewhere_s(self) -> float:
        return self._data.seconds + self.saving.seconds

    def open(
        self,
        run: RunDir | None,
        attempt: Attempt | None,
        *,
        log_every_s: float,
        model: nn.Module | None,
    ) -> None:
        """Training is about to begin; rank 0 writes from here on where there is a run.

        Args:
            run: The run, if there is one.
            attempt: The attempt in hand.
            log_every_s: Seconds between step marks of a young run.
            model: What trains, for what can be told from its gradients.
        """
        if run is None or attempt is None:
            return
        self._own = OwnWork(model, elsewhere_s=self._elsewhere_s, clock=self._clock)
        if self._world.rank == 0:
            self._book = _Book(
                run, attempt, log_every_s, ranks=self._world.world_size, clock=self._clock
            )

    # ---- what a program says

    def timed(self, what: str) -> Stopwatch:
        """The watch of one kind of waiting.

        Raises:
            UsageError: there is no such kind.
        """
        watch = self._watches.get(what)
        if watch is None:
            raise UsageError(
                f"run.timed({what!r}): only waiting for data is timed; use run.timed('data')"
            )
        return watch

    def log(self, values: dict[str, float]) -> None:
        """Of the step in hand; counts once it is done."""
        if self._book is not None:
            self._told.update(values)

    # ---- the loop

    def step_began(self, consumed: Callable[[], int | None]) -> None:
        """A step begins.

        Args:
            consumed: How many samples all ranks have consumed so far, where the data tells.
        """
        if not self._has_begun:
            self._has_begun = True
            self.saving.seconds = self._data.seconds = 0.0
            if self._book is not None:
                self._book.begin()
        elif self._book is not None and self._book.marks.is_due():
            self.flush()
        if self._book is not None and self._book.marks.is_empty:
            self._before = consumed()
        self._saving_before = self.saving.seconds
        self._own.step_began()
        self._step_at = self._clock()

    def step_done(self, step: int, consumed: Callable[[], int | None]) -> float:
        """Step `step` is done; returns its seconds, without what a save stopped it."""
        stopped = self.saving.seconds - self._saving_before
        seconds = max(0.0, self._clock() - self._step_at - stopped)
        self._own.step_done()
        self._steps += 1
        self._wall_s += seconds
        if self._book is not None:
            self._book.marks.add(step, (self._before, consumed()), seconds, self._told)
            self._told.clear()
            self._book.beat(step)
            self._land()
        self._step = step
        return seconds

    def flush(self, *, at_save: bool = False) -> None:
        """Write the step mark that is due, or lest the ledger be behind a checkpoint."""
        if self._book is not None:
            self._book.flush(self.so_far(), at_save=at_save)

    def so_far(self) -> dict[str, float]:
        """Seconds since the first step began, as fields of the ledger."""
        return {"data_s": round(self._data.seconds, 3), "save_s": round(self.saving.seconds, 3)}

    # ---- all ranks

    def wishes_to_tell(self) -> bool:
        """Rank 0: whether all ranks should tell what their time went to."""
        if self._book is None or not self._steps or self._gathering.in_flight:
            return False
        return self._book.is_sample_due()

    def tell(self, *, at_end: bool = False) -> None:
        """Gather what this rank's time went to since the last call. Collective.

        Args:
            at_end: Wait for the others' rows; otherwise they land behind the next steps.
        """
        values = {"wall_s": self._wall_s, "data_s": self._data.seconds - self._data_before}
        own = self._own.take(self._steps)
        if own is not None:
            values["own_s"] = own
        self._land(wait=True)
        self._gathering.launch(row_of(values | memory(self._world.device)))
        if self._book is not None:
            self._book.sampled(self._step, self._steps)
        self._steps, self._wall_s, self._data_before = 0, 0.0, self._data.seconds
        self._land(wait=at_end)

    def _land(self, *, wait: bool = False) -> None:
        rows = self._gathering.landed(wait=wait) if self._book is not None else None
        if rows is not None and self._book is not None:
            self._book.write_sample(rows)


class _Book:
    """What rank 0 writes."""

    def __init__(
        self,
        run: RunDir,
        attempt: Attempt,
        log_every_s: float,
        *,
        ranks: int,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._attempt = attempt.number
        self._log_every_s = log_every_s
        self._ranks = ranks
        self._clock = clock
        now, wall = clock(), time.time()
        self._born = now - run_age_s(run, wall)
        before = sampled_before(run, attempt.number)
        # By the run's clock, not the attempt's: of many short attempts some are told of.
        self._sample_at = now - (wall - before) if before is not None else -math.inf
        self._beat_at = -math.inf
        self._begun_at = now
        self._window = (0, 0)
        self._slow: dict[str, float] = {}
        self._silent = False
        self.marks = StepMarks(run, attempt, self._mark_every_s, clock=clock)

    def _mark_every_s(self) -> float:
        return mark_every_s(self._clock() - self._born, self._log_every_s)

    def begin(self) -> None:
        """The first step begins."""
        self.marks.begin()
        self._begun_at = self._clock()

    def flush(self, so_far: dict[str, float], *, at_save: bool) -> None:
        """Write a step mark, if steps were done since the last."""
        if not self.marks.is_empty:
            self.marks.flush(**so_far, at_save=at_save or None, **self._slow)
            self._slow = {}

    def beat(self, step: int) -> None:
        """Write the heartbeat, if the last is old enough."""
        now = self._clock()
        if now - self._beat_at < self._log_every_s:
            return
        self._beat_at = now
        try:
            write_heartbeat(self._run, self._attempt, Heartbeat(time.time(), step))
        except OSError as error:
            self._cannot(error)

    def is_sample_due(self) -> bool:
        """Whether the ranks should tell."""
        now = self._clock()
        every_s = sample_every_s(now - self._born, self._log_every_s, self._ranks)
        settled = now - self._begun_at >= self._mark_every_s()
        return settled and now - self._sample_at >= every_s

    def sampled(self, step: int, steps: int) -> None:
        """Rows of so many steps up to this one are on their way."""
        self._sample_at, self._window = self._clock(), (step, steps)

    def write_sample(self, rows: list[list[float]]) -> None:
        """Add the rows of all ranks to the attempt's file."""
        step, steps = self._window
        if not steps:
            return
        sample = sample_of(time.time(), step, steps, rows)
        self._slow = slowest(sample)  # for the next mark
        try:
            append_sample(self._run, self._attempt, sample)
        except OSError as error:
            self._cannot(error)

    def _cannot(self, error: OSError) -> None:
        """Said once: this may come every few seconds."""
        if not self._silent:
            self._silent = True
            print(f"hpctrain: cannot write how the ranks do: {error}", file=sys.stderr, flush=True)
