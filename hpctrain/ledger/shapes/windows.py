"""When nodes are free for how long: the holes that SLURM's backfill would fill with a short job.

`sbatch --test-only` does not see them: with jobs pending, SLURM 22.05 gives the same start for
every time limit (measured). They follow from the queue that a user sees: when running jobs end,
and where and when the pending ones are planned to start.

A node with a job on it counts as taken. Pure. tests/unit/shapes/test_windows.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.ledger.shapes.candidates import JobShape

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEDULED_S = 60.0
"""A job that is to fill a hole is so much shorter: SLURM looks at the queue once in a while."""


@dataclass(frozen=True)
class NodeClaim:
    """Nodes that a job has, or is planned to get.

    Attributes:
        job_id: The job.
        nodes: Their names.
        start: Seconds since the epoch.
        end: The same; infinite for a job without a time limit.
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
        unplanned: Pending jobs of the partition without a planned start.
        names: Of the partitions that were looked at.
        max_time_s: The partition's longest time limit; None where it has none.
    """

    now: float
    nodes: frozenset[str]
    claims: tuple[NodeClaim, ...] = ()
    unplanned: int = 0
    names: frozenset[str] = frozenset()
    max_time_s: int | None = None

    def without(self, job_id: str) -> QueueView:
        """The same as if that job were gone."""
        return replace(self, claims=tuple(claim for claim in self.claims if claim.job_id != job_id))

    def start_of(self, shape: JobShape, *, earliest: float | None = None) -> float | None:
        """Return when so many nodes are first free for so long; None for never.

        Args:
            shape: The job's.
            earliest: Not before this; now by default.
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

        Args:
            sizes: Numbers of nodes that the run can train on.
            spares: Nodes that it needs besides.
        """
        shapes: dict[int, JobShape] = {}
        for count, end in self.holes():
            size = max((n for n in sizes if n + spares <= count), default=0)
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
            count = len(self.free(self.now, end))
            if count and (not rows or count > rows[-1][0]):
                rows.append((count, end))
        return rows
