"""How many collectives a rank had called at which tick, where its node's agent sees it.

Eight words of the board's row, each a tick and a count in one store: the last four ticks that were
counted, and the last multiples of powers of two, which stay long enough to be seen where ticks are
short. Behind a step that has used the caches for itself a count takes 40 us, so short ticks are
counted twice a second: at multiples of a power of two, so that ranks that take their steps for
longer or shorter by a little still count at the same ones.
tests/unit/control/test_tick_counts.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.control.board import COUNTS

if TYPE_CHECKING:
    from hpctrain.control.board import Board

_COUNT_BITS = 32
_COUNT = (1 << _COUNT_BITS) - 1
_MOST_TICKS = 1 << 30
_EACH, _SHORT, _LONG = 64, 1024, 16384
APART_NS, _MOST_APART = 500_000_000, 10
"""So far apart ticks are counted at most, in nanoseconds; and the longest power of two."""


def apart(step_ns: int) -> int:
    """Ticks that are multiples of two to the power of this are counted.

    Args:
        step_ns: What a tick takes; 0 for not known.
    """
    return min(_MOST_APART, max(1, APART_NS // max(1, step_ns)).bit_length() - 1) if step_ns else 0


def put(words: memoryview[int], at: int, tick: int, count: int, power: int = 0) -> None:
    """Show a count. The rank alone.

    Args:
        words: Of the board.
        at: Where this rank's row begins.
        tick: From 0 on.
        count: What it has called so far; -1 where nobody says.
        power: How far apart ticks are counted, as `apart` says it.
    """
    if count < 0 or tick >= _MOST_TICKS:
        return
    word = (tick + 1) << _COUNT_BITS | count & _COUNT
    at += COUNTS
    words[at + (tick >> power & 3)] = word
    if not tick % _EACH:
        words[at + 4 + (tick // _EACH & 1)] = word
        if not tick % _SHORT:
            words[at + 6] = word
            if not tick % _LONG:
                words[at + 7] = word


def read(board: Board) -> list[dict[int, int]]:
    """Of each rank of a node, its counts by tick."""
    rows = []
    for local_rank in range(board.ranks):
        at = board.at(local_rank) + COUNTS
        shown = board.words[at : at + 8].tolist()
        rows.append({(word >> _COUNT_BITS) - 1: word & _COUNT for word in shown if word})
    return rows
