"""What this node's clock shows when the root's shows nothing of the kind: their difference.

Moments on two nodes can be compared only so. Each lease comes with the moment at which it was said,
by the root's clock; it is heard a trip later. The shortest trip of the last ones is a fraction of a
millisecond, and by so much the difference is too great, for a node of the tree's second level
twice. tests/unit/control/test_root_clock.py holds the promises.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.node.control.board import CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.node.control.board import Board

KEPT_S = 60.0
"""Clocks drift by some millionths: what was heard longer ago does not count."""
FEWEST = 8
"""The first trips may be long ones: all of them are those of nodes that start."""


class RootClock:
    """How far this node's clock is ahead of the root's.

    Attributes:
        ahead_ns: In nanoseconds, negative where it is behind; None while it is not known.
    """

    def __init__(self, *, is_root: bool, clock: Callable[[], int] = clock.now_ns) -> None:
        """Hear nothing yet; `clock` is this node's, in nanoseconds since the epoch."""
        self._clock = clock
        self._trips: deque[tuple[int, int]] = deque()
        self._is_root = is_root
        self.ahead_ns: int | None = 0 if is_root else None

    def hear(self, said_ns: int) -> None:
        """Take in a message from the node above, sent at `said_ns` by the root's clock."""
        if self._is_root:
            return
        now_ns = self._clock()
        self._trips.append((now_ns, now_ns - said_ns))
        while self._trips[0][0] < now_ns - KEPT_S * 1e9:
            self._trips.popleft()
        if len(self._trips) >= FEWEST:
            self.ahead_ns = min(ahead for _, ahead in self._trips)

    def now_ns(self) -> int | None:
        """What the root's clock shows now; None for not known."""
        return None if self.ahead_ns is None else self._clock() - self.ahead_ns

    def show(self, board: Board) -> None:
        """Let this node's agent read it. The node's process alone."""
        board.words[CLOCK] = 0 if self.ahead_ns is None else self.ahead_ns << 1 | 1


def shown(board: Board) -> int | None:
    """How far this node's clock is ahead of the root's, in nanoseconds; None for not known."""
    word = board.words[CLOCK]
    return word >> 1 if word & 1 else None
