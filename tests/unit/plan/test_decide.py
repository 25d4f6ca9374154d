"""The decision table, row by row, and what must never happen."""

from __future__ import annotations

import pytest

from hpctrain.base.records import EndReason, JobFacts, Next, StopCause
from hpctrain.plan.decide import decide

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
