"""When a run will be done: in words, in numbers, and where it is not known."""

from __future__ import annotations

import time

import pytest

from hpctrain.core.base.records import JobInfo, JobState
from hpctrain.core.drawing import drawn
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.shapes.choose import RunFacts, StepPoint, done_in
from hpctrain.ledger.shapes.queue import JobShape, QueueWait, own_wait
from hpctrain.observe.status.finish import Finish, finish, moment
from hpctrain.observe.status.screen import StatusScreen
from hpctrain.observe.status.status import Answer, status_of
from hpctrain.observe.status.text import as_json
from tests.support.ledger_runs import event_of

NOW = 100_000.0
HOUR = 3600.0


def ledger(*, steps=1000, waited=600.0, marks=True, total=10_000, extra=()):
    """A run of two nodes: one start of four hours, its second since one hour; 1 s a step."""
    begun = {"by": "start", "job_id": "17", "nodes": ["n1", "n2"], "world_size": 2}
    first, second = NOW - 6 * HOUR, NOW - HOUR
    rows = [
        (first - waited, "submit_intent", None, {"token": "tok"}),
        (first - waited, "submitted", None, {"token": "tok", "job_id": "17"}),
        (first, "attempt_started", 1, {**begun, "restarts": 0, "job_started": first}),
        (first + 60, "phase", 1, {"name": "first_step"}),
        (second - waited, "attempt_ended", 1, {"reason": "timed_out", "next": "requeue"}),
        (second - waited, "requeued", 1, {"job_id": "17", "restarts": 0}),
        (second, "attempt_started", 2, {**begun, "restarts": 1, "job_started": second}),
        (second + 60, "phase", 2, {"name": "first_step"}),
        *extra,
    ]
    if marks:
        told = {"first": 1, "last": steps, "seconds": float(steps), "total": total}
        rows.append((NOW - 10, "steps", 2, told))
    return RunHistory.of([event_of(t, kind, number, data) for t, kind, number, data in rows])


def job(state=JobState.RUNNING, **more):
    return JobInfo("17", state, alive=True, **more)


def promised(history=None, *, running=True, **more):
    info = more.pop("job", job(end_time=NOW + 3 * HOUR))
    return finish(history or ledger(), info, running=running, now=NOW, **more)


def test_what_fits_into_the_running_job_waits_for_nothing():
    short = promised(job=job(end_time=NOW + 12 * HOUR))

    assert short.median == pytest.approx(NOW + 9000, abs=5)
    assert short.high is not None
    assert short.high - NOW < 9000 * 1.1


def test_a_running_job_without_a_limit_takes_no_further_start():
    endless = promised(job=job())

    assert endless.median == pytest.approx(NOW + 9000, abs=5)
    assert "no time limit" in endless.assumes


def test_every_further_start_adds_its_wait_and_its_restart():
    long = promised()

    # 9000 s of steps; 3 h of them in this job; a job has four hours.
    assert long.median == pytest.approx(NOW + 9000, abs=5)
    longer = promised(ledger(total=20_000))
    assert longer.median is not None
    assert longer.low is not None
    assert longer.high is not None
    beyond = longer.median - NOW - 19_000
    assert 600 + 60 < beyond < 1200
    assert longer.low < longer.median < longer.high
    assert "waits of about 10m00s (2 waits of this run)" in longer.assumes
    assert "1.00 s a step (attempt 2 of this run on 2)" not in longer.assumes
    assert "1.00 s a step (attempt 2 of this run)" in longer.assumes
    assert "jobs of 2 nodes x 4h00m" in longer.assumes
    assert "1m00s a start (measured over 2 starts of this run)" in longer.assumes
    assert "preemptions and failures as so far (0)" in longer.assumes


def test_a_waiting_run_starts_when_the_scheduler_plans_it_else_as_earlier():
    chosen = [(NOW - 5, "shape_chosen", None, {"nodes": 2, "limit_s": 4 * HOUR})]
    history = ledger(extra=chosen)
    waits = job(JobState.PENDING, start_time=NOW + 7200)

    planned = promised(history, running=False, job=waits)
    usual = promised(history, running=False, job=job(JobState.PENDING))

    assert planned.median is not None
    assert usual.median is not None
    assert NOW + 9000 + 60 + 600 < planned.median < NOW + 9000 + 60 + 7200
    assert usual.median == pytest.approx(NOW + 9000 + 60 + 600, rel=0.01)
    assert any("SLURM's estimate x" in line for line in planned.assumes)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"history": ledger(total=None)}, "does not report how many steps there will be"),
        ({"history": ledger(marks=False), "total_steps": 9}, "no step of it was timed so far"),
        ({"job": None}, "the time limit of its jobs is not known"),
    ],
)
def test_what_is_not_known_is_said_as_not_known(given, why):
    promise = promised(**given)

    assert promise.not_known.endswith(why)
    assert promise.median is None
    assert promise.text(NOW) == f"when it will be done is not known: {promise.not_known}"


def test_a_start_whose_wait_nobody_knows_gives_no_finish():
    facts = RunFacts(points=[StepPoint(1, 1.0, "x")], remaining_steps=1000, restart_s=10.0)
    shape, wait = JobShape(1, 500), QueueWait(60.0, 0.3, "x")

    assert done_in(facts, shape, left_s=100.0, first=None, later=None) is None
    assert done_in(facts, shape, left_s=None, first=None, later=wait) is None
    assert done_in(facts, shape, left_s=2000.0, first=None, later=None) is not None
    assert own_wait([]) is None


def test_a_run_none_of_whose_waits_is_known_says_so():
    begun = {"by": "start", "job_id": "17", "nodes": ["n1"], "restarts": 0, "world_size": 1}
    rows = [
        (NOW - 100, "shape_chosen", None, {"nodes": 1, "limit_s": 600.0}),
        (NOW - 90, "attempt_started", 1, begun),
        (NOW - 80, "phase", 1, {"name": "first_step"}),
        (NOW - 10, "steps", 1, {"first": 1, "last": 60, "seconds": 60.0, "total": 5000}),
    ]
    history = RunHistory.of([event_of(t, kind, number, data) for t, kind, number, data in rows])

    promise = promised(history, job=job(end_time=NOW + 500))

    assert promise.not_known == "it takes another start, and how long that waits is not known"


def test_a_finish_reads_as_people_say_it(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    promise = Finish(NOW - 4 * HOUR, NOW + 40 * HOUR, NOW + 200 * HOUR)

    assert promise.text(NOW) == "done about Sat 19:46 (between Thu 23:46 and 1970-01-10)"
    assert moment(NOW, NOW) == "03:46"


def test_status_shows_it_with_what_it_assumes_and_json_has_the_numbers():
    history, answer = ledger(), Answer(job(end_time=NOW + 3 * HOUR))
    status = status_of(history, answer, name="lm", now=NOW)

    text = drawn(StatusScreen(status, all_attempts=False), 200)
    assert "done about " in text
    assert "assumes 1.00 s a step (attempt 2 of this run); jobs of 2 nodes x 4h00m" in text
    value = as_json(status)["finish"]
    assert value["low"] < value["median"] < value["high"]
    assert value["not_known"] == ""


def test_a_run_that_is_over_or_reports_no_step_promises_nothing():
    silent = RunHistory.of([event_of(0.0, "submitted", None, {"token": "t", "job_id": "17"})])

    assert status_of(silent, Answer(job(JobState.PENDING)), name="lm", now=NOW).finish is None
    assert status_of(ledger(), Answer(None), name="lm", now=NOW).finish is None
