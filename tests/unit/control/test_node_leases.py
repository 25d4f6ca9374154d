"""A node says what is new: at once where somebody waits, else soon, and again as a sign of life."""

from __future__ import annotations

import pytest

from hpctrain.node.control.board import TICK, Board
from hpctrain.node.control.lease import Decision, Lease, Report, Wishes
from hpctrain.node.control.node_server import FORWARD_S, LOOK_S, SAY_S, NodeLeases

NOW_S = 100.0


@pytest.fixture
def board(tmp_path):
    board = Board.create(tmp_path / "board", first_rank=0, ranks=2)
    yield board
    board.close()


def report(version: int = 1, **fields) -> Report:
    fields = {
        "behind": 7,
        "began_ago_s": 0.0,
        "step_s": 0.0,
        "wishes": Wishes(),
        "ranks": 2,
    } | fields
    return Report(version, 7, **fields)


def test_a_node_below_says_what_has_changed_and_no_more(board):
    leases = NodeLeases(board, None)

    assert leases.look(NOW_S).report is not None
    assert leases.look(NOW_S + 0.1).report is None
    board.words[board.at(1) + TICK] = 4
    said = leases.look(NOW_S + 0.2).report
    assert said is not None
    assert (said.arrived, said.ranks) == (3, 1)


def test_what_a_child_says_goes_up_merged_and_soon(board):
    leases = NodeLeases(board, None)
    leases.look(NOW_S)
    assert leases.next_look_s() == NOW_S + LOOK_S
    leases.hear_child(5, report(), NOW_S + 0.001, is_urgent=False)

    assert leases.next_look_s() == NOW_S + 0.001 + FORWARD_S
    sent = leases.look(NOW_S + 0.02)
    assert sent.report is not None
    assert (sent.report.arrived, sent.report.ranks, sent.is_urgent) == (7, 2, False)
    assert sent.report.began_ago_s == pytest.approx(0.019)


def test_where_somebody_waits_it_goes_up_at_once(board):
    leases = NodeLeases(board, None)
    leases.look(NOW_S)
    leases.hear_child(5, report(), NOW_S + 0.001, is_urgent=True)

    assert leases.next_look_s() < NOW_S
    assert leases.look(NOW_S + 0.001).is_urgent
    assert leases.next_look_s() > NOW_S
    leases.ask()
    assert leases.next_look_s() < NOW_S


def test_an_old_report_of_a_child_changes_nothing(board):
    leases = NodeLeases(board, None)
    leases.hear_child(5, report(version=2), NOW_S, is_urgent=False)
    leases.look(NOW_S)
    leases.hear_child(5, report(version=1, ranks=1), NOW_S, is_urgent=True)

    assert leases.next_look_s() == NOW_S + LOOK_S
    assert leases.look(NOW_S).report is None


def test_a_lease_from_above_is_read_by_the_ranks_and_passed_on_once(board):
    leases = NodeLeases(board, None)
    lease = Lease(3, 9, (Decision(8, "save", 1),))

    assert leases.hear_parent(lease, NOW_S)
    assert not leases.hear_parent(lease, NOW_S)
    assert not leases.hear_parent(Lease(2, 20), NOW_S)
    assert board.newer_lease(0)[1] == lease
    assert leases.lease == lease


def test_the_root_grants_what_is_wished_by_whomever(board):
    root = NodeLeases(board, 4)
    root.hear_child(1, report(wishes=Wishes(stop=3)), NOW_S, is_urgent=True)
    sent = root.look(NOW_S)

    assert sent.report is None
    assert sent.lease is not None
    assert sent.lease.decisions == (Decision(sent.lease.horizon, "stop", 3),)
    assert board.newer_lease(0)[1] == sent.lease
    assert root.look(NOW_S + 0.1).lease is None


def test_the_root_looks_when_a_tick_is_due_though_nobody_says_anything(board):
    root = NodeLeases(board, 2)
    root.hear_child(1, report(step_s=0.9), NOW_S, is_urgent=False)
    first = root.look(NOW_S).lease
    due_s = root.next_look_s()
    while root.look(due_s).lease is None:
        due_s = root.next_look_s()

    assert first is not None
    assert NOW_S < due_s < NOW_S + 0.9
    assert root.lease.horizon == first.horizon + 1


@pytest.mark.parametrize("is_root", [True, False])
def test_signs_of_life_are_given_though_nothing_happens(board, is_root):
    leases = NodeLeases(board, 2 if is_root else None)
    leases.look(NOW_S)
    sent = leases.look(NOW_S + SAY_S + 0.01)

    assert sent.lease == Lease(0, -1)
    assert (sent.report is None) == is_root
    assert leases.look(NOW_S + SAY_S + 0.02) == (None, None, False, False)


def test_a_parent_that_has_just_come_is_told_all(board):
    leases = NodeLeases(board, None)
    leases.look(NOW_S)
    assert leases.look(NOW_S + 0.1).report is None
    leases.meet_parent()

    assert leases.next_look_s() < NOW_S
    assert leases.look(NOW_S + 0.1).report is not None
