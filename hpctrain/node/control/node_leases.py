"""A node's part in leases: what its subtree's ranks say goes up, what the root grants comes down.

It looks at the board some twenty times a second, and at once when a rank asks, and says what to
send; `node_server.py` sends it. tests/unit/control/test_node_leases.py holds the promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.node.control.lease import Lease, Root, Subtree

if TYPE_CHECKING:
    from hpctrain.node.control.board import Board
    from hpctrain.node.control.lease import Report

LOOK_S = 0.05
"""So often the board is looked at though nobody asks; the root grants ticks further ahead."""
FORWARD_S = 0.01
"""So long a child's report may wait for others before this node's own goes up."""
SAY_S = 2.0
"""So often a report or a lease is said again, as a sign of life."""


class ToSend(NamedTuple):
    """What a look has brought.

    Attributes:
        report: For the parent; None for nothing new.
        lease: For the children; None for nothing new.
        is_urgent: Somebody waits for the answer to that report.
        is_new: The lease was not said before: it is no mere sign of life.
    """

    report: Report | None = None
    lease: Lease | None = None
    is_urgent: bool = False
    is_new: bool = False


class NodeLeases:
    """What one node knows of where its subtree's ranks are, and how far they may go.

    Attributes:
        lease: The newest.
    """

    def __init__(self, board: Board, ranks_in_all: int | None) -> None:
        """Start without reports; `ranks_in_all` is for node 0, which grants, and None elsewhere."""
        self._board = board
        self._root = Root(ranks_in_all) if ranks_in_all is not None else None
        self._subtree = Subtree()
        self._version = 0
        self.lease: Lease | None = None
        self._lease_said_s = 0.0
        self._report: Report | None = None
        self._report_said_s = 0.0
        self._look_at_s = 0.0
        self._is_urgent = False

    def ask(self) -> None:
        """A rank of this node waits, or wishes something: look at once."""
        self._is_urgent, self._look_at_s = True, 0.0

    def hear_child(self, child: int, report: Report, now_s: float, *, is_urgent: bool) -> None:
        """Take in the report of a child's subtree; `is_urgent` if somebody below waits."""
        if not self._subtree.hear(child, report, now_s):
            return
        self._look_at_s = min(self._look_at_s, now_s + FORWARD_S)
        if is_urgent:
            self.ask()

    def hear_parent(self, lease: Lease, now_s: float) -> bool:
        """Let the ranks read a lease. Whether it is a new one, and the children's too."""
        if not self._board.put_lease(lease):
            return False
        self.lease, self._lease_said_s = lease, now_s
        return True

    def meet_parent(self) -> None:
        """There is a parent now, which has heard nothing."""
        self._report, self._look_at_s = None, 0.0

    def next_look_s(self) -> float:
        """When to look again, by this node's clock; it may have passed."""
        due_s = self._root.due_s() if self._root is not None else None
        return self._look_at_s if due_s is None else min(due_s, self._look_at_s)

    def look(self, now_s: float) -> ToSend:
        """Read the board, and decide what is to be sent."""
        is_urgent, self._is_urgent = self._is_urgent, False
        self._look_at_s = now_s + LOOK_S
        self._version += 1
        self._subtree.hear("board", self._board.report(self._version), now_s)
        report = self._subtree.merged(now_s)
        if self._root is not None:
            self._root.hear(report, now_s)
            lease = self._root.lease(now_s)
            if self._board.put_lease(lease):
                self.lease, self._lease_said_s = lease, now_s
                return ToSend(lease=lease, is_new=True)
            return ToSend(lease=self._lease_again(now_s))
        is_new = self._report is None or not _same(report, self._report)
        if is_new or now_s - self._report_said_s >= SAY_S:
            self._report, self._report_said_s = report, now_s
            return ToSend(report, self._lease_again(now_s), is_urgent)
        return ToSend(lease=self._lease_again(now_s))

    def _lease_again(self, now_s: float) -> Lease | None:
        """As a sign of life."""
        if now_s - self._lease_said_s < SAY_S:
            return None
        self._lease_said_s = now_s
        return self.lease or Lease(0, -1)


def _same(report: Report, other: Report) -> bool:
    """Whether they differ in nothing but their age."""
    return replace(report, version=0, began_ago_s=0, lease_ago_s=0) == replace(
        other, version=0, began_ago_s=0, lease_ago_s=0
    )
