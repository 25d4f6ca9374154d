"""Counts of collectives are seen by tick, also where ticks are shorter than looks."""

from __future__ import annotations

import pytest

from hpctrain.control.board import BOARD, COUNTS, Board
from hpctrain.control.tick_counts import put, read


@pytest.fixture
def board(tmp_path):
    board = Board.create(tmp_path / BOARD, first_rank=4, ranks=2)
    yield board
    board.close()


def test_nothing_is_shown_at_first(board):
    assert read(board) == [{}, {}]


def test_the_last_four_ticks_and_multiples_are_shown(board):
    for tick in range(20_000):
        put(board.words, board.at(1), tick, 3 * tick + 5)
    ticks = {*range(19_996, 20_000), 19_968, 19_904, 19_456, 16_384}
    assert read(board) == [{}, {tick: 3 * tick + 5 for tick in ticks}]


def test_what_nobody_counts_is_not_shown(board):
    put(board.words, board.at(0), 0, -1)
    put(board.words, board.at(0), 1 << 30, 1)
    assert read(board)[0] == {}


def test_a_count_of_more_than_32_bits_starts_over(board):
    put(board.words, board.at(0), (1 << 30) - 1, (1 << 40) + 3)
    assert read(board)[0] == {(1 << 30) - 1: 3}


def test_a_row_holds_them(board):
    put(board.words, board.at(0), 16384, 9)
    at = board.at(0)
    assert board.at(1) - at >= COUNTS + 8
    assert not any(board.words[at : at + COUNTS])
    assert not any(board.words[board.at(1) : board.at(1) + COUNTS + 8])
