"""How long a job of some shape waits: SLURM's own estimate, corrected by what own jobs waited.

An estimate of "now" is certain: backfill has a hole for such a job. A later one is by time limits,
and most jobs end before theirs, so it is mostly too late, and the more so for a short job: backfill
finds it a hole before its turn. Waits of own jobs of a like shape are the other source. Both are
combined by how certain each is. A wait counts as log-normal.

Pure. tests/unit/shapes/test_waits.py holds the promises.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.core.base.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.shapes.candidates import JobShape

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

    Attributes:
        shape: What was asked for.
        partition: Where; "" for the default.
        waited_s: How long it waited.
        estimate_s: What SLURM had estimated; None where it was not asked, or did not answer.
    """

    shape: JobShape
    partition: str
    waited_s: float
    estimate_s: float | None = None


@dataclass(frozen=True)
class QueueWait:
    """An expected wait.

    Attributes:
        median_s: As often shorter as longer.
        sigma: Spread of its logarithm.
        source: Where it comes from, in words.
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

    Args:
        shape: The job's.
        estimate_s: SLURM's estimate for it; None for none.
        records: Waits of own jobs, oldest first.
        partition: Where it is to be submitted; waits in others do not count.
        longest_s: The longest time limit there.
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
