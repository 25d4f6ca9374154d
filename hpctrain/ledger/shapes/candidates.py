"""Which shapes a job may have: a few numbers of nodes, each with a few time limits.

SLURM is queried about every candidate, so there are at most `MOST` of them. Short limits are among
them on purpose: backfill starts short jobs in holes of the schedule.

Pure. tests/unit/shapes/test_candidates.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base.text import duration, in_nodes

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
        limit_s: Its time limit in seconds.
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
