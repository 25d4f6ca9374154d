"""One rank's account of its steps: what they took, what they waited for, and who is slow.

Every rank counts; rank 0 writes step marks into the ledger, the attempt's heartbeat, and now and
then what all ranks' time and memory went to (`StopRequest.tell`). What cannot be written costs the
fact, never the training. What tells ranks apart is the time up to a rank's last gradient
(`ComputeTime`), which can be seen under DDP alone. tests/unit/runtime/test_step_log.py and
tests/engines/test_telemetry.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import resource
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.base import clock
from hpctrain.core.device import is_accelerator, memory_stats, timing_event
from hpctrain.core.world import gather
from hpctrain.errors import UsageError
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.attempt_files import Heartbeat, write_heartbeat
from hpctrain.ledger.run.event_types import StepsDone
from hpctrain.node.control import heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import Pending, World
    from hpctrain.ledger.run.layout import RunDir


log = logging.getLogger("hpctrain.runtime")

SECONDS = ("wall_s", "data_s", "own_s")
WHOLE = ("mem_peak_bytes", "mem_reserved_bytes", "mem_retries")
SAMPLES_A_FOLD = 10
"""At most so many samples while a run's age grows e-fold, until it is old; see `sample_every_s`."""
MONTH_S = 30 * 86400.0
YOUNG_S = 60.0
BUDGET_BYTES = 20e6
"""Of a month's samples: a line grows with the ranks, so lines come less often."""
LINE_BYTES, RANK_BYTES = 140, 52
LOOK_BACK = 20
"""Attempts: those that died before their first sample left no file."""


class Telemetry:
    """Counts this rank's steps and their seconds.

    Attributes:
        saving: Around whatever stops training for a save.
        total: Steps that the program is to do in all; None where it does not say.
    """

    def __init__(self, world: World) -> None:
        """Count from the start; nothing is written before `open`."""
        self._world = world
        self.total: int | None = None
        self.saving = Stopwatch(heartbeat.SAVE)
        self._data = Stopwatch(heartbeat.DATA)
        self._own = ComputeTime(None, elsewhere_s=self._elsewhere_s)
        self._writer: Rank0Writer | None = None
        self._gathering = Gathering(world)
        self._has_begun = False
        self._step_at = 0.0
        self._saving_before = 0.0
        self._steps, self._wall_s, self._data_before = 0, 0.0, 0.0
        self._step = 0

    def _elsewhere_s(self) -> float:
        return self._data.seconds + self.saving.seconds

    def open(self, place: SavePlace | None, *, log_every_s: float, model: nn.Module | None) -> None:
        """Prepare for training; from here on rank 0 writes, if there is a run.

        `log_every_s` are the seconds between step marks of a young run; `model` is whose gradients
        to watch.
        """
        if place is None:
            return
        self._own = ComputeTime(model, elsewhere_s=self._elsewhere_s)
        if self._world.rank == 0:
            self._writer = Rank0Writer(
                place.run, place.attempt.number, log_every_s, ranks=self._world.world_size
            )

    # ---- what a program says

    def timed(self, what: str) -> Stopwatch:
        """The watch of one kind of waiting.

        Raises:
            UsageError: there is no such kind.
        """
        if what != "data":
            raise UsageError(
                f"run.timed({what!r}): only waiting for data is timed; use run.timed('data')"
            )
        return self._data

    def log(self, values: dict[str, float]) -> None:
        """Of the step in hand; counts once it is done."""
        if self._writer is not None:
            self._writer.logged.update(values)

    def log_late(self) -> None:
        """What was logged since is of the last step; of the next one where that mark is written."""
        if self._writer is not None and not self._writer.marks.is_empty:
            self._writer.marks.tell(self._writer.logged)
            self._writer.logged.clear()

    # ---- the loop

    def step_began(self, consumed: int | None) -> None:
        """Begin a step; all ranks have used so many samples, None if the data does not tell."""
        now = clock.monotonic()
        if not self._has_begun:
            self._has_begun = True
            self.saving.seconds = self._data.seconds = 0.0
            if self._writer is not None:
                self._writer.begin()
        elif self._writer is not None and self._writer.marks.is_due(now):
            self.flush()
            now = clock.monotonic()
        if self._writer is not None:
            self._writer.step_began(consumed)
        self._saving_before = self.saving.seconds
        self._own.step_began()
        self._step_at = now

    def step_done(
        self, step: int, consumed: int | None, *, steps: int = 1, timed: bool = True
    ) -> float:
        """End step `step`; return its seconds, without the time that a save stopped it.

        `steps` are how many were done. Unless `timed`, they were not done since `step_began`, and
        their seconds are not known.
        """
        now = clock.monotonic()
        stopped = self.saving.seconds - self._saving_before
        seconds = max(0.0, now - self._step_at - stopped)
        self._own.step_done()
        self._steps += steps
        self._wall_s += seconds
        self._step = step
        if self._writer is not None:
            took = seconds if timed else None
            self._writer.step_done(step, consumed, took, steps=steps, now=now)
            self._land()
        return seconds

    def flush(self, *, at_save: bool = False) -> None:
        """Write the step mark that is due, or lest the ledger be behind a checkpoint."""
        if self._writer is not None:
            self._writer.flush({**self.so_far(), "total": self.total}, at_save=at_save)

    def so_far(self) -> dict[str, Any]:
        """Seconds since the first step began, as fields of the ledger."""
        return {"data_s": round(self._data.seconds, 3), "save_s": round(self.saving.seconds, 3)}

    # ---- all ranks

    def is_report_due(self) -> bool:
        """Rank 0: whether all ranks should tell what their time went to."""
        if self._writer is None or not self._steps or self._gathering.in_flight:
            return False
        return self._writer.is_sample_due()

    def tell(self, *, at_end: bool = False) -> None:
        """Gather what this rank's time went to since the last call. Collective.

        With `at_end`, wait for the others' rows; otherwise they land behind the next steps.
        """
        values = {"wall_s": self._wall_s, "data_s": self._data.seconds - self._data_before}
        own = self._own.take(self._steps)
        if own is not None:
            values["own_s"] = own
        self._land(wait=True)
        self._gathering.launch(row_of(values | memory(self._world.device)))
        if self._writer is not None:
            self._writer.sampled(self._step, self._steps)
        self._steps, self._wall_s, self._data_before = 0, 0.0, self._data.seconds
        self._land(wait=at_end)
        if at_end:
            # Race: a rank that leaves while rank 0 still reads its row takes the connection away.
            gather(self._world, None)

    def _land(self, *, wait: bool = False) -> None:
        rows = self._gathering.landed(wait=wait) if self._writer is not None else None
        if rows is not None and self._writer is not None:
            self._writer.write_sample(rows)


class Rank0Writer:
    """What rank 0 writes: step marks, the heartbeat, and samples of all ranks.

    Attributes:
        marks: The steps since the last mark.
        logged: What the program has logged of the step in hand.
    """

    def __init__(self, run: RunDir, attempt: int, log_every_s: float, *, ranks: int) -> None:
        """Write at the pace of the run's age; nothing is written yet."""
        self._run = run
        self._attempt = attempt
        self._log_every_s = log_every_s
        self._ranks = ranks
        now, wall = clock.monotonic(), clock.now()
        self._born = now - run_age_s(run, wall)
        before = sampled_before(run, attempt)
        # By the run's clock, not the attempt's: some of many short attempts are recorded.
        self._sample_at = now - (wall - before) if before is not None else -math.inf
        self._beat_at = self._sample_due = -math.inf
        self._begun_at = now
        self._window = (0, 0)
        self._slow: dict[str, float] = {}
        self._silent = False
        self._before: int | None = None
        self.logged: dict[str, float] = {}
        self.marks = StepLog(run, attempt, self._mark_every_s)

    def _mark_every_s(self, now: float) -> float:
        return mark_every_s(now - self._born, self._log_every_s)

    def begin(self) -> None:
        """The first step begins: what went before (the restore) is no step's time."""
        self.marks.begin()
        self._begun_at = clock.monotonic()

    def step_began(self, consumed: int | None) -> None:
        """A step begins, behind so many samples."""
        if self.marks.is_empty:
            self._before = consumed

    def step_done(
        self, step: int, consumed: int | None, seconds: float | None, *, steps: int, now: float
    ) -> None:
        """Count steps up to this one, and write the heartbeat if the last is old enough."""
        self.marks.add(step, (self._before, consumed), seconds, self.logged, steps=steps)
        self.logged.clear()
        if now - self._beat_at < self._log_every_s:
            return
        self._beat_at = now
        try:
            write_heartbeat(self._run, self._attempt, Heartbeat(clock.now(), step))
        except OSError as error:
            self._cannot(error)

    def flush(self, so_far: dict[str, Any], *, at_save: bool) -> None:
        """Write a step mark, if steps were done since the last."""
        if not self.marks.is_empty:
            self.marks.flush(**so_far, at_save=at_save or None, **self._slow)
            self._slow = {}

    def is_sample_due(self) -> bool:
        """Whether the ranks should tell.

        The distances grow with the run's age, so what is not due by one of them is not due before
        it has passed: they are computed again only then.
        """
        now = clock.monotonic()
        if now < self._sample_due:
            return False
        every_s = sample_every_s(now - self._born, self._log_every_s, self._ranks)
        settled = self._begun_at + self._mark_every_s(now)
        self._sample_due = max(self._sample_at + every_s, settled)
        return now >= self._sample_due

    def sampled(self, step: int, steps: int) -> None:
        """Rows of so many steps up to this one are on their way."""
        self._sample_at, self._window = clock.monotonic(), (step, steps)

    def write_sample(self, rows: list[list[float]]) -> None:
        """Add the rows of all ranks to the attempt's file."""
        step, steps = self._window
        if not steps:
            return
        sample = sample_of(clock.now(), step, steps, rows)
        self._slow = slowest(sample)  # for the next mark
        try:
            append_sample(self._run, self._attempt, sample)
        except OSError as error:
            self._cannot(error)

    def _cannot(self, error: OSError) -> None:
        """Said once: this may come every few seconds."""
        if not self._silent:
            self._silent = True
            log.warning("cannot write how the ranks do: %s", error)


class Stopwatch:
    """Adds up the seconds inside its ``with`` blocks; blocks of one watch may stand inside others.

    Attributes:
        seconds: So far, without a block that is still open.
        span: Makes the span that a trace shows of a block, while a profile is taken.
    """

    def __init__(self, phase: int) -> None:
        self.seconds = 0.0
        self._phase, self._phase_before = phase, 0
        self.span: Callable[[], AbstractContextManager[object]] | None = None
        self._open_span: AbstractContextManager[object] | None = None
        self._depth = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since = clock.monotonic()
            self._phase_before = heartbeat.here().enter(self._phase)
            if self.span is not None:
                self._open_span = self.span()
                self._open_span.__enter__()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += clock.monotonic() - self._since
            heartbeat.here().back(self._phase_before)
            if self._open_span is not None:
                self._open_span.__exit__(None, None, None)
                self._open_span = None


class ComputeTime:
    """Measures one rank's own work; `take` gives it for a window of steps."""

    def __init__(self, model: nn.Module | None, *, elsewhere_s: Callable[[], float]) -> None:
        """Put hooks on a model that is wrapped in DDP; leave any other alone.

        `elsewhere_s` returns the seconds so far that count as no work: waiting for data, saving.
        """
        self._elsewhere_s = elsewhere_s
        self._device: torch.device | None = None
        self._hooks: dict[int, Any] = {}
        self._latest: int | None = None
        self._start: tuple[Any, float] | None = None
        self._end: tuple[Any, float] | None = None
        self._seconds, self._counted = 0.0, 0
        if isinstance(model, DistributedDataParallel):
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            if is_accelerator(parameter.device):
                self._device = parameter.device
            if parameter.requires_grad:
                hook = partial(self._has_gradient, number)
                added = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks[number] = added

    def _has_gradient(self, number: int, _: torch.Tensor) -> None:
        self._latest = number
        self._end = (self._moment(), self._elsewhere_s())

    def _moment(self) -> Any:
        """Now, on the device that does the work."""
        if self._device is None:
            return clock.monotonic()
        return timing_event(self._device)

    def step_began(self) -> None:
        """A step begins."""
        if self._hooks:
            self._start, self._end = (self._moment(), self._elsewhere_s()), None

    def step_done(self) -> None:
        """A step is done; one whose last gradient was not seen does not count."""
        if self._start is None or self._end is None:
            return
        if len(self._hooks) > 1:
            self._keep_the_latest()
        passed = self._between(self._start[0], self._end[0])
        if passed is not None:
            self._seconds += max(0.0, passed - (self._end[1] - self._start[1]))
            self._counted += 1

    def _keep_the_latest(self) -> None:
        """The first step has shown whose gradient comes last; a hook on each would cost more."""
        for number in [number for number in self._hooks if number != self._latest]:
            self._hooks.pop(number).remove()

    def _between(self, start: Any, end: Any) -> float | None:
        if self._device is None:
            return float(end - start)
        if not end.query():  # nor is it waited for: a step must not be slower for being measured
            return None
        return float(start.elapsed_time(end)) / 1e3

    def take(self, steps: int) -> float | None:
        """Seconds in the last `steps` steps, and begin anew; None where they are not known."""
        seconds, counted = self._seconds, self._counted
        self._seconds, self._counted = 0.0, 0
        return seconds * steps / counted if counted else None


def sample_every_s(run_age_s: float, log_every_s: float, world_size: int) -> float:
    """Seconds between samples of all ranks in a run of this age.

    The budget limits the lines of a month. At most half of them are of the run's youth, at equal
    parts of its age (at most `SAMPLES_A_FOLD` in each e-fold); the others lie all over the month.
    """
    least = mark_every_s(run_age_s, log_every_s)
    lines = BUDGET_BYTES / (LINE_BYTES + RANK_BYTES * world_size)
    folds = math.log(MONTH_S / YOUNG_S)
    young = min(SAMPLES_A_FOLD * folds, lines / 2)
    return max(least, min(run_age_s * folds / young, MONTH_S / (lines - young)))


MEMORY = {
    "mem_peak_bytes": "allocated_bytes.all.peak",
    "mem_reserved_bytes": "reserved_bytes.all.peak",
    "mem_retries": "num_alloc_retries",
}
"""Of a sample's names, what torch's allocators call them."""


def memory(device: torch.device) -> dict[str, float]:
    """This rank's memory, by its names in a sample; what is not known is left out."""
    if not is_accelerator(device):
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"mem_peak_bytes": kib * 1024.0}
    stats = memory_stats(device)
    return {name: float(stats[key]) for name, key in MEMORY.items() if key in stats}


class Gathering:
    """One gather at a time, of a row of numbers for each rank, to rank 0."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._row: list[float] | None = None
        self._others: Pending | None = None

    @property
    def in_flight(self) -> bool:
        """Rank 0: whether rows are on their way."""
        return self._row is not None

    def launch(self, row: Sequence[float]) -> None:
        """Send this rank's row; collective, and all ranks send equally many numbers."""
        if self._others is not None:
            self._others.values()
        self._row, self._others = list(row), None
        if self._world.control is not None:
            self._others = self._world.control.send_to_0(self._row)

    def landed(self, *, wait: bool = False) -> list[list[float]] | None:
        """Rank 0: every rank's row once they are all there; None before, and with nothing sent."""
        if self._row is None:
            return None
        rows = [self._row]
        if self._others is not None:
            if not wait and not self._others.is_done():
                return None
            rows = self._others.values()
        self._row, self._others = None, None
        return rows


def row_of(values: dict[str, float]) -> list[float]:
    """A rank's numbers in their order on the wire; what it does not know is no number."""
    return [values.get(name, math.nan) for name in (*SECONDS, *WHOLE)]


def sample_of(t: float, step: int, steps: int, rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """All ranks' rows as one sample, without what one rank does not know."""
    sample: dict[str, Any] = {"t": round(t, 3), "step": step, "steps": steps}
    for position, name in enumerate((*SECONDS, *WHOLE)):
        values = [row[position] for row in rows]
        is_whole = not any(math.isnan(value) for value in values)
        convert = int if name in WHOLE else partial(round, ndigits=4)
        sample[name] = [convert(value) for value in values] if is_whole else None
    return sample


def append_sample(run: RunDir, attempt: int, sample: dict[str, Any]) -> None:
    """Add a sample to the attempt's file, for `history.progress`. Rank 0 alone calls it.

    Raises:
        OSError: it could not be written.
    """
    line = json.dumps(sample, separators=(",", ":"))
    with run.rank_times(attempt).open("a") as file:
        file.write(line + "\n")


def sampled_before(run: RunDir, attempt: int) -> float | None:
    """When an earlier attempt's last sample was written, seconds since the epoch."""
    for number in range(attempt - 1, max(0, attempt - 1 - LOOK_BACK), -1):
        with contextlib.suppress(OSError):
            return run.rank_times(number).stat().st_mtime
    return None


def slowest(sample: dict[str, Any]) -> dict[str, float]:
    """The rank with the most work of its own, and how far it is above the median of all ranks.

    As fields of a step mark; empty where nobody can tell, or with one rank.
    """
    own: list[float] = sample["own_s"] or []
    usual = statistics.median_low(own) if len(own) > 1 else 0.0
    if usual <= 0:
        return {}
    rank = max(range(len(own)), key=own.__getitem__)
    return {"slow_rank": rank, "slow_by": round(own[rank] / usual - 1, 3)}


# ---- step marks

STRETCH = 200
"""A mark for each so-manieth of the run's age: what is older is looked at in less detail."""
LONGEST_S = 60.0
KEPT = 4096
"""Step times in memory at a time; of more, every second one is forgotten."""
EXACT = 1e15
"""Sums below it are written digit by digit."""
SUMMED = ("tokens", "flops", "skipped")


def mark_every_s(run_age_s: float, log_every_s: float) -> float:
    """Seconds between step marks in a run of this age; 0 is every step's, at any age."""
    if log_every_s <= 0:
        return 0.0
    return min(max(run_age_s / STRETCH, log_every_s), max(LONGEST_S, log_every_s))


def run_age_s(run: RunDir, now: float) -> float:
    """Seconds since the first fact of the run that can be read; 0 without one."""
    try:
        first = ledger.first_fact(run)
    except OSError:
        return 0.0
    return max(0.0, now - first.t) if first is not None else 0.0


class StepTimes:
    """Quantiles of step times, in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._count = 0
        self._every = 1

    def add(self, seconds: float) -> None:
        """One step took so long."""
        if self._count % self._every == 0:
            self._kept.append(seconds)
        self._count += 1
        if len(self._kept) >= KEPT:
            self._kept, self._every = self._kept[::2], 2 * self._every

    def quantile(self, share: float) -> float | None:
        """The time that this share of the steps stays within; None without steps."""
        if not self._kept:
            return None
        ordered = sorted(self._kept)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class StepLog:
    """Gathers steps, and writes a mark of them when told to."""

    def __init__(self, run: RunDir, attempt: int, every_s: Callable[[float], float]) -> None:
        """Start with an empty mark; `every_s` returns the seconds between marks at a moment."""
        self._run = run
        self._attempt = attempt
        self._every_s = every_s
        self._first: int | None = None
        self._last = 0
        self._samples: tuple[int | None, int | None] = (None, None)
        self._loss: float | None = None
        self._grad_norm: float | None = None
        self.begin()

    def begin(self) -> None:
        """Begin an empty mark now."""
        self._first = None
        self._since = self._due = clock.monotonic()
        self._times = StepTimes()
        self._sums: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no step was done since the last mark."""
        return self._first is None

    def add(
        self,
        step: int,
        samples: tuple[int | None, int | None],
        seconds: float | None,
        values: Mapping[str, float],
        *,
        steps: int = 1,
    ) -> None:
        """Record that step `step` is done (that many updates are applied).

        `samples` are those consumed before the steps of this mark, and those consumed now.
        `seconds` leave out saves; None if unknown. `values` come from `run.log`. `steps` were done
        since the last call.
        """
        if self._first is None:
            self._first = step - steps + 1
            self._samples = samples
        self._last = step
        self._samples = (self._samples[0], samples[1])
        if seconds is not None:
            self._times.add(seconds / steps)
        self.tell(values)

    def tell(self, values: Mapping[str, float]) -> None:
        """What the program said of the last step, also after it was counted."""
        self._loss = values.get("loss", self._loss)
        self._grad_norm = values.get("grad_norm", self._grad_norm)
        for name in SUMMED:
            if name in values:
                self._sums[name] = self._sums.get(name, 0.0) + values[name]

    def is_due(self, now: float) -> bool:
        """Whether a mark should be written; as for samples, the distance between marks grows."""
        if self._first is None or now < self._due:
            return False
        self._due = self._since + self._every_s(now)
        return now >= self._due

    def flush(self, **more: Any) -> None:
        """Write what was gathered, with more fields of `StepsDone`."""
        if self._first is not None:
            more |= {name: _plain(value) for name, value in self._sums.items() if value}
            mark = StepsDone(
                first=self._first,
                last=self._last,
                sample_first=self._samples[0],
                sample_last=self._samples[1],
                loss=self._loss,
                grad_norm=_rounded(self._grad_norm),
                seconds=round(clock.monotonic() - self._since, 3),
                p50_s=_rounded(self._times.quantile(0.5)),
                p95_s=_rounded(self._times.quantile(0.95)),
                **more,
            )
            ledger.record(self._run, mark, attempt=self._attempt)
        self.begin()


def _rounded(value: float | None) -> float | None:
    """Six digits say enough of a measurement."""
    return None if value is None else float(f"{value:.6g}")


def _plain(value: float) -> float:
    """A whole number without a point, where that is shorter."""
    return int(value) if value.is_integer() and value < EXACT else float(f"{value:.6g}")
