"""Ranges of samples that a walk through the data leaves out. Standard library only.

A guard that goes back behind a spike has the samples of the bad steps left out. Where they lie is
part of the position in the data: every resume leaves out the same ones, at whatever number of ranks
and batch size. Positions count what the walk has come by, holes included. The promises are held by
tests/unit/data/test_holes.py.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Holes:
    """Positions to be left out: ranges [first, last) that neither meet nor overlap, in order."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.add(ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out these too; the same ones again change nothing."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted((f, n) for f, n in chain(self._ranges, ranges) if f < n):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(joined[-1][1], last)
            else:
                joined.append((first, last))
        self._ranges = joined

    def end_at(self, position: int) -> int:
        """Where the hole ends in which a position lies; the position itself where it is in none."""
        return next((last for first, last in self._ranges if first <= position < last), position)

    def begin_after(self, position: int) -> int | None:
        """Where the next hole begins behind a position; None where there is none."""
        return next((first for first, _ in self._ranges if first > position), None)

    def positions(self, first: int, count: int) -> list[int]:
        """The first so many positions from one on that are in no hole."""
        places: list[int] = []
        position = first
        while len(places) < count:
            position = self.end_at(position)
            begin = self.begin_after(position)
            end = position + count - len(places)
            end = end if begin is None else min(end, begin)
            places += range(position, end)
            position = end
        return places

    def state(self) -> dict[str, list[list[int]]]:
        """For a state_dict: nothing where there is no hole."""
        return {"holes": [list(each) for each in self._ranges]} if self._ranges else {}


def holes_of(state: Any) -> list[tuple[int, int]]:
    """What a state_dict says of holes; none where it says nothing.

    Raises:
        CheckpointError: those are no ranges of samples.
    """
    given = state.get("holes", [])
    if not isinstance(given, list) or not all(map(_is_range, given)):
        raise CheckpointError(
            f"data state has holes {given!r}, not ranges of samples; resume from another checkpoint"
        )
    return [(first, last) for first, last in given]


def _is_range(value: Any) -> bool:
    match value:
        case [int(first), int(last)]:
            return type(first) is type(last) is int and first >= 0 <= last
    return False
