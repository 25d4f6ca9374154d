"""The decision table, row by row, and what must never happen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.core.base.records import EndReason, JobFacts, Next, StopCause
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan.decide import EndFacts, decide, decide_end
from tests.support.ledger_runs import event_of

RUNNING = JobFacts("RUNNING", restarts=1)


@pytest.mark.parametrize(
    ("facts", "cause", "outcome", "expected"),
    [
        (RUNNING, StopCause.WARNING, "stopped", (EndReason.TIMED_OUT, Next.REQUEUE)),
        (RUNNING, StopCause.CLOCK, "stopped", (EndReason.TIMED_OUT, Next.REQUEUE)),
        (
            JobFacts("RUNNING", restarts=1, preempt_time=1.0, end_time=9.0),
            StopCause.TERM,
            "stopped",
            (EndReason.PREEMPTED, Next.REQUEUE),
        ),
        (
            JobFacts("RUNNING", restarts=1, preempt_time=1.0),
            StopCause.TERM,
            "killed",
            (EndReason.PREEMPTED, Next.REQUEUE),
        ),
        (
            JobFacts("RUNNING", restarts=1, preempt_time=1.0, comes_back=True),
            StopCause.TERM,
            "stopped",
            (EndReason.PREEMPTED, Next.LEAVE),
        ),
        (
            JobFacts("COMPLETING", restarts=1, preempt_time=1.0),
            StopCause.TERM,
            "stopped",
            (EndReason.CANCELLED, Next.STOP),
        ),
        (
            JobFacts("COMPLETING", restarts=2),
            StopCause.TERM,
            "stopped",
            (EndReason.PREEMPTED, Next.LEAVE),
        ),
        (
            JobFacts("COMPLETING", restarts=1),
            StopCause.TERM,
            "killed",
            (EndReason.CANCELLED, Next.STOP),
        ),
        (
            JobFacts("CANCELLED", restarts=1),
            StopCause.TERM,
            "stopped",
            (EndReason.CANCELLED, Next.STOP),
        ),
        (
            JobFacts("COMPLETING", restarts=1, reason="TimeLimit"),
            StopCause.TERM,
            "stopped",
            (EndReason.TIMED_OUT, Next.REQUEUE),
        ),
        (RUNNING, StopCause.USER, "stopped", (EndReason.STOPPED, Next.STOP)),
        (RUNNING, None, "crashed", (EndReason.CRASHED, Next.REQUEUE)),
        (RUNNING, None, "user_error", (EndReason.USER_ERROR, Next.STOP)),
        (None, StopCause.TERM, "stopped", (EndReason.PREEMPTED, Next.ASK_BATCH)),
        (None, StopCause.CLOCK, "stopped", (EndReason.TIMED_OUT, Next.ASK_BATCH)),
        (None, None, "done", (EndReason.COMPLETED, Next.STOP)),
    ],
)
def test_each_row_of_the_table_gives_its_action(facts, cause, outcome, expected):
    assert decide(facts, 1, cause, outcome) == expected


@pytest.mark.parametrize("outcome", ["stopped", "killed", "crashed"])
@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED"])
def test_a_cancelled_job_is_never_requeued(state, outcome):
    _, following = decide(JobFacts(state, restarts=0), 0, StopCause.TERM, outcome)

    assert following is Next.STOP


@pytest.mark.parametrize("cause", list(StopCause))
def test_a_finished_program_is_never_started_again(cause):
    facts = JobFacts("RUNNING", restarts=0, preempt_time=1.0)

    assert decide(facts, 0, cause, "done") == (EndReason.COMPLETED, Next.STOP)


SEEN = EndFacts("agent", "7", 1, 3, "crashed", scheduler=RUNNING, why="rank 1: killed")
CANCEL = event_of(0.0, "cancel_requested", None, {"job_id": "7", "save": True})
CRASHES = [event_of(0.0, "attempt_ended", n, {"reason": "crashed"}) for n in range(10, 15)]


@pytest.mark.parametrize("events", [[], [CANCEL], CRASHES, [*CRASHES, CANCEL]])
@pytest.mark.parametrize("outcome", ["done", "stopped", "killed", "crashed"])
@pytest.mark.parametrize("cause", [None, StopCause.USER, StopCause.TERM])
def test_it_does_not_matter_who_saw_the_end(events, outcome, cause):
    by_agent = replace(SEEN, outcome=outcome, cause=cause)

    by_batch = decide_end(replace(by_agent, by="batch"), RunHistory.of(events))

    assert by_batch == decide_end(by_agent, RunHistory.of(events))


@pytest.mark.parametrize(
    ("changes", "events", "reason", "following", "code"),
    [
        ({}, [], "crashed", "requeue", 0),
        ({}, CRASHES, "crashed", "stop", 93),
        ({}, [CANCEL], "cancelled", "stop", 0),
        ({}, [*CRASHES, CANCEL], "cancelled", "stop", 0),
        ({"outcome": "done"}, [CANCEL], "completed", "stop", 0),
        ({"cause": StopCause.USER, "outcome": "stopped"}, [CANCEL], "stopped", "stop", 0),
        ({"outcome": "user_error"}, [], "user_error", "stop", 1),
        ({"nodes_failed": True}, [], "node_failed", "requeue", 0),
        ({"nodes_failed": True, "outcome": "done"}, [], "completed", "stop", 0),
        ({"in_place": True}, [], "crashed", "restart", 0),
        ({"in_place": True}, CRASHES, "crashed", "stop", 93),
        ({"in_place": True}, [CANCEL], "cancelled", "stop", 0),
        ({"in_place": True, "nodes_failed": True}, [], "node_failed", "restart", 0),
        ({"needs_repair": True, "outcome": "storage_failed"}, [], "storage_failed", "stop", 93),
        ({"needs_repair": True}, [], "crashed", "requeue", 0),
        ({"has_successor": True}, CRASHES, "crashed", "requeue", 0),
        ({"has_successor": True}, [CANCEL], "cancelled", "stop", 0),
    ],
)
def test_what_follows_an_end(changes, events, reason, following, code):
    decision = decide_end(replace(SEEN, **changes), RunHistory.of(events))

    assert (decision.reason, decision.next, decision.exit_code) == (reason, following, code)
    assert bool(decision.stopped) == bool(code)


def test_an_end_that_stands_in_the_ledger_already_counts_once():
    own = event_of(0.0, "attempt_ended", SEEN.attempt, {"reason": "crashed", "next": "ask_batch"})

    assert decide_end(SEEN, RunHistory.of([*CRASHES[:4], own])).next is Next.REQUEUE
