"""Time in which nothing moved is a class of its own: hangs, ends that did not come, cold ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.ledger.history.goodput import TimeClass, goodput
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_records import moved_by, spread
from tests.unit.history.test_goodput import Log


def trained() -> Log:
    """Submitted at 0, trains from 100 on; step 50 at 200, with 10 s of data and a save of 5 s."""
    log = Log().submitted(0).started(10, 1).ready(1, 20, 30, 100)
    log.mark(200, 1, 1, 50, data_s=10.0, save_s=5.0)
    return log.at(201, "saved", 1, step=50, stall_s=0.0)


def suspected(log: Log, t: float, stood_s: float, kind: str = "behind") -> Log:
    return log.at(t, "hang_suspected", 1, kind_of=kind, stood_s=stood_s, limit_s=60.0)


def hung(log: Log, t: float, stood_s: float, *, ended: bool = True) -> Log:
    return log.at(t, "hang", 1, kind_of="behind", stood_s=stood_s, ended=ended)


def test_a_hang_is_no_step_from_the_last_move_to_its_verdict():
    log = hung(suspected(trained(), 300, 60.0), 360, 120.0).at(361, "failure", 1, kind_of="hang")
    log.ended(362, 1, "crashed", "restart", step=60).started(365, 2, by="restart", restarts=0)
    log.ready(2, 365, 365, 365, step=50).mark(400, 2, 51, 60)

    spent = log.spent(400)

    assert spent["no_progress"] == 361 - 240
    # Steps 51 to 60 are done again, in 40 s; the verdict's own second is teardown.
    assert spent["redone"] == 240 - 200
    assert spent["step"] == (200 - 100 - 10 - 5) + 35
    assert spent["data"] == 10
    assert spent["save"] == 5
    assert spent["teardown"] == 365 - 361
    assert "stall" not in spent


def test_what_was_waited_for_in_the_time_that_moved_stays_what_it_was():
    log = suspected(trained(), 300, 60.0, kind="stopped").at(310, "hang_cleared", 1, seconds=70.0)
    log.mark(400, 1, 51, 100, data_s=30.0, save_s=10.0)

    assert log.spent(400) == {
        "queue": 10,
        "startup": 10,
        "restore": 10,
        "warm_up": 70,
        "step": 300 - 70 - 30 - 10,
        "data": 30,
        "save": 10,
        "no_progress": 70,
    }


@pytest.mark.parametrize(
    ("kind", "still"), [("behind", 0), ("unknown", 0), ("network", 70), ("deadlock", 70)]
)
def test_a_suspicion_that_is_cleared_counts_where_nobody_can_have_worked(kind, still):
    log = suspected(trained(), 300, 60.0, kind=kind).at(310, "hang_cleared", 1, seconds=70.0)
    log.mark(400, 1, 51, 100)

    assert log.spent(400).get("no_progress", 0) == still


def test_a_hang_that_is_only_told_counts_until_ranks_go_on():
    log = hung(suspected(trained(), 300, 60.0), 360, 120.0, ended=False)

    assert log.spent(1000)["no_progress"] == 1000 - 240  # it lasts

    log.at(800, "hang_cleared", 1, seconds=560.0).mark(810, 1, 51, 60)
    assert log.spent(1000)["no_progress"] == 800 - 240


def test_steps_and_saves_behind_a_stretch_keep_their_times():
    log = Log().submitted(0).started(10, 1).ready(1, 20, 30, 100).mark(200, 1, 1, 50)
    suspected(log, 300, 60.0, kind="network").at(310, "hang_cleared", 1, seconds=70.0)
    log.mark(400, 1, 51, 100).mark(410, 1, 101, 110).at(415, "saved", 1, step=110, stall_s=3.0)
    log.mark(420, 1, 111, 120).at(428, "saved", 1, step=130, stall_s=2.0)
    log.at(430, "failure", 1, kind_of="signal").ended(430, 1, "crashed", "requeue", step=130)
    before = log.spent(430)

    log.started(500, 2).ready(2, 500, 500, 500, step=110)

    assert before["save"] == 3 + 2  # also behind the last mark
    assert before["no_progress"] == 70
    # All since the mark at 410, but for the 3 s by which step 110 was saved.
    assert log.spent(500)["redone"] == 430 - 413
    assert log.spent(500)["save"] == 3


def test_steps_end_a_suspicion_of_which_nobody_could_say_that_it_was_cleared():
    log = suspected(trained(), 300, 60.0).mark(320, 1, 51, 60)

    assert "no_progress" not in log.spent(400)


def test_a_run_that_is_killed_while_it_is_suspected_has_not_moved():
    log = suspected(trained(), 300, 60.0)
    log.ended(900, 1, "node_fail", "requeue", by="successor", heard=300.0, ended_at=880.0)
    log.started(910, 2).ready(2, 920, 930, 950, step=50)

    spent = log.spent(950)

    assert spent["no_progress"] == 300 - 240
    assert spent["stall"] == 880 - 300


def test_ranks_that_were_ended_at_the_end_had_not_moved():
    log = trained().at(500, "ranks_awaited", 1, returned=1, left=[1], quiet_s=100.0)
    assert "no_progress" not in log.spent(500)  # they may still come

    log.at(700, "ranks_awaited", 1, returned=1, left=[1], quiet_s=300.0, ended=True)
    log.ended(702, 1, "completed", "stop")

    spent = log.spent(702)
    assert spent["no_progress"] == 700 - 400


def test_a_rank_that_hangs_before_anything_was_told_has_not_moved_either():
    log = Log().submitted(0).started(10, 1)
    log.at(900, "hang_suspected", 1, kind_of="stopped", stood_s=800.0)
    log.at(950, "hang", 1, kind_of="stopped", stood_s=850.0, ended=True)
    log.at(951, "failure", 1, kind_of="hang").ended(952, 1, "crashed", "stop")

    assert log.spent(952) == {"queue": 10, "other": 90, "no_progress": 851, "teardown": 1}


def test_node_seconds_are_those_of_the_attempts_nodes():
    log = Log().submitted(0).started(10, 1, nodes=4).ready(1, 20, 30, 100)
    hung(log, 300, 100.0)

    found = goodput(RunHistory.of(log.events), now=300.0)

    assert found.node_seconds[TimeClass.NO_PROGRESS] == 4 * 100


SPANS = st.lists(st.floats(0, 100), min_size=2, max_size=12, unique=True).map(
    lambda ends: [*zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False)]
)


@given(SPANS, st.lists(st.floats(0, 100), min_size=2, max_size=6, unique=True))
def test_a_clock_that_stands_leaves_all_time_that_moves_and_no_other(still, cuts):
    """Consecutive stretches by that clock come back as real ones that fill what is between."""
    start, end = min(cuts), max(cuts)
    still = [(max(a, start), min(b, end)) for a, b in still if max(a, start) < min(b, end)]
    by_clock = sorted({moved_by(t, still) for t in cuts})

    real = [span for first, last in pairwise(by_clock) for span in spread(first, last, still)]

    both = sorted([*real, *still])
    assert all(a < b for a, b in real)
    assert all(b <= c for (_, b), (c, _) in pairwise(both))
    moved_s = (end - start) - sum(b - a for a, b in still)
    assert sum(b - a for a, b in real) == pytest.approx(moved_s, abs=1e-6)


# ---- suspensions


def test_a_suspension_is_a_class_of_its_own_and_no_step():
    log = trained().at(330, "suspended", 1, seconds=90.0).mark(400, 1, 51, 100)

    spent = log.spent(400)

    assert spent["suspended"] == 90
    assert spent["step"] == 300 - 90 - 10 - 5
    assert "no_progress" not in spent
    assert "stall" not in spent
    assert sum(spent.values()) == 400


def test_ranks_that_were_found_to_stand_in_a_suspension_did_not_hang():
    """The watch wakes with the ranks, and sees that nothing has moved for long."""
    log = suspected(trained(), 331, 95.0, kind="stopped").at(330, "suspended", 1, seconds=90.0)
    log.at(332, "hang_cleared", 1, seconds=96.0).mark(400, 1, 51, 100)

    spent = log.spent(400)

    assert spent["suspended"] == 90
    assert spent["no_progress"] == 332 - 236 - 90  # what lay around it


@pytest.mark.parametrize(("now", "heard"), [(300, "steps"), (90_000, "stall")])
def test_a_job_that_is_suspended_now_does_not_train(now, heard):
    log = trained()
    history = RunHistory.of(log.events)

    spent = goodput(history, now=now, suspended_at=210.0).seconds

    assert spent[TimeClass.SUSPENDED] == now - 210
    assert spent[TimeClass.STEP] == 210 - 100 - 10 - 5
    assert spent[TimeClass.STALL] == 0
    assert sum(spent.values()) == now


@pytest.mark.parametrize(("since", "seconds"), [(-5.0, 290), (5.0, 290), (400.0, 0)])
def test_clocks_that_differ_make_a_suspension_shorter_and_never_negative(since, seconds):
    found = goodput(RunHistory.of(trained().events), now=300, suspended_at=since)

    assert found.seconds[TimeClass.SUSPENDED] == seconds
    assert sum(found.seconds.values()) == 300
    assert all(one.seconds > 0 for one in found.slices)


def test_what_is_suspended_weighs_with_all_of_its_nodes():
    log = trained().at(330, "suspended", 1, seconds=90.0).mark(400, 1, 51, 100)

    found = goodput(RunHistory.of(log.events), now=400)

    nodes = found.allocated_s / 390
    assert found.node_seconds[TimeClass.SUSPENDED] == 90 * nodes
    assert sum(found.node_seconds.values()) == found.allocated_s


def test_a_suspension_before_the_first_step_takes_nothing_from_what_is_known():
    log = Log().submitted(0).started(10, 1).at(60, "suspended", 1, seconds=30.0)
    log.ready(1, 70, 80, 150).mark(200, 1, 1, 50)

    assert log.spent(200) == {
        "queue": 10, "startup": 30, "suspended": 30, "restore": 10, "warm_up": 70, "step": 50,
    }  # fmt: skip


@given(
    st.lists(st.tuples(st.floats(0, 600), st.floats(0.1, 300)), max_size=5),
    st.lists(st.tuples(st.floats(0, 600), st.floats(0.1, 300)), max_size=5),
)
def test_no_second_is_counted_twice_or_lost_whatever_is_told(suspended, stood):
    log = trained()
    events = [(t, "suspended", {"seconds": s}) for t, s in suspended]
    events += [(t, "hang_suspected", {"kind_of": "stopped", "stood_s": s}) for t, s in stood]
    for t, kind, fields in sorted(events, key=lambda event: event[0]):
        log.at(201 + t, kind, 1, **fields)
    log.mark(900, 1, 51, 100)

    found = goodput(RunHistory.of(log.events), now=900)

    assert sum(found.seconds.values()) == pytest.approx(900)
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(found.slices))
