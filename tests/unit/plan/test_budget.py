"""How often a run may start again: one budget for each cause, and a stop where nothing moves."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.base.records import EndReason
from hpctrain.core.settings.schema import BudgetSettings
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan import decide
from tests.support.ledger_runs import event_of

BUDGET_OF = {
    EndReason.PREEMPTED: "preemptions",
    EndReason.REQUEUED: "preemptions",
    EndReason.TIMED_OUT: "time_limits",
    EndReason.NODE_FAILED: "nodes",
    EndReason.CRASHED: "crashes",
    EndReason.STORAGE_FAILED: "storage",
    EndReason.USER_ERROR: "crashes",
    EndReason.UNKNOWN: "crashes",
}
NO_LIMITS = {
    "preemptions": 0,
    "time_limits": 0,
    "nodes": 0,
    "crashes": 0,
    "storage": 0,
    "no_progress": 0,
}
UNBUDGETED = sorted(set(EndReason) - set(BUDGET_OF))
reasons = st.sampled_from(sorted(EndReason))


def refusal(events, *about):
    return decide.over_budget(RunHistory.of(events), *about)


def allowed(events, *about):
    return not refusal(events, *about)


def attempts_without_progress(events):
    return decide.attempts_without_progress(RunHistory.of(events))


def ends(*reasons):
    """A ledger of attempts that ended like this, one after the other."""
    return [
        event_of(float(number), "attempt_ended", number, {"reason": reason.value})
        for number, reason in enumerate(reasons, start=1)
    ]


def attempt(number, *, restored, saved=()):
    """What one attempt writes: the step that it began at, and those that it committed."""
    begun = event_of(float(number), "restored", number, {"step": restored})
    return [begun, *(event_of(number + 0.5, "saved", number, {"step": step}) for step in saved)]


def submitted(t):
    return event_of(float(t), "submitted", None, {"token": "t", "job_id": "7"})


def test_preemptions_a_time_limit_and_a_crash_do_not_use_each_others_budgets():
    history = ends(*[EndReason.PREEMPTED] * 5, EndReason.TIMED_OUT, EndReason.CRASHED)
    budget = BudgetSettings(preemptions=6, time_limits=2, crashes=2, nodes=1, no_progress=0)
    causes = [
        EndReason.PREEMPTED,
        EndReason.TIMED_OUT,
        EndReason.CRASHED,
        EndReason.NODE_FAILED,
    ]

    assert all(allowed(history, cause, budget) for cause in causes)
    for cause in causes:
        once_more = [*history, *ends(cause)]
        verdicts = {other: allowed(once_more, other, budget) for other in causes}
        assert verdicts == {other: other is not cause for other in causes}


def test_by_default_any_number_of_preemptions_and_time_limits_leaves_the_crash_budget_whole():
    history = ends(*[EndReason.PREEMPTED] * 100, *[EndReason.TIMED_OUT] * 100)

    assert allowed(history, EndReason.PREEMPTED)
    assert allowed(history, EndReason.TIMED_OUT)
    crashes = BudgetSettings().crashes
    assert allowed([*history, *ends(*[EndReason.CRASHED] * (crashes - 1))], EndReason.CRASHED)
    assert not allowed([*history, *ends(*[EndReason.CRASHED] * crashes)], EndReason.CRASHED)


@given(st.lists(reasons, max_size=30), st.sampled_from(sorted(BUDGET_OF)), st.integers(0, 8))
def test_only_ends_of_the_same_cause_count(history, reason, limit):
    name = BUDGET_OF[reason]
    same = sum(BUDGET_OF.get(one) == name for one in history)

    within = allowed(ends(*history), reason, BudgetSettings(**{**NO_LIMITS, name: limit}))

    assert within == (limit == 0 or same + 1 <= limit)


@given(st.lists(reasons, max_size=30), reasons)
def test_a_limit_of_zero_is_no_limit(history, reason):
    assert allowed(ends(*history), reason, BudgetSettings(**NO_LIMITS))


@pytest.mark.parametrize("reason", UNBUDGETED)
def test_an_end_that_nobody_can_repeat_has_no_budget(reason):
    history = ends(*[reason] * 50)

    tight = BudgetSettings(
        preemptions=1, time_limits=1, nodes=1, crashes=1, storage=1, no_progress=0
    )

    assert allowed(history, reason, tight)


def test_the_verdict_names_the_cause_its_count_and_the_setting():
    why = refusal(ends(EndReason.CRASHED), EndReason.CRASHED, BudgetSettings(crashes=1))

    assert why == "2 attempts ended by crashed, budget.crashes is 1"


def test_a_resume_begins_new_budgets():
    spent = [*ends(EndReason.CRASHED), *attempt(2, restored=0), *attempt(3, restored=0)]
    budget = BudgetSettings(crashes=1, no_progress=2)

    assert not allowed(spent, EndReason.CRASHED, budget)
    assert allowed([*spent, submitted(9)], EndReason.CRASHED, budget)


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 5))
def test_only_attempts_in_a_row_without_a_new_step_count_and_the_limit_stops_them(moved, limit):
    events, step = [], 0
    for number, moves in enumerate(moved, start=1):
        events += attempt(number, restored=step, saved=[step + 1] if moves else [])
        step += moves
    idle = len(list(takewhile(lambda moves: not moves, reversed(moved))))
    budget = BudgetSettings(**{**NO_LIMITS, "no_progress": limit})

    assert attempts_without_progress(events) == idle
    assert allowed(events, EndReason.PREEMPTED, budget) == (idle < limit)
    assert allowed(events, EndReason.PREEMPTED, BudgetSettings(**NO_LIMITS))


def test_a_step_that_was_committed_before_is_no_progress():
    fell_back = [
        *attempt(1, restored=0, saved=[10, 20]),
        *attempt(2, restored=10, saved=[20]),  # the checkpoint of step 20 was torn
        *attempt(3, restored=10, saved=[15]),
    ]

    assert attempts_without_progress(fell_back) == 2
    assert attempts_without_progress([*fell_back, *attempt(4, restored=20, saved=[21])]) == 0


def test_a_program_that_saves_for_itself_has_come_on_where_it_begins_at_a_later_step():
    def begun(steps):
        told = enumerate(({"step": step, "by": "program"} for step in steps), start=1)
        return [event_of(float(number), "restored", number, fields) for number, fields in told]

    assert attempts_without_progress(begun([0, 10, 20, 30])) == 1
    assert attempts_without_progress(begun([0, 10, 10, 10])) == 3
    assert attempts_without_progress(begun([0, 0, 0])) == 3


def test_attempts_that_never_reached_the_restore_are_not_judged():
    idle = attempt(1, restored=0)
    taken_away = [event_of(2.0, "attempt_started", 2, {}), *ends(EndReason.PREEMPTED)]

    assert attempts_without_progress([*idle, *taken_away]) == 1
    assert attempts_without_progress([*ends(*[EndReason.CRASHED] * 9)]) == 0


def test_a_lack_of_progress_says_how_long_and_which_setting():
    events = [*attempt(1, restored=0), *attempt(2, restored=0)]

    why = refusal(events, EndReason.CRASHED, BudgetSettings(no_progress=2))

    assert why == "2 attempts in a row without one new committed step (budget.no_progress is 2)"


@pytest.mark.parametrize(
    ("read_from", "without"), [("memory", 1), ("peer", 1), ("will", 1), ("disk", 5)]
)
def test_steps_that_the_nodes_memory_has_kept_are_progress(read_from, without):
    """Between two checkpoints on disk a run may lose a rank often, and come on all the same.

    `will` stands in ledgers from before 28 November 2026.
    """
    events = [
        event_of(float(n), "restored", n, {"step": 10 * n, "checkpoint": "c", "read_from": kept})
        for n, kept in enumerate(["disk", *[read_from] * 4], start=1)
    ]

    assert attempts_without_progress(events) == without


def test_a_rank_that_dies_at_the_same_step_of_the_nodes_memory_again_and_again_is_no_progress():
    events = [
        event_of(float(n), "restored", n, {"step": 10, "read_from": "memory"}) for n in range(1, 5)
    ]

    assert attempts_without_progress(events) == 4
