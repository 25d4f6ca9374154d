"""Free nodes over time: what running jobs leave, and where the next job fits."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Profile:
    """A step function of free nodes from now on.

    Args:
        now_s: Where it begins.
        free: Nodes that are free now.
        ends: (time, nodes) of each running job, at its time limit.
    """

    def __init__(self, now_s: float, free: int, ends: Iterable[tuple[float, int]]) -> None:
        self._times = [now_s]
        self._free = [free]
        self._misses: list[tuple[int, float]] = []
        for end_s, nodes in sorted(ends):
            free += nodes
            if end_s <= self._times[-1]:
                self._free[-1] = free
            else:
                self._times.append(end_s)
                self._free.append(free)

    def earliest_within(self, nodes: int, duration_s: float, until_s: float) -> float:
        """Return the same as `earliest`; infinity where it is after `until_s`, always the same.

        Nodes are only ever taken. So what is as large and as long as something that had no place
        is not tried.
        """
        for least, shortest_s in self._misses:
            if nodes >= least and duration_s >= shortest_s:
                return math.inf
        start_s = self.earliest(nodes, duration_s)
        if start_s <= until_s:
            return start_s
        self._misses = [m for m in self._misses if m[0] < nodes or m[1] < duration_s]
        self._misses.append((nodes, duration_s))
        return math.inf

    def earliest(self, nodes: int, duration_s: float) -> float:
        """Return the first time from which `nodes` stay free for `duration_s`; else infinity."""
        times, free = self._times, self._free
        count, at = len(times), 0
        while at < count:
            if free[at] < nodes:
                at += 1
                continue
            end_s, after = times[at] + duration_s, at + 1
            while after < count and times[after] < end_s and free[after] >= nodes:
                after += 1
            if after == count or times[after] >= end_s:
                return times[at]
            at = after + 1
        return math.inf

    def take(self, start_s: float, end_s: float, nodes: int) -> None:
        """Reserve nodes from start to end; what lies before now counts from now."""
        first = self._cut(max(start_s, self._times[0]))
        last = self._cut(max(end_s, self._times[0]))
        for at in range(first, last):
            self._free[at] -= nodes

    def holes(self) -> list[tuple[int, float]]:
        """Return how many nodes are free from now, and until when; the longest free first."""
        rows: list[tuple[int, float]] = []
        least = self._free[0]
        for time_s, free in zip(self._times[1:], self._free[1:], strict=True):
            if free < least:
                rows.append((least, time_s))
                least = free
        rows.append((least, math.inf))
        return [row for row in reversed(rows) if row[0] > 0]

    def _cut(self, time_s: float) -> int:
        """Return the index of the step that begins at this time, made if need be."""
        at = bisect_left(self._times, time_s)
        if at == len(self._times) or self._times[at] != time_s:
            self._times.insert(at, time_s)
            self._free.insert(at, self._free[at - 1])
        return at
