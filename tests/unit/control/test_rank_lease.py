"""A rank does what all decided, at the tick for which it was decided, and goes no further."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.errors import ControlLost
from hpctrain.node.control import client
from hpctrain.node.control.board import WAITS, Board
from hpctrain.node.control.client import RankLease
from hpctrain.node.control.lease import Decision, Lease, Wishes
from tests.support.control import NodeOnCall


@pytest.fixture
def board(tmp_path):
    board = Board.create(tmp_path / "board", first_rank=0, ranks=2)
    yield board
    board.close()


class Silent:
    """A node's process that does not answer: it is stopped, or still busy."""

    def __init__(self, board: Board) -> None:
        self.board, self.looks, self.asked = board, 0, threading.Event()
        self.on_look = lambda: False

    def ask(self):
        self.asked.set()

    def wait(self, _timeout_s):
        self.looks += 1
        return self.on_look()


def test_a_rank_goes_from_tick_to_tick_and_asks_less_often_than_it_ticks(board):
    node = NodeOnCall(board)
    rank = RankLease(board, 0, node)

    assert [rank.tick() for _ in range(1000)] == [()] * 1000
    assert node.asked < 200
    assert board.report(1).arrived == 999


def test_ranks_stop_at_the_same_tick_whoever_wished_it(board):
    node = NodeOnCall(board)
    ranks = [RankLease(board, local_rank, node) for local_rank in range(2)]

    def run(local_rank: int) -> int:
        for tick in range(100_000):
            if tick == 500 and local_rank == 1:
                ranks[1].wish(stop=3)
            if any(decision.kind == "stop" for decision in ranks[local_rank].tick()):
                return tick
        return -1

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))

    assert first == second >= 500


def test_behind_a_stop_that_stop_is_said_without_waiting(board):
    node = NodeOnCall(board)
    rank = RankLease(board, 0, node)
    rank.wish(stop=4, save=1)

    assert rank.tick() == (Decision(0, "stop", 4), Decision(0, "save", 1))
    asked = node.asked
    assert rank.tick() == rank.tick() == (Decision(0, "stop", 4),)
    assert node.asked == asked


def test_a_wish_is_seen_by_the_node_at_once_and_once(board):
    waker = Silent(board)
    rank = RankLease(board, 1, waker)
    rank.wish(save=2, warned=1)
    assert waker.asked.is_set()
    waker.asked.clear()
    rank.wish(save=1, warned=1)

    assert not waker.asked.is_set()
    assert board.report(1).wishes == Wishes(save=2, warned=1)


def test_a_decision_is_returned_at_its_tick_alone(board):
    board.put_lease(Lease(1, 3, (Decision(1, "save", 1), Decision(3, "tell", 1))))
    rank = RankLease(board, 0, Silent(board))

    told = [rank.tick() for _ in range(4)]

    assert told == [(), (Decision(1, "save", 1),), (), (Decision(3, "tell", 1),)]


def test_a_rank_that_may_not_go_on_waits_and_says_so_on_the_board(board):
    waker = Silent(board)
    rank = RankLease(board, 0, waker)

    def grant():
        assert board.waiting() == [0]
        assert board.words[board.at(0) + WAITS] == 1
        return board.put_lease(Lease(1, 0))

    waker.on_look = grant
    rank.tick()

    assert board.waiting() == []
    assert waker.looks == 1


def test_a_process_that_gives_no_sign_of_life_is_given_up_in_time(board):
    waker = Silent(board)
    with pytest.raises(ControlLost, match="silent for 60 s, and this rank may not begin tick 0"):
        RankLease(board, 0, waker).tick()

    assert waker.looks == client.PATIENCE_S / client.LOOK_S


def test_a_process_that_lives_is_waited_for(board):
    waker = Silent(board)

    def look():
        board.beat()
        return waker.looks > 300 and board.put_lease(Lease(1, 0))

    waker.on_look = look
    assert RankLease(board, 0, waker).tick() == ()
    assert waker.looks == 301


def test_where_the_process_is_gone_a_rank_does_not_go_past_its_lease(board):
    waker = Silent(board)
    rank = RankLease(board, 0, waker)
    board.put_lease(Lease(1, 2))

    def gone():
        raise ControlLost("gone")

    waker.on_look = gone
    assert [rank.tick() for _ in range(3)] == [()] * 3
    with pytest.raises(ControlLost):
        rank.tick()


def test_where_nothing_is_to_be_done_no_lease_is_read(board, monkeypatch):
    board.put_lease(Lease(1, 5, (Decision(2, "save", 1),)))
    rank = RankLease(board, 0, Silent(board))
    told = [rank.tick() for _ in range(6)]
    board.put_lease(Lease(2, 9))
    monkeypatch.setattr(Board, "newer_lease", None)
    told += [rank.tick() for _ in range(4)]

    assert told == [(), (), (Decision(2, "save", 1),), *[()] * 7]


def test_a_decision_behind_ticks_at_which_nothing_is_to_be_done_is_returned(board):
    rank = RankLease(board, 0, Silent(board))
    told = []
    board.put_lease(Lease(1, 1))
    told += [rank.tick() for _ in range(2)]
    board.put_lease(Lease(2, 4, (Decision(3, "save", 1), Decision(4, "tell", 1))))
    told += [rank.tick() for _ in range(3)]
    board.put_lease(Lease(3, 6, (Decision(4, "tell", 1), Decision(6, "stop", 3))))
    told += [rank.tick() for _ in range(2)]

    assert told == [
        (),
        (),
        (),
        (Decision(3, "save", 1),),
        (Decision(4, "tell", 1),),
        (),
        (Decision(6, "stop", 3),),
    ]


def test_a_program_that_comes_again_wishes_with_new_numbers(board):
    node = NodeOnCall(board)
    first = RankLease(board, 0, node)
    first.wish(save=first.done.save + 1)
    kinds = [decision.kind for _ in range(100) for decision in first.tick()]
    assert kinds == ["save"]

    again = RankLease(board, 0, node)
    again.wish(save=again.done.save + 1)
    assert [decision.kind for _ in range(100) for decision in again.tick()] == ["save"]
    assert board.report(1).arrived == 199
