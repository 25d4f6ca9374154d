"""Two nodes' clocks are compared by the shortest of the trips that leases take."""

from __future__ import annotations

import pytest

from hpctrain.node.control.board import FEWEST, KEPT_S, Board, RootClock, shown

MS = 1_000_000
S = 1000 * MS


class Node:
    """A node whose clock is ahead of the root's."""

    def __init__(self, ahead=0):
        self.ahead, self.now = ahead, 0
        self.clock = RootClock(is_root=False, clock=lambda: self.now)

    def hear(self, said, trip):
        self.now = said + trip + self.ahead
        self.clock.hear(said)


@pytest.mark.parametrize("ahead", [-3 * S, 0, 7 * S])
def test_the_difference_is_that_of_the_shortest_trip(ahead):
    node = Node(ahead)
    for number in range(40):
        node.hear(number * S, MS * (1 if number % 5 == 0 else 20))
    assert node.clock.ahead_ns == ahead + MS
    node.now = 50 * S + ahead
    assert node.clock.now_ns() == 50 * S - MS


def test_of_the_first_trips_nothing_is_known():
    node = Node()
    for number in range(FEWEST):
        assert node.clock.ahead_ns is node.clock.now_ns() is None
        node.hear(number * S, MS)
    assert node.clock.ahead_ns == MS


def test_what_was_heard_long_ago_is_forgotten():
    node = Node()
    for number in range(20):
        node.hear(number * S, MS)
    for number in range(20 + int(KEPT_S), 40 + int(KEPT_S)):
        node.hear(number * S, 3 * MS)
    assert node.clock.ahead_ns == 3 * MS


def test_the_root_s_clock_is_its_own():
    clock = RootClock(is_root=True, clock=lambda: 10)
    clock.hear(5)
    assert (clock.ahead_ns, clock.now_ns()) == (0, 10)


@pytest.mark.parametrize("ahead", [-5, -1, 0, 1, 123_456_789_012])
def test_the_agent_reads_it_from_the_board(tmp_path, ahead):
    board, clock = Board.create(tmp_path / "board", 0, 1), RootClock(is_root=False)
    assert shown(board) is None
    clock.ahead_ns = ahead
    clock.show(board)
    assert shown(board) == ahead
    board.close()
