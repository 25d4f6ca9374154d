"""Ranks that go on out of step: their counts of collectives differ at the same tick. Pure.

A rank that leaves out the collectives of a step does not hang: it pairs with the others one step
late, for ever, and gradients of two steps are mixed. Its count of what it has called in the group
of all ranks is then another than theirs, at every tick from then on, by the same number.

Counts may differ for good reasons: torch counts messages between two ranks too, under gloo, and a
thread may call collectives at its own pace. So what is told is only this: counts that were the same
at `EQUAL` ticks, and then differ by the same numbers at `ODD` ticks, while they go on growing.
tests/unit/hangs/test_counts.py holds the promises.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.hangs.verdict import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

EQUAL, ODD = 8, 3
KEPT = 24
"""Of each level so many ticks are kept: all, and multiples of powers of two for short ticks."""
LEVELS = (0, 6, 10, 14)


class CountsByTick:
    """What all ranks of one node had called at which tick, newest ticks first forgotten last."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._counts: dict[int, tuple[int, ...]] = {}

    def look(self, ranks: Sequence[Mapping[int, int]]) -> None:
        """Take in what the ranks show.

        Args:
            ranks: Of each rank, its counts by tick; one that does not count shows none.
        """
        common = set.intersection(*(set(counts) for counts in ranks)) if ranks else set()
        for tick in common:
            self._counts[tick] = tuple(counts[tick] for counts in ranks)
        kept: set[int] = set()
        for level in LEVELS:
            kept |= set(sorted(tick for tick in self._counts if not tick % (1 << level))[-KEPT:])
        self._counts = {tick: self._counts[tick] for tick in sorted(kept)}

    def plain(self) -> list[list[int]]:
        """For JSON: of each tick its number, and one count where all ranks have the same."""
        return [
            [tick, *(counts[:1] if len(set(counts)) == 1 else counts)]
            for tick, counts in self._counts.items()
        ]


class OutOfStep(NamedTuple):
    """Ranks that are out of step.

    Attributes:
        ranks: The fewer ones; of two equal halves either may be wrong.
        summary: In one line.
    """

    ranks: tuple[int, ...]
    summary: str


class JobCounts:
    """Judges the counts of all ranks, tick after tick."""

    def __init__(self) -> None:
        """Nothing was heard."""
        self._last = -1
        self._equal, self._odd = 0, 0
        self._highest = -1
        self._offsets: tuple[int, ...] = ()

    def hear(self, nodes: Sequence[tuple[int, Iterable[Sequence[int]]]]) -> OutOfStep | None:
        """What newly known ticks say: who is out of step, said once.

        Args:
            nodes: Of each node, how many ranks it has, and what `CountsByTick.plain` gave.
        """
        by_tick = [
            {tick: tuple(counts) * (ranks if len(counts) == 1 else 1) for tick, *counts in said}
            for ranks, said in nodes
        ]
        common = set.intersection(*(set(ticks) for ticks in by_tick)) if by_tick else set()
        for tick in sorted(tick for tick in common if tick > self._last):
            self._last = tick
            if self._judge([count for ticks in by_tick for count in ticks[tick]]):
                return self._told([count for ticks in by_tick for count in ticks[tick]])
        return None

    def _judge(self, counts: Sequence[int]) -> bool:
        usual = _usual(counts)
        if usual <= self._highest:  # nothing was called, or a new group counts anew
            self._highest = min(self._highest, usual)
            return False
        self._highest = usual
        offsets = tuple(count - usual for count in counts)
        if not any(offsets):
            self._equal, self._odd = self._equal + 1, 0
            return False
        if self._equal < EQUAL or (self._odd and offsets != self._offsets):
            self._equal = self._odd = 0
            return False
        self._offsets, self._odd = offsets, self._odd + 1
        return self._odd == ODD

    def _told(self, counts: Sequence[int]) -> OutOfStep:
        usual = _usual(counts)
        odd = tuple(rank for rank, count in enumerate(counts) if count != usual)
        differences = [counts[rank] - usual for rank in odd]
        more = "more" if min(differences) > 0 else "fewer"
        how_many = "" if len(set(differences)) > 1 else f"{abs(differences[0])} "
        verb = "has" if len(odd) == 1 else "have"
        summary = (
            f"{ranks_in_words(odd)} {verb} called {how_many}{more} collectives of all ranks than "
            "the others: they are out of step, and what they exchange is of different steps"
        )
        return OutOfStep(odd, summary)


def _usual(counts: Sequence[int]) -> int:
    """The count of most ranks; of two equal halves rank 0's."""
    return Counter(counts).most_common(1)[0][0]
