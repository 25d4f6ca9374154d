"""Where the time went: every second counts once, and each class holds what it says."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.scheduler.local import LocalCluster
from hpctrain.core.base.records import JobStart
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.goodput import Goodput, TimeClass, goodput, window
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import event_fields
from tests.support.ledger_runs import event_of, local_job

if TYPE_CHECKING:
    from hpctrain.ledger.run.events import Event

HOUR = 3600.0


class Log:
    """A ledger in memory, at times that the test chooses."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def at(self, t: float, kind: str, attempt: int | None = None, **data: Any) -> Log:
        self.events.append(event_of(t, kind, attempt, data))
        return self

    def submitted(self, t: float, job_id: str = "17") -> Log:
        self.at(t, "submit_intent", token=f"tok-{job_id}")
        return self.at(t + 1, "submitted", token=f"tok-{job_id}", job_id=job_id)

    def started(self, t: float, attempt: int, *, nodes: int = 1, **data: Any) -> Log:
        names = [f"n{i}" for i in range(nodes)]
        fields = {"job_id": "17", "restarts": attempt - 1, "by": "start", **data}
        return self.at(t, "attempt_started", attempt, nodes=names, **fields)

    def ready(self, attempt: int, restoring: float, restored: float, first: float, step: int = 0):
        """Restored and through its first step, at these times."""
        self.at(restored, "restored", attempt, step=step, seconds=restored - restoring)
        return self.at(first, "phase", attempt, name="first_step")

    def mark(self, t: float, attempt: int, first: int, last: int, **data: Any) -> Log:
        return self.at(t, "steps", attempt, first=first, last=last, seconds=1.0, **data)

    def ended(self, t: float, attempt: int, reason: str, following: str, **data: Any) -> Log:
        fields = {"by": "agent", **data}
        return self.at(t, "attempt_ended", attempt, reason=reason, next=following, **fields)

    def spent(self, now: float, starts: list[JobStart] | None = None) -> dict[str, float]:
        """Seconds of each class that has any."""
        found = goodput(RunHistory.of(self.events), starts=starts or [], now=now)
        assert_adds_up(found)
        return {kind.value: s for kind, s in found.seconds.items() if s}


def assert_adds_up(found: Goodput) -> None:
    """The slices are in order, apart from each other, and the sums are theirs."""
    assert all(one.start < one.end for one in found.slices)
    assert all(before.end <= after.start for before, after in pairwise(found.slices))
    assert all((one.kind is TimeClass.QUEUE) == (one.nodes == 0) for one in found.slices)
    assert set(found.seconds) == set(TimeClass)
    assert set(found.node_seconds) == set(TimeClass) - {TimeClass.QUEUE}
    wall = math.fsum(one.seconds for one in found.slices)
    held = math.fsum(one.seconds * one.nodes for one in found.slices)
    assert found.submitted_s == pytest.approx(wall)
    assert math.fsum(found.seconds.values()) == pytest.approx(wall)
    assert found.allocated_s == pytest.approx(held)
    assert math.fsum(found.node_seconds.values()) == pytest.approx(held)


def preempted() -> Log:
    """Asked for at 0, on nodes from 100 to 1000, and told to leave after 90 steps."""
    log = Log().submitted(0)
    log.started(110, 1, nodes=2, job_started=100.0, batch_started=101.0)
    log.ready(1, 130, 150, 180)
    log.mark(480, 1, 1, 50, data_s=30.0, save_s=0.0, at_save=True)
    log.at(490, "saved", 1, step=50, stall_s=8.0)
    log.at(880, "stop_requested", 1, cause="sigterm")
    log.mark(881, 1, 51, 90, data_s=70.0, save_s=8.0, at_save=True)
    log.at(950, "saved", 1, step=90, stall_s=69.0).at(951, "stopped", 1, step=90)
    log.ended(990, 1, "preempted", "requeue").at(1000, "requeued", 1, by="agent")
    return log


# ---- what each class is -------------------------------------------------------------------------


def test_a_graceful_stop_is_cut_into_what_its_time_went_to():
    assert preempted().spent(1000) == {
        "queue": 100,  # until SLURM's own start of the job, not the agent's
        "startup": 30,
        "restore": 20,
        "warm_up": 30,
        "step": 700 - 70 - 8,
        "data": 70,
        "save": 8 + 71,  # those on the way, and from the wish to stop to the word of having left
        "teardown": 49,
    }


def test_the_wait_after_a_requeue_is_queue_and_nothing_is_redone_after_a_graceful_stop():
    log = preempted().started(1310, 2, job_started=1300.0)
    log.ready(2, 1320, 1330, 1340, step=90).mark(1400, 2, 91, 100)

    spent = log.spent(1400)

    assert spent["queue"] == 100 + 300
    assert spent["step"] == 622 + 60
    assert "redone" not in spent


def test_nodes_weigh_what_they_were_in_each_attempt():
    log = preempted().started(1310, 2, nodes=5, job_started=1300.0)

    found = goodput(RunHistory.of(log.events), now=1400)

    assert found.node_seconds[TimeClass.STARTUP] == 2 * 30 + 5 * 100
    assert found.allocated_s == 2 * 900 + 5 * 100
    assert found.submitted_s == 1400
    assert found.useful_of_allocated == pytest.approx(2 * 622 / 2300)
    assert found.useful_since_submit == pytest.approx(622 / 1400)


def killed(**end: Any) -> Log:
    """Trains from 100 on, saves step 50 at 200, and is dead from some moment after step 80 on."""
    log = Log().submitted(0).started(10, 1).ready(1, 20, 30, 100)
    log.mark(200, 1, 1, 50, data_s=10.0, save_s=0.0, at_save=True)
    log.at(206, "saved", 1, step=50, stall_s=5.0)
    log.mark(265, 1, 51, 80, data_s=12.0, save_s=5.0)
    return log.ended(900, 1, "node_failed", "leave", by="successor", **end)


def test_what_a_killed_attempt_did_since_the_restored_step_is_redone_and_its_silence_a_stall():
    log = killed(heard=300.0, ended_at=400.0, step=95)
    log.started(910, 2).ready(2, 920, 930, 950, step=50)

    assert log.spent(950) == {
        "queue": 10 + 510,
        "startup": 10 + 10,
        "restore": 10 + 10,
        "warm_up": 70 + 20,
        "step": 100 - 10,
        "data": 10,
        "save": 5,  # the save that made step 50 last
        "redone": 300 - 205,
        "stall": 100,
    }


def test_without_a_heartbeat_and_accounting_an_attempt_ends_with_its_last_word():
    log = killed()
    log.started(910, 2).ready(2, 920, 930, 950, step=50)

    spent = log.spent(950)

    assert spent["redone"] == 265 - 205
    assert spent["queue"] == 10 + (910 - 265)
    assert "stall" not in spent


def test_where_nobody_knows_what_a_program_has_saved_nothing_counts_as_redone():
    log = Log().submitted(0.0).started(10.0, 1).at(20.0, "restored", 1, step=0, by="program")
    log.at(20.0, "phase", 1, name="first_step").mark(50.0, 1, 1, 30)
    log.at(50.0, "stop_requested", 1, cause="sigterm").at(55.0, "stopped", 1, step=30)
    log.ended(55.0, 1, "preempted", "requeue")

    spent = log.spent(55.0)
    assert (spent["step"], spent["save"]) == (30.0, 5.0)
    assert "redone" not in spent


def test_before_the_next_attempt_came_the_newest_checkpoint_tells_what_will_be_redone():
    assert killed(heard=300.0, ended_at=400.0, step=95).spent(950)["redone"] == 95


def test_a_step_inside_a_mark_is_found_between_its_neighbours():
    log = Log().submitted(0).started(0, 1).ready(1, 0, 0, 100).mark(200, 1, 1, 101)
    log.ended(200, 1, "crashed", "restart")
    log.started(200, 2, restarts=0, by="restart").ready(2, 200, 200, 210, step=26)

    assert log.spent(210)["redone"] == pytest.approx(75)


def test_an_older_checkpoint_undoes_the_attempts_between():
    log = Log().submitted(0).started(0, 1).ready(1, 0, 0, 0).mark(100, 1, 1, 100, at_save=True)
    log.ended(100, 1, "crashed", "restart")
    log.started(100, 2, restarts=0, by="restart").ready(2, 100, 100, 100, step=100)
    log.mark(150, 2, 101, 150).ended(150, 2, "crashed", "restart")
    log.started(150, 3, restarts=0, by="restart").ready(3, 150, 150, 150, step=40)
    log.mark(200, 3, 41, 90)

    spent = log.spent(200)

    assert spent == {"step": pytest.approx(40 + 50, abs=1), "redone": pytest.approx(110, abs=1)}


def test_what_a_run_that_ended_for_good_never_saved_counts_for_nothing():
    log = Log().submitted(0).started(0, 1).ready(1, 0, 0, 0).mark(60, 1, 1, 60, at_save=True)
    log.at(60, "saved", 1, step=60).mark(100, 1, 61, 100)
    log.ended(100, 1, "cancelled", "stop")

    assert log.spent(5000) == {"step": 60, "redone": 40}


def test_a_restart_inside_the_allocation_begins_again_with_its_startup():
    log = Log().submitted(0).started(10, 1).ready(1, 20, 30, 40).mark(90, 1, 1, 50, at_save=True)
    log.at(90, "saved", 1, step=50).at(95, "failure", 1, summary="killed by SIGSEGV")
    log.ended(96, 1, "crashed", "restart")
    log.started(100, 2, restarts=0, by="restart").ready(2, 103, 105, 110, step=50)
    log.mark(160, 2, 51, 100, at_save=True).at(163, "done", 2, step=100)
    log.ended(170, 2, "completed", "stop")

    assert log.spent(9000) == {
        "queue": 10,
        "startup": 10 + 3,
        "restore": 10 + 2,
        "warm_up": 10 + 5,
        "step": 55 + 50,
        "save": 3,  # from the last step to the word of being done
        "teardown": 5 + 7,
    }


def test_an_attempt_that_failed_before_its_restore_is_all_startup():
    log = Log().submitted(0).started(10, 1).ready(1, 11, 12, 13).mark(20, 1, 1, 9, at_save=True)
    log.at(20, "stopped", 1, step=9).ended(20, 1, "preempted", "requeue")
    log.started(30, 2).at(35, "phase", 2, name="initialised")
    log.at(50, "failure", 2, summary="boom").ended(52, 2, "crashed", "requeue")

    assert log.spent(52)["startup"] == 1 + 20
    assert log.spent(52)["teardown"] == 2


def test_the_time_of_the_first_steps_data_is_not_counted_twice():
    log = Log().submitted(0).started(0, 1).at(10, "restored", 1, step=0, seconds=10)
    log.at(50, "phase", 1, name="first_step", data_s=30.0, save_s=0.0)
    log.mark(100, 1, 1, 50, data_s=35.0, save_s=0.0)

    assert log.spent(100) == {"restore": 10, "warm_up": 40, "step": 45, "data": 5}


def test_an_older_ledger_tells_of_its_saves_in_other_words():
    log = Log().submitted(0).started(0, 1).ready(1, 0, 0, 0).mark(50, 1, 1, 50)
    log.at(60, "saved", 1, step=50, stall_s=7.0).mark(100, 1, 51, 100)

    assert log.spent(100) == {"step": 93, "save": 7}


# ---- programs, jobs and times of other kinds ----------------------------------------------------


def test_a_program_that_tells_nothing_has_no_rate_and_its_time_is_other():
    log = Log().submitted(0).started(10, 1, batch_started=5.0)
    log.at(100, "done", 1, step=None).ended(101, 1, "completed", "stop")

    found = goodput(RunHistory.of(log.events), now=500)

    assert log.spent(500) == {"queue": 5, "startup": 5, "other": 90, "teardown": 1}
    assert found.useful_of_allocated is None
    assert found.useful_since_submit is None


def test_a_run_without_any_step_so_far_has_rates_of_nothing():
    log = Log().submitted(0).started(10, 1).at(20, "restored", 1, step=0, seconds=1)
    assert goodput(RunHistory.of(log.events), now=30).useful_of_allocated == 0


def test_a_run_that_was_never_submitted_has_spent_nothing():
    for log in (Log(), Log().at(5, "created"), Log().at(5, "submit_intent", token="t")):
        found = goodput(RunHistory.of(log.at(5, "submit_failed", why="no").events), now=50)
        assert (found.slices, found.allocated_s, found.useful_since_submit) == ((), 0, None)


def test_what_still_runs_or_waits_counts_until_now():
    log = Log().submitted(0)
    assert log.spent(70) == {"queue": 70}
    log.started(100, 1).at(110, "phase", 1, name="initialised")
    assert log.spent(130) == {"queue": 100, "startup": 30}
    log.ready(1, 130, 140, 150)
    assert log.spent(400)["step"] == 250
    log.at(410, "stop_requested", 1)
    assert log.spent(420)["save"] == 10
    log.at(430, "stopped", 1, step=9).ended(440, 1, "preempted", "requeue")
    assert log.spent(600)["queue"] == 100 + 160


def test_an_attempt_that_went_silent_no_longer_counts_as_training():
    log = Log().submitted(0).started(0, 1).ready(1, 0, 0, 0)
    log.mark(50, 1, 1, 50).mark(100, 1, 51, 100)

    assert log.spent(390) == {"step": 390}
    assert log.spent(9000) == {"step": 100, "stall": 8900}

    log.mark(1100, 1, 101, 101)  # steps may be that long
    assert log.spent(4000) == {"step": 4000}


def test_idle_time_between_an_end_for_good_and_the_resume_counts_nowhere():
    log = preempted()
    log.events[-2:] = []
    log.ended(1000, 1, "stopped", "stop").submitted(50_000, "18").started(50_060, 2, job_id="18")

    found = goodput(RunHistory.of(log.events), now=50_100)

    assert found.submitted_s == 1000 + 100
    assert found.seconds[TimeClass.QUEUE] == 100 + 60


def test_a_wait_that_was_cancelled_counts_and_what_came_after_it_does_not():
    log = Log().submitted(0).at(40, "cancel_requested", job_id="17", save=False)
    assert log.spent(900) == {"queue": 40}
    log.submitted(1000, "18").started(1010, 1, job_id="18")
    assert log.spent(1010) == {"queue": 40 + 10}


def test_accounting_has_the_last_word_on_when_a_job_had_its_nodes():
    starts = [
        JobStart("17", 0, "REQUEUED", 98.0, 1002.0, "n0,n1"),
        JobStart("17", 1, "RUNNING", 1290.0, None, "n0,n1"),
    ]
    log = preempted().started(1310, 2)

    spent = log.spent(1400, starts)

    assert spent["queue"] == 98 + 288
    assert (spent["teardown"], spent["startup"]) == (51, 32 + 110)


def test_a_start_that_only_accounting_knows_held_its_nodes_too():
    starts = [
        JobStart("17", 0, "REQUEUED", 100.0, 1000.0, "n0,n1"),
        JobStart("17", 1, "NODE_FAIL", 1100.0, 1150.0, "n0,n1,n2"),
        JobStart("17", 2, "RUNNING", 1290.0, None, "n0,n1"),
    ]
    log = preempted().started(1310, 2, restarts=2)

    found = goodput(RunHistory.of(log.events), starts=starts, now=1310)

    assert_adds_up(found)
    assert [s.nodes for s in found.slices if s.attempt is None and s.nodes] == [3]
    assert found.seconds[TimeClass.QUEUE] == 100 + 100 + 140


def test_a_requeue_before_the_start_leaves_no_row_and_the_time_tells_which_is_which():
    starts = [JobStart("17", 0, "RUNNING", 100.0, None, "n0,n1")]
    log = Log().submitted(0).started(110, 1, restarts=1)

    assert log.spent(110, starts) == {"queue": 100, "startup": 10}


def test_a_job_that_waits_again_is_known_by_accounting_before_its_successor_speaks():
    log = Log().submitted(0).started(10, 1).ready(1, 10, 10, 10).mark(60, 1, 1, 50)
    starts = [
        JobStart("17", 0, "NODE_FAIL", 5.0, 80.0, "n0"),
        JobStart("17", 1, "PENDING", None, None),
    ]

    assert log.spent(200, starts) == {
        "queue": 5 + 120,
        "startup": 5,
        "step": 50,
        "stall": 20,
    }


def test_an_old_attempt_beside_a_newer_one_counts_for_nothing():
    log = preempted().started(1310, 2, job_started=1300.0)
    log.ready(2, 1320, 1330, 1340, step=90)
    before = log.spent(1500)
    log.mark(1400, 1, 91, 300).at(1450, "saved", 1, step=300).at(1460, "done", 1)

    assert log.spent(1500) == before


def test_a_job_that_dies_slowly_beside_its_successor_does_not_count_twice():
    starts = [
        JobStart("17", 0, "NODE_FAIL", 100.0, 1400.0, "n0,n1"),
        JobStart("18", 0, "RUNNING", 1300.0, None, "n0,n1"),
    ]
    log = preempted().submitted(1200, "18").started(1310, 2, job_id="18", restarts=0)

    spent = log.spent(1500, starts)

    assert sum(spent.values()) == 1500
    assert spent["teardown"] == 1300 - 951
    assert spent["startup"] == 30 + 200


def test_the_embedded_cluster_remembers_the_starts_of_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path))
    ended, running = (0, 10.0, 20.0, 2), (1, 21.0, None, 1)
    local_job(tmp_path, "local-1", starts=[ended, running], state="RUNNING")

    assert LocalCluster().starts(["local-1", "local-9"]) == [
        JobStart("local-1", 0, "REQUEUED", 10.0, 20.0, "local0,local1"),
        JobStart("local-1", 1, "RUNNING", 21.0, None, "local0"),
    ]


def test_a_stretch_of_days_is_cut_so_that_the_last_day_has_its_own_shares():
    log = Log().submitted(0).started(0, 1).ready(1, 0, 0, 0)
    for hour in range(1, 73):  # no wait for data but in the first day
        log.mark(hour * HOUR, 1, hour, hour, data_s=min(hour, 24) * 600.0, save_s=hour * 60.0)
    found = goodput(RunHistory.of(log.events), now=72 * HOUR)

    day = window(found, 48 * HOUR)

    assert found.seconds[TimeClass.DATA] == pytest.approx(24 * 600)
    assert day.seconds[TimeClass.DATA] == 0
    assert day.seconds[TimeClass.SAVE] == pytest.approx(24 * 60)
    assert day.submitted_s == pytest.approx(24 * HOUR)
    assert_adds_up(day)


def test_a_window_cuts_what_lies_across_its_edge():
    found = window(goodput(RunHistory.of(preempted().events), now=1000), 960)
    assert [(one.start, one.end, one.kind) for one in found.slices] == [(960, 1000, "teardown")]
    assert found.allocated_s == 80


# ---- what attempts tell of it -------------------------------------------------------------------


def test_an_attempt_knows_its_wait_its_nodes_and_when_it_was_ready():
    log = killed(heard=300.0, ended_at=400.0, step=95)
    log.started(910, 2, job_started=905.0).ready(2, 920, 930, 950, step=50)
    log.ended(960, 2, "crashed", "restart")
    log.started(970, 3, restarts=1, by="restart").ready(3, 971, 972, 975, step=50)

    first, second, third = attempts(RunHistory.of(log.events))

    assert (first.allocated, first.queued_s, first.ready_s) == (10, 10, 90)
    assert (first.heard, first.ended, first.released) == (300, 300, 400)
    assert (second.allocated, second.queued_s, second.ready_s) == (905, 505, 45)
    assert (third.allocated, third.queued_s, third.ready_s) == (905, None, 5)
    assert (third.cause, third.released) == (None, None)


def test_an_attempts_times_are_accountings_where_there_is_any():
    starts = [JobStart("17", 0, "REQUEUED", 98.0, 1002.0, "n0,n1")]
    [view] = attempts(RunHistory.of(preempted().events), starts)
    assert (view.allocated, view.queued_s, view.released) == (98, 98, 1002)


# ---- whatever the ledger looks like -------------------------------------------------------------

KINDS = [*event_fields.KINDS, "meteor"]
FIELDS = (
    "step", "first", "last", "seconds", "data_s", "save_s", "stall_s", "heard", "ended_at",
    "stood_s", "quiet_s",
)  # fmt: skip
STARTED = ("job_started", "batch_started", "agent_started", "restarts", "nodes")
NUMBERS = st.one_of(
    st.none(),
    st.integers(-5, 2000),
    st.floats(-100, 3000),
    st.sampled_from(["x", "nan", "1e999", [], {}, True, 10**400, math.inf, math.nan]),
)
DATA = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(FIELDS + STARTED, NUMBERS),
        "token": st.sampled_from(["a", "b", None]),
        "job_id": st.sampled_from(["17", "18", "", None]),
        "by": st.sampled_from(["start", "restart", "batch", "agent", "successor", 3]),
        "name": st.sampled_from(["first_step", "initialised", 7]),
        "kind_of": st.sampled_from(["behind", "stopped", 7]),
        "ended": st.booleans(),
        "reason": st.sampled_from(["preempted", "completed", "crashed", "meteor"]),
        "next": st.sampled_from(["requeue", "leave", "restart", "stop", "ask_batch", "pray"]),
    },
)
TIMES = st.one_of(st.floats(0, 1000), st.integers(-10, 2000), st.sampled_from([math.nan, 1e300]))
EVENTS = st.lists(
    st.builds(
        event_of, TIMES, st.sampled_from(KINDS), st.one_of(st.none(), st.integers(1, 4)), DATA
    ).filter(bool),
    max_size=40,
)
MAYBE = st.one_of(st.none(), st.floats(0, 1200))
STARTS = st.lists(
    st.builds(
        JobStart,
        st.sampled_from(["17", "18", "19"]),
        st.integers(0, 4),
        st.sampled_from(["RUNNING", "PENDING", "NODE_FAIL"]),
        MAYBE,
        MAYBE,
        st.sampled_from(["", "n0", "n0,n1"]),
    ),
    max_size=6,
)


@given(EVENTS, STARTS, st.floats(0, 3000))
@settings(max_examples=60)
def test_any_list_of_events_adds_up_and_none_is_an_error(events, starts, now):
    found = goodput(RunHistory.of(events), starts=starts, now=now)

    assert_adds_up(found)
    assert_adds_up(window(found, now / 2))
    assert all(one.end <= now for one in found.slices)
    attempts(RunHistory.of(events), starts)


@st.composite
def lives(draw) -> tuple[Log, float]:
    """A run of one job with clocks that are off and facts that were lost; and when it ended."""
    log, t, step = Log().submitted(0.0), 40.0, 0
    skew = draw(st.lists(st.floats(-30, 30), min_size=60, max_size=60))

    def add(kind: str, attempt: int, **data: Any) -> None:
        nonlocal t
        t += draw(st.floats(0.1, 50))
        if kind == "attempt_ended" or draw(st.integers(0, 9)):
            log.at(t + skew[len(log.events) % 60], kind, attempt, **data)

    count = draw(st.integers(1, 4))
    for number in range(1, count + 1):
        where = {"job_id": "17", "restarts": number - 1, "nodes": ["a", "b"], "by": "start"}
        add("attempt_started", number, **where)
        add("restored", number, step=max(0, step - draw(st.integers(0, 20))), seconds=5)
        add("phase", number, name="first_step")
        for _ in range(draw(st.integers(0, 4))):
            step += 10
            add("steps", number, first=step - 9, last=step, data_s=t / 10, save_s=1.0)
        last = number == count
        reason, following = ("completed", "stop") if last else ("preempted", "requeue")
        add("attempt_ended", number, reason=reason, next=following, by="agent")
    return log, t


@given(lives())
@settings(max_examples=60)
def test_all_of_a_runs_time_from_its_submission_to_its_end_is_covered(life):
    log, end = life

    found = goodput(RunHistory.of(log.events), now=end + 100)

    assert_adds_up(found)
    assert found.slices[0].start == 0
    assert all(before.end == after.start for before, after in pairwise(found.slices))
    assert found.submitted_s == pytest.approx(found.slices[-1].end)
