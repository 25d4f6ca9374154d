"""A rank's heartbeat is read from outside as it was written, at the price of a microsecond."""

from __future__ import annotations

import math
import os

import pytest

from hpctrain.core.base import clock
from hpctrain.errors import UsageError
from hpctrain.node.control import heartbeat
from hpctrain.node.control.board import BOARD, COUNTS, FIRST_WISH, Board
from hpctrain.node.control.heartbeat import (
    DATA,
    FORWARD_BACKWARD,
    SAVE,
    START,
    STEP,
    HeartbeatWriter,
    Phase,
    highest_step,
    in_phase,
    phase_name,
    read,
)
from hpctrain.node.control.lease import KINDS
from tests.support.clocks import ManualClock

RANK = 9


@pytest.fixture
def board(tmp_path):
    board = Board.create(tmp_path / BOARD, first_rank=8, ranks=2)
    yield board
    board.close()


@pytest.fixture
def here(board, tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_here", HeartbeatWriter.of_rank(tmp_path, RANK))
    return heartbeat.here()


def seen(board):
    return read(board)[RANK - board.first_rank]


def test_a_rank_that_has_said_nothing_is_in_no_phase(board):
    first = read(board)[0]
    assert (first.rank, first.process, first.phase, first.since_ns) == (8, 0, "", 0)


def test_what_a_rank_writes_is_read(board, here):
    began = seen(board)
    assert (began.process, began.phase, began.is_first) == (os.getpid(), "", True)
    here.enter(START)
    here.at_step(7, STEP)
    now = seen(board)
    assert (now.rank, now.step, now.phase, now.limit_s) == (RANK, 7, "step", None)
    assert now.since_ns > began.since_ns
    here.stepped()
    here.beat()
    later = seen(board)
    assert (later.phase, later.is_first) == ("step", False)
    assert later.since_ns > now.since_ns
    assert read(board)[0].since_ns == 0


def test_phases_stand_inside_each_other(board, here):
    here.at_step(1, STEP)
    with Phase(DATA):
        assert seen(board).phase == "data"
        with Phase(SAVE):
            assert seen(board).phase == "save"
        assert seen(board).phase == "data"
    assert seen(board).phase == "step"


class Seconds(ManualClock):
    """A second passes at each look at it."""

    def monotonic_ns(self):
        self.advance(1.0)
        return super().monotonic_ns()


def test_how_long_it_has_waited_for_its_data_adds_up(board, here):
    with clock.use(Seconds()):
        _wait_for_data(board, here)


def _wait_for_data(board, here):
    here.at_step(1, STEP)
    for _ in range(2):
        with Phase(DATA):
            assert seen(board).phase == "data"
        here.beat()
    assert seen(board).in_data_s == 2.0
    here.enter(DATA)
    assert seen(board).in_data_s == 2.0
    here.beat()  # still in it
    assert seen(board).in_data_s == 3.0
    here.at_step(2, STEP)
    here.enter(SAVE)
    assert seen(board).in_data_s == 4.0
    assert read(board)[0].in_data_s == 0.0


def test_the_highest_step_is_of_ranks_that_have_done_one(board, here, tmp_path):
    assert highest_step(tmp_path) is None
    here.at_step(7, STEP)  # where it begins: nothing was done yet
    assert highest_step(tmp_path) is None
    here.stepped()
    here.at_step(8, STEP)
    assert highest_step(tmp_path) == 8
    HeartbeatWriter.of_rank(tmp_path, RANK - 1).stepped()
    assert highest_step(tmp_path) == 8
    (tmp_path / BOARD).unlink()
    assert highest_step(tmp_path) is None


def test_a_function_is_in_its_phase_until_it_is_left_however(board, here):
    @in_phase(FORWARD_BACKWARD)
    def fails(number):
        assert seen(board).phase == "forward_backward"
        raise ValueError(number)

    here.at_step(1, STEP)
    with pytest.raises(ValueError, match="5"):
        fails(5)
    assert seen(board).phase == "step"


@pytest.mark.parametrize(("said", "read_s"), [(None, None), (0.25, 0.25), (math.inf, 2e9)])
def test_a_section_is_known_by_its_name_and_its_limit(board, here, tmp_path, said, read_s):
    with Phase("épreuve"), Phase("evaluation", said):
        now = seen(board)
    assert now.phase == "evaluation"
    assert now.limit_s == read_s
    with Phase("évreuve"), Phase("evaluation"):
        assert seen(board).phase == now.phase


def test_names_that_nobody_can_tell_are_not_known(board, here, tmp_path):
    assert phase_name(tmp_path, RANK, 5000) == ""
    (tmp_path / f"sections-{RANK}").write_text("{")
    assert phase_name(tmp_path, RANK, 64) == ""


def test_a_process_without_an_agent_writes_nothing(board):
    with Phase("evaluation", 3), Phase(DATA):
        heartbeat.here().at_step(3, STEP)
    assert {one.since_ns for one in read(board)} == {0}


def test_a_forked_child_does_not_write_its_parents_heartbeat(board, tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_here", heartbeat.here())  # put back afterwards
    heartbeat.begin(tmp_path, RANK)
    heartbeat.here().enter(START)
    before = seen(board)
    child = os.fork()
    if child == 0:
        heartbeat.here().enter(SAVE)
        os._exit(0)
    os.waitpid(child, 0)
    assert seen(board) == before


def test_a_heartbeat_disturbs_no_other_word_of_the_row(board, here):
    at = board.at(RANK - board.first_rank)
    here.at_step(3, STEP)
    assert not any(board.words[at : at + FIRST_WISH + len(KINDS)])
    assert not any(board.words[at + COUNTS : board.at(RANK - board.first_rank + 1)])


@pytest.mark.parametrize(
    ("name", "limit_s"),
    [("", None), ("x" * 81, None), ("a\nb", None), (3, None), ("a", 0), ("a", -1)],
)
def test_a_section_without_a_name_or_with_no_time_is_refused(name, limit_s):
    with pytest.raises(UsageError, match=r"a section has|seconds above"):
        heartbeat.section(name, limit_s)
