"""Read what a report needs from a run's directory, and make curves of it. The room's only reader.

What is missing or torn is left out and named in `problems`; no content of a run directory makes it
raise. A curve is a list of (x, y); y is None where nothing is known, which breaks the line.
Thinning keeps the extremes, so no spike is hidden.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base.files import read_plain
from hpctrain.core.settings.spec import Spec, spec_or_why
from hpctrain.ledger.history.progress import RankSample, rank_sample
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_records import Restore, SaveRecord, StepMark
from hpctrain.ledger.run.event_fields import finite
from hpctrain.observe.status.text import unaccounted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.status.status import RunStatus


MOST_POINTS = 2000
"""Of one curve: a phone can still draw ten of them."""
MOST_BARS = 256

Point = tuple[float, float | None]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many of the points: of each stretch the highest, the lowest and one gap."""
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 3
    kept = {0, len(points) - 1}
    for number in range(stretches):
        begin = number * len(points) // stretches
        end = (number + 1) * len(points) // stretches
        values = [(y, at) for at in range(begin, end) if (y := points[at][1]) is not None]
        gap = next((at for at in range(begin, end) if points[at][1] is None), None)
        kept |= {min(values)[1], max(values)[1]} if values else set()
        kept |= set() if gap is None else {gap}
    return [points[at] for at in sorted(kept)]


def by_step(marks: Sequence[StepRow], value: Callable[[StepRow], float | None]) -> list[Point]:
    """A value at the last step of each mark, thinned."""
    return thin([(mark.last, value(mark)) for mark in marks])


def by_time(marks: Sequence[StepRow], value: Callable[[StepRow], float | None]) -> list[Point]:
    """A value at the time of each mark, with a gap between attempts, thinned."""
    points: list[Point] = []
    before: int | None = None
    for mark in marks:
        if points and mark.attempt != before:
            points.append(((points[-1][0] + mark.t) / 2, None))
        before = mark.attempt
        points.append((mark.t, value(mark)))
    return thin(points)


@dataclass(frozen=True)
class Unit:
    """What throughput is counted in."""

    name: str
    of: Callable[[StepRow], float | None]

    def rate(self, mark: StepRow) -> float | None:
        """So many a second in the mark's window."""
        done = self.of(mark)
        return None if done is None or not mark.seconds or mark.seconds < 0 else done / mark.seconds


TOKENS = Unit("tokens", lambda mark: mark.tokens)
SAMPLES = Unit("samples", lambda mark: mark.samples)
STEPS = Unit("steps", lambda mark: float(mark.steps))


def unit_of(marks: Sequence[StepRow]) -> Unit:
    """Tokens where the program tells them, else samples, else steps."""
    units = (one for one in (TOKENS, SAMPLES) if any(one.of(mark) is not None for mark in marks))
    return next(units, STEPS)


def step_p50(mark: StepRow) -> float | None:
    """Median step time of a mark; the mean where only that is known."""
    if mark.p50_s is not None or not mark.seconds:
        return mark.p50_s
    return mark.seconds / mark.steps


def median(values: Sequence[float | None]) -> float | None:
    """Of the values that are known; None for none."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


# ---- ranks


def groups(count: int, most: int) -> list[range]:
    """Neighbouring ranks put together, so that there are at most so many groups."""
    size = max(1, math.ceil(count / most))
    return [range(low, min(count, low + size)) for low in range(0, count, size)]


def newest_samples(samples: Sequence[RankSample]) -> list[RankSample]:
    """The samples of the newest attempt that has some: one world size, one set of nodes."""
    if not samples:
        return []
    newest, size = samples[-1].attempt, len(samples[-1].wall_s)
    return [one for one in samples if one.attempt == newest and len(one.wall_s) == size]


@dataclass(frozen=True)
class Waits:
    """Where the ranks' time went, each a list by rank; seconds.

    `own_s` is None where nobody can tell it from waiting for others; `slowest` counts how often
    each rank was the slowest of a sample; `behind` is the median share by which a rank was above
    the median of the ranks.
    """

    wall_s: list[float]
    data_s: list[float]
    own_s: list[float] | None
    slowest: Counter[int]
    samples: int
    behind: list[float]


def waits(samples: Sequence[RankSample]) -> Waits | None:
    """Sums over the newest attempt's samples; None without any."""
    latest = newest_samples(samples)
    if not latest:
        return None
    size = len(latest[-1].wall_s)
    all_known = all(sample.own_s is not None for sample in latest)
    none = (0.0,) * size
    slowest: Counter[int] = Counter()
    shares: list[list[float]] = []
    for sample in latest:
        busy = sample.busy_s
        middle = statistics.median(busy)
        slowest[max(range(size), key=busy.__getitem__)] += 1
        shares.append([value / middle - 1 if middle > 0 else 0.0 for value in busy])
    return Waits(
        wall_s=_sums([sample.wall_s for sample in latest]),
        data_s=_sums([sample.data_s or none for sample in latest]),
        own_s=_sums([sample.own_s or none for sample in latest]) if all_known else None,
        slowest=slowest,
        samples=len(latest),
        behind=[statistics.median(column) for column in zip(*shares, strict=True)],
    )


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows, strict=True)]


@dataclass(frozen=True)
class MemoryPeaks:
    """What each rank's device held at most in the newest attempt that told, bytes."""

    attempt: int
    peak: list[float]
    reserved: list[float] | None
    retries: float


def memory(samples: Sequence[RankSample]) -> MemoryPeaks | None:
    """The highest of all its samples; None where no attempt told."""
    latest = newest_samples([sample for sample in samples if sample.peak_bytes is not None])
    if not latest:
        return None
    peaks = [sample.peak_bytes for sample in latest if sample.peak_bytes is not None]
    reserved = [sample.reserved_bytes for sample in latest if sample.reserved_bytes is not None]
    retries = [sample.retries for sample in latest if sample.retries is not None]
    return MemoryPeaks(
        attempt=latest[-1].attempt,
        peak=[max(column) for column in zip(*peaks, strict=True)],
        reserved=[max(column) for column in zip(*reserved, strict=True)] if reserved else None,
        retries=sum(max(column) for column in zip(*retries, strict=True)) if retries else 0.0,
    )


def thin_saves(saves: Sequence[SaveRecord], most: int = MOST_BARS) -> list[SaveRecord]:
    """At most so many: of neighbouring saves the one that training waited longest for."""
    return [
        max((saves[at] for at in group), key=lambda one: (one.cost_s or 0.0, one.step or 0))
        for group in groups(len(saves), most)
    ]


MOST_BYTES = 1 << 30
"""Of one attempt's samples."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """Steps that were done since the mark before.

    `t` is the end of its window, seconds since the epoch; `last` is inclusive; `tokens` and
    `samples` are over all ranks.
    """

    t: float
    attempt: int | None
    first: int
    last: int
    seconds: float | None = None
    loss: float | None = None
    p50_s: float | None = None
    tokens: float | None = None
    samples: int | None = None
    grad_norm: float | None = None

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first + 1


def steps_of(run: RunHistory) -> tuple[list[StepRow], list[StepRow]]:
    """Every mark, also of steps that were done again; and each step of the newest state once."""
    marks: list[StepRow] = []
    kept: list[StepRow] = []
    for point in run.training:
        if isinstance(point, Restore):
            while kept and kept[-1].last > point.step:
                kept.pop()
        elif (mark := _mark(point)) is not None:
            marks.append(mark)
            kept.append(mark)
    return marks, kept


def _mark(mark: StepMark) -> StepRow | None:
    fact = mark.fact
    if not mark.steps or fact.first is None or fact.last is None:
        return None
    begin, end = fact.sample_first, fact.sample_last
    samples = end - begin if begin is not None and end is not None and end > begin else None
    names = ("seconds", "loss", "p50_s", "tokens", "grad_norm")
    values = {name: finite(getattr(fact, name)) for name in names}
    return StepRow(mark.t, mark.attempt, fact.first, fact.last, samples=samples, **values)


@dataclass(frozen=True)
class ReportData:
    """All that a report shows of one run.

    Attributes:
        marks: All of its steps, also those that were done again.
        kept: Each step of the newest state once.
        saves: Those that were committed.
        missed: How many saves failed or were left out.
        excluded: Nodes, each with the attempt that did without.
        ranks: The samples of every attempt that has some, in order.
        problems: What could not be read, a line each.
    """

    status: RunStatus
    marks: Sequence[StepRow]
    kept: Sequence[StepRow]
    resumes: Sequence[Restore]
    saves: Sequence[SaveRecord]
    missed: int
    excluded: Sequence[tuple[int | None, str]]
    ranks: Sequence[RankSample]
    spec: Spec | None
    problems: Sequence[str]

    @property
    def steps_lost(self) -> int | None:
        """Steps that were lost, over all attempts; None if none was reported."""
        return self.status.steps_lost.steps


def gather(run: RunDir, status: RunStatus) -> ReportData:
    """Read a run's directory, of which nothing has to be there."""
    history = RunHistory.read(run)
    problems = [] if history.count else [f"{run.events} is not there, or holds no event"]
    spec, why = spec_or_why(run.spec)
    if status.answer.problem and spec is not None:
        problems.append(f"the scheduler gave no answer: {status.answer.problem}")
    if status.answer.unaccounted:
        problems.append(unaccounted(status.answer.unaccounted))
    samples, torn = _samples(run, [one.number for one in status.attempts])
    marks, kept = steps_of(history)
    saves = [save for save in history.saves if save.committed]
    return ReportData(
        status=status,
        marks=marks,
        kept=kept,
        resumes=[point for point in history.training if isinstance(point, Restore)],
        saves=saves,
        missed=len(history.saves) - len(saves),
        excluded=history.excluded,
        ranks=samples,
        spec=spec,
        problems=[*problems, *([why] if why else []), *torn],
    )


def _samples(run: RunDir, numbers: Sequence[int]) -> tuple[list[RankSample], list[str]]:
    """Samples of all attempts in order, and what could not be read."""
    samples: list[RankSample] = []
    problems: list[str] = []
    for number in numbers:
        path = run.rank_times(number)
        try:
            lines = read_plain(path, MOST_BYTES).splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        whole = [sample for line in lines if (sample := rank_sample(line, number)) is not None]
        samples += whole
        # The last line is torn in every file that is being written; more are worth a word.
        if len(whole) < len(lines) - 1:
            problems.append(f"{path}: {len(lines) - len(whole)} of {len(lines)} lines are torn")
    return samples, problems
