"""Intervals of time: unions, cuts, and the division of a stretch among kinds by precedence. Pure.

An interval is (begin, end) in microseconds. A list of them that these functions return is sorted
and without overlaps. tests/unit/test_profile_shares.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that is covered by any of them."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def minus(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """What of these is not covered by those; both as `union` gives them."""
    left: list[Interval] = []
    start = 0
    for begin, end in these:
        at = begin
        while start < len(those) and those[start][1] <= begin:
            start += 1
        for cut_begin, cut_end in those[start:]:
            if cut_begin >= end:
                break
            if cut_begin > at:
                left.append((at, cut_begin))
            at = max(at, cut_end)
        if at < end:
            left.append((at, end))
    return left


def both(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """What is covered by these and by those; both as `union` gives them."""
    return minus(these, minus(these, those))


def length(intervals: Iterable[Interval]) -> float:
    """Their lengths added up."""
    return sum(end - begin for begin, end in intervals)


def divide(
    stretch: Interval, kinds: Mapping[str, Sequence[Interval]], rest: str
) -> dict[str, float]:
    """Shares of a stretch by kind, which add up to 1.

    Args:
        stretch: What is divided; not empty.
        kinds: In order of precedence: time that two kinds cover counts for the earlier one.
        rest: The kind of what none covers.
    """
    left = [stretch]
    shares: dict[str, float] = {}
    whole = stretch[1] - stretch[0]
    for kind, intervals in kinds.items():
        shares[kind] = length(both(left, intervals)) / whole
        left = minus(left, intervals)
    return shares | {rest: length(left) / whole}
