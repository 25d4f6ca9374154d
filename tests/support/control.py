"""A node's process for tests: it looks at the board when it is asked, on the asker's thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.node.control.lease import Root

if TYPE_CHECKING:
    from hpctrain.node.control.board import Board


class NodeOnCall:
    """The root and the one node of a round, without processes: a Waker for all of its ranks."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.root = Root(board.ranks)
        self.asked = 0
        self.told = threading.Condition()

    def ask(self) -> None:
        with self.told:
            self.asked += 1
            self.look()

    def look(self) -> None:
        """What the node's process does: report, have it decided, let the ranks read it."""
        now_s = clock.monotonic()
        self.root.hear(self.board.report(self.asked), now_s)
        lease = self.root.lease(now_s)
        if lease.number and self.board.put_lease(lease):
            self.told.notify_all()

    def wait(self, timeout_s: float) -> bool:
        with self.told:
            return self.told.wait(min(timeout_s, 0.02))
