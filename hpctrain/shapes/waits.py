"""How long a job of some shape waits: SLURM's own estimate, corrected by what own jobs waited.

SLURM estimates by time limits, and most jobs end before theirs, so its estimate is mostly too
late, or missing. Waits of own jobs of a like shape are the other source. Both are combined by how
certain each is. A wait counts as log-normal.

Pure. tests/unit/shapes/test_waits.py holds the promises.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.base.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.shapes.candidates import JobShape

SOON_S = 60.0
"""Added to a wait before its logarithm is taken: the scheduler's own cycle. A wait of 0 s is like
one of 30 s."""
ESTIMATE_SIGMA = 1.0
"""Spread of log(wait / estimate) before own jobs have shown it: a factor of 2.7 either way."""
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
) -> QueueWait | None:
    """Return how long a job of this shape will wait; None where nothing is known.

    Args:
        shape: The job's.
        estimate_s: SLURM's estimate for it; None for none.
        records: Waits of own jobs, oldest first.
        partition: Where it is to be submitted; waits in others do not count.
    """
    own = [record for record in records if record.partition == partition][-NEWEST:]
    corrected, learned = _corrected(estimate_s, own), _learned(shape, own)
    if corrected is None or learned is None:
        return corrected or learned
    both = (corrected, learned)
    weights = [1 / wait.sigma**2 for wait in both]
    total = sum(weights)
    middle = sum(w * _log(wait.median_s) for w, wait in zip(weights, both, strict=True)) / total
    source = " and ".join(wait.source for wait in both)
    # Both look at the same queue, so two sources are no more certain than the better one.
    return QueueWait(_wait(middle), min(wait.sigma for wait in both), source)


def between(wait: QueueWait, other: QueueWait) -> QueueWait:
    """Return the first with its median moved half way to the other's, by their logarithms."""
    return replace(wait, median_s=_wait((_log(wait.median_s) + _log(other.median_s)) / 2))


def _corrected(estimate_s: float | None, records: Sequence[WaitRecord]) -> QueueWait | None:
    """SLURM's estimate, times what own waits have been of it."""
    if estimate_s is None:
        return None
    ratios = [
        _log(record.waited_s) - _log(record.estimate_s)
        for record in records
        if record.estimate_s is not None
    ]
    if len(ratios) < LEAST_RECORDS:
        return QueueWait(estimate_s, ESTIMATE_SIGMA, "SLURM's estimate")
    factor = statistics.median(ratios)
    sigma = max(LEAST_SIGMA, statistics.pstdev(ratios))
    source = f"SLURM's estimate x {math.exp(factor):.2g} (as {count(len(ratios), 'wait')} showed)"
    return QueueWait(_wait(_log(estimate_s) + factor), sigma, source)


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
