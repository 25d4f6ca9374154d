"""Counts of collectives are seen by tick, also where ticks are shorter than looks."""

from __future__ import annotations

import pytest

from hpctrain.node.control.board import BOARD, COUNTS, Board, put_count, read_counts, ticks_apart
from hpctrain.node.control.client import RankLease


@pytest.fixture
def board(tmp_path):
    board = Board.create(tmp_path / BOARD, first_rank=4, ranks=2)
    yield board
    board.close()


def test_nothing_is_shown_at_first(board):
    assert read_counts(board) == [{}, {}]


def test_the_last_four_ticks_and_multiples_are_shown(board):
    for tick in range(20_000):
        put_count(board.words, board.at(1), tick, 3 * tick + 5)
    ticks = {*range(19_996, 20_000), 19_968, 19_904, 19_456, 16_384}
    assert read_counts(board) == [{}, {tick: 3 * tick + 5 for tick in ticks}]


def test_short_ticks_are_counted_twice_a_second_at_multiples_that_ranks_have_in_common():
    steps_ns = [0, 2_000_000_000, 500_000_000, 250_000_000, 20_000_000, 1_000_000, 1]
    assert [ticks_apart(step_ns) for step_ns in steps_ns] == [0, 0, 0, 1, 4, 8, 10]


def test_the_last_four_that_were_counted_are_shown(board):
    for tick in range(0, 1000, 16):
        put_count(board.words, board.at(1), tick, 7, power=4)
    assert {944, 960, 976, 992} <= set(read_counts(board)[1])


def test_a_rank_counts_at_those_ticks_alone(board, monkeypatch, hands):
    called = []
    lease = RankLease(board, 0, waker=None)
    lease.collectives_called = lambda: called.append(0) or 1
    monkeypatch.setattr(lease, "_is_covered", lambda _: True)
    for _ in range(65):
        lease.tick()
        hands.advance(0.02)
    assert len(called) == 2 + 4  # the first, of which nothing was known, one more, and 16 to 64


def test_what_nobody_counts_is_not_shown(board):
    put_count(board.words, board.at(0), 0, -1)
    put_count(board.words, board.at(0), 1 << 30, 1)
    assert read_counts(board)[0] == {}


def test_a_count_of_more_than_32_bits_starts_over(board):
    put_count(board.words, board.at(0), (1 << 30) - 1, (1 << 40) + 3)
    assert read_counts(board)[0] == {(1 << 30) - 1: 3}


def test_a_row_holds_them(board):
    put_count(board.words, board.at(0), 16384, 9)
    at = board.at(0)
    assert board.at(1) - at >= COUNTS + 8
    assert not any(board.words[at : at + COUNTS])
    assert not any(board.words[board.at(1) : board.at(1) + COUNTS + 8])
