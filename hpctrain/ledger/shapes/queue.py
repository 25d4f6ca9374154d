"""Which shapes a job may have, when the queue has room for them, and how long they wait.

SLURM is queried about every candidate, so there are at most `MOST` of them. Short limits are among
them on purpose: backfill starts short jobs in holes of the schedule. `sbatch --test-only` does not
see these holes: with jobs pending, SLURM 22.05 gives the same start for every time limit
(measured). `QueueView` finds them in the queue that a user sees; a node with a job on it counts as
taken.

An estimate of "now" is certain. A later one is by time limits, and most jobs end before theirs, so
it is mostly too late, and the more so for a short job. Waits of own jobs of a like shape are the
other source. Both are combined by how certain each is. A wait counts as log-normal.

Pure. tests/unit/shapes/test_candidates.py, test_windows.py and test_waits.py hold the promises.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.core.base.text import count, duration, in_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST = 12
MOST_SIZES = 6
"""Numbers of nodes among the candidates: with four, none lay near the middle's node-hours, and
`balanced` took 1.7 times as long as a fixed shape (benchmarks/time_to_result.py)."""
LADDER_S = tuple(minutes * 60 for minutes in (10, 30, 60, 120, 240, 480, 720, 1440, 2880, 10080))
"""Time limits that are tried, as far as the site allows them."""
UNLIMITED_S = 86400
"""The longest limit that is tried where neither the preset nor SLURM names one: most sites allow
a day."""
ROUND_UP_S = 600
"""A limit that fits the remaining work is rounded up to a multiple of this."""
MOST_RESTART_SHARE = 0.10
"""A job that spends a larger part of its limit on its restart is refused."""


@dataclass(frozen=True, order=True)
class JobShape:
    """Nodes and time limit of one job.

    Attributes:
        nodes: Nodes that train; spares are not counted.
    """

    nodes: int
    limit_s: int

    @property
    def text(self) -> str:
        """`4 nodes x 2h00m`."""
        return f"{in_nodes([self.nodes])} x {duration(self.limit_s)}"


def enumerate_shapes(
    nodes: Sequence[int],
    longest_s: Callable[[int], int | None],
    *,
    fixed_s: int | None = None,
    restart_s: float = 0.0,
    whole_s: Callable[[int], float | None] = lambda _nodes: None,
    also: Sequence[JobShape] = (),
) -> list[JobShape]:
    """Return the candidates, at most `MOST`, smallest first.

    Args:
        nodes: Numbers of nodes that the run can train on.
        longest_s: The longest limit allowed at a number of nodes; None where nobody names one, a
            number below 1 where no job of that size is allowed.
        fixed_s: The one time limit; None where it is to be chosen.
        restart_s: What each start of a job costs. Limits are left out in which it takes more than
            `MOST_RESTART_SHARE`, unless no limit would be left.
        whole_s: Seconds of one job that does all the remaining work at a number of nodes; None
            where that is not known. Longer limits are left out: they only wait longer.
        also: Shapes that must be among them, e.g. the one that the run has now.
    """
    chosen = [shape for shape in also if shape.nodes in nodes][:MOST]
    allowed = [size for size in sorted(set(nodes)) if _allows(longest_s(size))]
    sizes = pick(allowed, MOST_SIZES)
    each = max(1, (MOST - len(chosen)) // len(sizes)) if sizes else 0
    for size in sizes:
        if fixed_s is not None:
            limits = [fixed_s]
        else:
            limits = _limits(longest_s(size), restart_s, whole_s(size))
        chosen += [JobShape(size, limit) for limit in pick(limits, each)]
    return sorted(set(chosen))[:MOST]


def _allows(longest: int | None) -> bool:
    return longest is None or longest > 0


def _limits(longest: int | None, restart_s: float, whole: float | None) -> list[int]:
    """All limits of the ladder that make sense, ascending; at least one."""
    most = UNLIMITED_S if longest is None else longest
    if whole is not None:
        most = min(most, max(LADDER_S[0], math.ceil(whole / ROUND_UP_S) * ROUND_UP_S))
    least = restart_s / MOST_RESTART_SHARE
    return [limit for limit in LADDER_S if least <= limit < most] + [most]


def pick(values: Sequence[int], most: int) -> list[int]:
    """Return at most so many of ascending values: both ends, and between them even ratios."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    low, high = math.log(values[0]), math.log(values[-1])
    wanted = [low + (high - low) * place / (most - 1) for place in range(most)]
    return sorted({min(values, key=lambda value: abs(math.log(value) - at)) for at in wanted})


SCHEDULED_S = 60.0
"""A job that is to fill a hole is so much shorter: SLURM looks at the queue once in a while."""


@dataclass(frozen=True)
class NodeClaim:
    """Nodes that a job has, or is planned to get.

    `end` is infinite for a job without a time limit.
    """

    job_id: str
    nodes: frozenset[str]
    start: float
    end: float


@dataclass(frozen=True)
class QueueView:
    """What a user sees of a partition and of the queue.

    Attributes:
        now: When it was seen, seconds since the epoch.
        nodes: The partition's nodes that take jobs.
        claims: Of all jobs on them that run or have a planned start.
        max_time_s: The partition's longest time limit; None where it has none.
    """

    now: float
    nodes: frozenset[str]
    claims: tuple[NodeClaim, ...] = ()
    max_time_s: int | None = None

    def without(self, job_id: str) -> QueueView:
        """The same as if that job were gone."""
        return replace(self, claims=tuple(claim for claim in self.claims if claim.job_id != job_id))

    def start_of(self, shape: JobShape, *, earliest: float | None = None) -> float | None:
        """Return when so many nodes are first free for so long; None for never.

        Not before `earliest`, which is now by default.
        """
        first = max(self.now, self.now if earliest is None else earliest)
        ends = {claim.end for claim in self.claims if first < claim.end < math.inf}
        for start in sorted({first, *ends}):
            if len(self.free(start, start + shape.limit_s)) >= shape.nodes:
                return start
        return None

    def free(self, start: float, end: float) -> frozenset[str]:
        """The nodes that nobody has, or is planned to get, within [start, end)."""
        taken = [claim.nodes for claim in self.claims if claim.start < end and start < claim.end]
        return self.nodes.difference(*taken)

    def hole_shapes(self, sizes: Sequence[int], *, spares: int = 0) -> list[JobShape]:
        """Return the largest shapes that fit into what is free now, the longest first.

        `sizes` are numbers of nodes that the run can train on; it needs `spares` besides.
        """
        shapes: dict[int, JobShape] = {}
        for nodes, end in self.holes():
            size = max((n for n in sizes if n + spares <= nodes), default=0)
            limit = 0 if end == math.inf else int(end - self.now - SCHEDULED_S) // 60 * 60
            if size and limit > 0:
                shapes.setdefault(size, JobShape(size, limit))
        return list(shapes.values())

    def holes(self) -> list[tuple[int, float]]:
        """Return how many nodes are free now, and until when; the longest free first.

        Each row is so many nodes more than the row before, until an earlier end. The end is
        infinite where nothing is planned.
        """
        ends = {claim.start for claim in self.claims if claim.start > self.now} | {math.inf}
        rows: list[tuple[int, float]] = []
        for end in sorted(ends, reverse=True):
            nodes = len(self.free(self.now, end))
            if nodes and (not rows or nodes > rows[-1][0]):
                rows.append((nodes, end))
        return rows


SOON_S = 60.0
"""Added to a wait before its logarithm is taken: the scheduler's own cycle. A wait of 0 s is like
one of 30 s."""
AT_ONCE_S = 300.0
"""An estimate of at most this is of nodes that are free: SLURM's wait before a requeued job, and a
few cycles of its scheduler. Of 595 such jobs in simulated queues 595 started within a cycle."""
HOLE_SIGMA = 0.2
LONGEST_FROM, LONGEST_FACTOR = 0.9, 1.6
SHORT_FACTOR, SHORT_POWER = 0.25, 0.25
"""What a wait is of a later estimate. Running jobs end within the longest time limit, so wide jobs
at the head of the queue have their reservation within it: a job of the longest limit can never end
before that, and waits for its turn. Each shorter one finds a hole long before. Fitted to 1,900 jobs
in simulated queues (docs/development/performance.md)."""
ESTIMATE_SIGMA, ESTIMATE_RECORDS = 1.2, 3
"""Spread of the logarithm of a wait over what is so expected of it, before own jobs have shown it,
and how many own waits count as much."""
DAY_S = 86_400.0
LEAST_SIGMA = 0.3
LEAST_RECORDS = 3
"""Fewer waits of own jobs say nothing about a spread."""
LIKE = 1.0
"""How many doublings of nodes or limit make a wait count e times less."""
NEWEST = 200
"""So many of the newest waits count; queues change."""


@dataclass(frozen=True)
class WaitRecord:
    """One wait of an own job that has ended with its start.

    `partition` is "" for the default; `estimate_s` is SLURM's, None where it gave none.
    """

    shape: JobShape
    partition: str
    waited_s: float
    estimate_s: float | None = None


@dataclass(frozen=True)
class QueueWait:
    """An expected wait.

    `sigma` is the spread of its logarithm, `source` where it comes from, in words.
    """

    median_s: float
    sigma: float
    source: str

    @property
    def mean_s(self) -> float:
        """The mean of the log-normal."""
        return max(0.0, (self.median_s + SOON_S) * math.exp(self.sigma**2 / 2) - SOON_S)


def expected_wait(
    shape: JobShape,
    estimate_s: float | None,
    records: Sequence[WaitRecord] = (),
    partition: str = "",
    longest_s: float = DAY_S,
) -> QueueWait | None:
    """Return how long a job of this shape will wait; None where nothing is known.

    `estimate_s` is SLURM's, None for none. `records` are waits of own jobs, oldest first; those in
    other partitions do not count. `longest_s` is the longest time limit there.
    """
    if estimate_s is not None and estimate_s <= AT_ONCE_S:
        return QueueWait(estimate_s, HOLE_SIGMA, "nodes are free for it now")
    own = [r for r in records if r.partition == partition and not _was_hole(r)][-NEWEST:]
    corrected, learned = _corrected(shape, estimate_s, own, longest_s), _learned(shape, own)
    if corrected is None or learned is None:
        return corrected or learned
    both = (corrected, learned)
    weights = [1 / wait.sigma**2 for wait in both]
    total = sum(weights)
    middle = sum(w * _log(wait.median_s) for w, wait in zip(weights, both, strict=True)) / total
    source = " and ".join(wait.source for wait in both)
    # Both look at the same queue, so two sources are no more certain than the better one.
    return QueueWait(_wait(middle), min(wait.sigma for wait in both), source)


def own_wait(waits_s: Sequence[float]) -> QueueWait | None:
    """Return what a run's own waits so far promise for the next one; None without any."""
    if not waits_s:
        return None
    logs = [_log(wait) for wait in waits_s]
    enough = len(logs) >= LEAST_RECORDS
    sigma = max(LEAST_SIGMA, statistics.pstdev(logs)) if enough else ESTIMATE_SIGMA
    source = f"{count(len(logs), 'wait')} of this run"
    return QueueWait(_wait(statistics.median(logs)), sigma, source)


def between(wait: QueueWait, other: QueueWait) -> QueueWait:
    """Return the first with its median moved half way to the other's, by their logarithms."""
    return replace(wait, median_s=_wait((_log(wait.median_s) + _log(other.median_s)) / 2))


def _was_hole(record: WaitRecord) -> bool:
    """Whether it says nothing of waits behind others."""
    return record.estimate_s is not None and record.estimate_s <= AT_ONCE_S


def _corrected(
    shape: JobShape, estimate_s: float | None, records: Sequence[WaitRecord], longest_s: float
) -> QueueWait | None:
    """SLURM's estimate, shortened for a short job and by what own waits have been."""
    if estimate_s is None:
        return None
    ratios = [
        _log(record.waited_s) - _log(record.estimate_s) - _short(record.shape, longest_s)
        for record in records
        if record.estimate_s is not None
    ]
    weight = ESTIMATE_RECORDS + len(ratios)
    middle = sum(ratios) / weight
    usual = ESTIMATE_SIGMA**2 + middle**2
    variance = (ESTIMATE_RECORDS * usual + sum((one - middle) ** 2 for one in ratios)) / weight
    middle += _short(shape, longest_s)
    seen = count(len(ratios), "wait") if ratios else "simulated queues"
    source = f"SLURM's estimate x {math.exp(middle):.2g} (from {seen})"
    wait_s = _wait(_log(estimate_s) + middle)
    return QueueWait(wait_s, max(LEAST_SIGMA, math.sqrt(variance)), source)


def _short(shape: JobShape, longest_s: float) -> float:
    """The logarithm of what a wait is of its estimate."""
    part = shape.limit_s / longest_s
    if part > LONGEST_FROM:
        return math.log(LONGEST_FACTOR)
    return math.log(SHORT_FACTOR * part**SHORT_POWER)


def _learned(shape: JobShape, records: Sequence[WaitRecord]) -> QueueWait | None:
    """The median of own waits, each weighted by how like its shape is."""
    weighted = sorted((_log(r.waited_s), _likeness(shape, r.shape)) for r in records)
    total = sum(weight for _, weight in weighted)
    if len(weighted) < LEAST_RECORDS or total < 1.0:
        return None
    middle, seen = 0.0, 0.0
    for value, weight in weighted:
        middle, seen = value, seen + weight
        if seen >= total / 2:
            break
    square = sum(weight * (value - middle) ** 2 for value, weight in weighted) / total
    source = f"{count(len(weighted), 'wait')} of own jobs"
    return QueueWait(_wait(middle), max(LEAST_SIGMA, math.sqrt(square)), source)


def _likeness(shape: JobShape, other: JobShape) -> float:
    apart = abs(math.log2(shape.nodes / other.nodes))
    apart += abs(math.log2(shape.limit_s / other.limit_s))
    return math.exp(-apart / LIKE)


def _log(wait_s: float) -> float:
    return math.log(max(0.0, wait_s) + SOON_S)


def _wait(log: float) -> float:
    return max(0.0, math.exp(log) - SOON_S)
