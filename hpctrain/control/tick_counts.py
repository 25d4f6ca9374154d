"""How many collectives a rank had called at which tick, where its node's agent sees it.

Eight words of the board's row, each a tick and a count in one store: the last four ticks, and the
last multiples of powers of two, which stay long enough to be seen where ticks are short.
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


def put(words: memoryview[int], at: int, tick: int, count: int) -> None:
    """Show a count. The rank alone, once a tick.

    Args:
        words: Of the board.
        at: Where this rank's row begins.
        tick: From 0 on.
        count: What it has called so far; -1 where nobody says.
    """
    if count < 0 or tick >= _MOST_TICKS:
        return
    word = (tick + 1) << _COUNT_BITS | count & _COUNT
    at += COUNTS
    words[at + (tick & 3)] = word
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
