from __future__ import annotations

import pytest

from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.shapes.choose import (
    MEASURED_SIGMA,
    UNMEASURED_RESTART_S,
    run_facts,
    step_points,
    waits_of,
)
from hpctrain.ledger.shapes.queue import JobShape, WaitRecord
from tests.support.ledger_runs import event_of


def ledger(*events):
    return RunHistory.of([event_of(t, kind, attempt, data) for t, kind, attempt, data in events])


def chosen(t, nodes=2, limit_s=3600.0, **more):
    return (t, "shape_chosen", None, {"nodes": nodes, "limit_s": limit_s, **more})


def attempt(t, number, *, nodes=2, steps=(1, 100), seconds=50.0, reason="preempted", lasts=500):
    """A start with 10 s to its ranks, 20 s of restore and 30 s to the first step."""
    names = [f"n{i}" for i in range(nodes)]
    begun = {"job_id": "17", "restarts": number - 1, "by": "start", "nodes": names, "world_size": 2}
    first, last = steps
    return [
        (t + 10, "attempt_started", number, {**begun, "job_started": t}),
        (t + 30, "restored", number, {"step": first - 1, "seconds": 20.0}),
        (t + 60, "phase", number, {"name": "first_step"}),
        (t + 60 + seconds, "steps", number, {"first": first, "last": last, "seconds": seconds}),
        (t + lasts, "attempt_ended", number, {"reason": reason, "next": "requeue", "by": "agent"}),
        (t + lasts, "requeued", number, {"by": "agent", "job_id": "17", "restarts": number - 1}),
    ]


def submitted(t):
    return [
        (t, "submit_intent", None, {"token": "tok"}),
        (t, "submitted", None, {"token": "tok", "job_id": "17", "total_steps": 1000}),
    ]


def two_starts():
    return ledger(
        chosen(0.0, estimate_s=50.0, partition="gpu"),
        *submitted(0.0),
        *attempt(100.0, 1),
        chosen(600.0, nodes=4, limit_s=1800.0),
        *attempt(900.0, 2, nodes=4, steps=(101, 200), seconds=30.0),
    )


def test_each_attempt_gives_a_step_time_at_its_number_of_nodes_the_newest_first():
    points = step_points(two_starts(), "this run")

    assert [(p.nodes, p.seconds, p.source) for p in points] == [
        (4, pytest.approx(0.3), "attempt 2 of this run"),
        (2, pytest.approx(0.5), "attempt 1 of this run"),
    ]


def test_an_attempt_with_few_steps_or_that_tells_none_gives_no_step_time():
    short = ledger(*submitted(0.0), *attempt(100.0, 1, steps=(1, 4)))

    assert step_points(short, "this run") == []
    assert step_points(RunHistory(), "this run") == []


def test_what_a_restart_costs_is_measured_over_all_starts():
    facts = run_facts(two_starts(), now=1400.0)

    assert facts.restart_s == pytest.approx(10 + 20 + 30, abs=1)
    assert facts.restart_source == "measured over 2 starts of this run"
    assert facts.remaining_steps == 800
    assert facts.spent_node_hours == pytest.approx((2 * 500 + 4 * 500) / 3600, rel=0.01)
    assert facts.preemptions_per_hour == pytest.approx(2 / (2 + 1000 / 3600), rel=0.01)


def test_a_new_run_takes_what_an_earlier_one_measured_but_not_what_it_spent():
    earlier = [("run waiting", RunHistory()), ("run lm-1", two_starts())]
    facts = run_facts(RunHistory(), now=0.0, total_steps=50, earlier=earlier)

    assert [p.source for p in facts.points] == ["attempt 2 of run lm-1", "attempt 1 of run lm-1"]
    assert facts.restart_source == "measured over 2 starts of run lm-1"
    assert (facts.spent_node_hours, facts.preemptions_per_hour) == (0.0, 0.0)
    assert facts.remaining_steps == 50


def test_without_any_start_the_restart_is_assumed_and_says_so():
    facts = run_facts(RunHistory(), now=0.0)

    assert facts.restart_s == UNMEASURED_RESTART_S
    assert facts.restart_source == "assumed 180 s"
    assert (facts.points, facts.remaining_steps) == ((), None)


def test_waits_go_with_the_shape_that_was_chosen_before_them():
    assert waits_of(two_starts()) == [
        WaitRecord(JobShape(2, 3600), "gpu", pytest.approx(100.0), 50.0),
        WaitRecord(JobShape(4, 1800), "", pytest.approx(300.0), None),
    ]


def test_a_shape_that_the_job_did_not_get_has_no_wait():
    run = ledger(chosen(0.0, failed="refused"), *submitted(0.0), *attempt(100.0, 1))

    assert waits_of(run) == []


def test_few_uneven_marks_make_a_step_time_less_certain_than_many():
    def sigma(marks):
        told = [
            (
                160.0 + n,
                "steps",
                1,
                {"first": 10 * n + 1, "last": 10 * n + 10, "seconds": 5 + n % 2},
            )
            for n in range(marks)
        ]
        start = [event for event in attempt(100.0, 1) if event[1] not in {"steps", "requeued"}]
        (point,) = step_points(ledger(*start[:3], *told, *start[3:]), "this run")
        return point.sigma

    assert sigma(2) > sigma(4) >= MEASURED_SIGMA
    assert sigma(100) == MEASURED_SIGMA
