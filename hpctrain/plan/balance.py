"""Cutting a chain of layers into pipeline stages of about equally many parameters.

The engines cut models by it, and `hpctrain plan` tells what each stage will hold. Pure, without
torch. tests/unit/plan/test_balance.py holds the promises.
"""

from __future__ import annotations

import math
import operator
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def balance(sizes: Sequence[int], blocks: Sequence[bool], count: int) -> list[range]:
    """Cut a chain into runs, so that the largest is as small as can be and the rest are alike.

    Args:
        sizes: Of each link.
        blocks: Which links are blocks; each run gets one at least. There are `count` or more.
        count: How many runs.

    Returns:
        The links of each run, by their places.
    """
    totals = [0, *accumulate(sizes)]
    seen = [0, *accumulate(map(int, blocks))]

    def size(start: int, end: int) -> float:
        return totals[end] - totals[start] if seen[end] > seen[start] else math.inf

    def square(start: int, end: int) -> float:
        return size(start, end) ** 2 if size(start, end) <= largest else math.inf

    largest, _ = _cheapest(len(sizes), count, size, max)
    _, runs = _cheapest(len(sizes), count, square, operator.add)
    return runs


def _cheapest(
    length: int,
    count: int,
    cost: Callable[[int, int], float],
    add: Callable[[float, float], float],
) -> tuple[float, list[range]]:
    """The best way to cut [0, length) into runs, given what a run costs, and how costs add up."""
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for _ in range(count):
        longer = {}
        for end in range(1, length + 1):
            starts = [start for start in best if start < end]
            if starts:
                costs = [add(best[start][0], cost(start, end)) for start in starts]
                start = starts[costs.index(min(costs))]
                longer[end] = (min(costs), [*best[start][1], range(start, end)])
        best = longer
    return best[length]
