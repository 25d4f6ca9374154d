"""A job that its cluster is ending is waited for, and one that lives is refused at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.core.base.records import JobInfo, JobState
from hpctrain.errors import RunAlive
from hpctrain.launch import live_job
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import Story

pytestmark = pytest.mark.usefixtures("hands")

SPEC = SimpleNamespace(cluster="local")
ENDING = JobInfo("local-1", JobState.COMPLETING, alive=True)
RUNNING = JobInfo("local-1", JobState.RUNNING, alive=True)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "lm").mkdir()
    return RunDir(tmp_path / "lm")


def answers(monkeypatch, *jobs):
    """What the cluster says at each look; the last for ever."""
    said = iter(jobs)
    state = {"last": jobs[-1], "looks": 0}

    def look(_run, _cluster):
        state["looks"] += 1
        return next(said, state["last"])

    monkeypatch.setattr(live_job, "live_job", look)
    return state


def test_the_end_of_a_job_that_is_ending_is_waited_for_and_said(run, monkeypatch, capsys):
    state = answers(monkeypatch, ENDING, ENDING, ENDING, None)
    live_job.refuse_alive(run, SPEC)
    assert state["looks"] == 4
    assert capsys.readouterr().err == (
        "hpctrain: the cluster is ending job local-1; waiting for that up to 45 s\n"
    )


def test_one_that_does_not_end_is_refused(run, monkeypatch):
    state = answers(monkeypatch, ENDING)
    with pytest.raises(RunAlive, match="the cluster is ending it: try again when it has"):
        live_job.refuse_alive(run, SPEC)
    assert 80 < state["looks"] < 100


@pytest.mark.parametrize("before", [[], [ENDING]])
def test_one_that_runs_is_refused_at_once(run, monkeypatch, before):
    state = answers(monkeypatch, *before, RUNNING)
    with pytest.raises(RunAlive, match="or let it run"):
        live_job.refuse_alive(run, SPEC)
    assert state["looks"] == len(before) + 1


def stopped(run, job_id):
    """A run that was asked to save and leave, and did."""
    story = Story(run.root).submitted(job_id).started(1, job_id)
    story.add("cancel_requested", save=True, job_id=job_id)
    story.add("stopped", 1, step=7).ended(1, "stopped", "stop", step=7)


def test_a_job_whose_run_has_ended_by_the_ledger_is_waited_for(run, monkeypatch, capsys):
    """`status` says stopped by then: who resumes at its word need not try again."""
    stopped(run, "local-1")
    state = answers(monkeypatch, RUNNING, RUNNING, ENDING, None)
    live_job.refuse_alive(run, SPEC)
    assert state["looks"] == 4
    assert capsys.readouterr().err == (
        "hpctrain: the run's end is on record, and job local-1 is about to be over; "
        "waiting for that up to 45 s\n"
    )


def test_a_job_that_outlives_its_runs_end_for_long_is_refused(run, monkeypatch):
    stopped(run, "local-1")
    answers(monkeypatch, RUNNING)
    with pytest.raises(RunAlive, match="and it is about to be over: try again when it has"):
        live_job.refuse_alive(run, SPEC)


def test_the_end_of_another_job_is_not_this_ones(run, monkeypatch):
    stopped(run, "local-0")
    state = answers(monkeypatch, RUNNING)
    with pytest.raises(RunAlive, match="or let it run"):
        live_job.refuse_alive(run, SPEC)
    assert state["looks"] == 1


def test_a_job_that_was_cancelled_is_waited_for(run, monkeypatch, capsys):
    """Its state is still RUNNING for a moment, and the next command begins anew or beside it."""
    story = Story(run.root).submitted("local-1").started(1, "local-1")
    story.add("cancel_requested", save=False, job_id="local-1")
    state = answers(monkeypatch, RUNNING, ENDING, None)
    assert live_job.outlasting(run, None) is None
    assert state["looks"] == 3
    assert capsys.readouterr().err.startswith("hpctrain: job local-1 was cancelled; waiting")


def asked_to_save(run, job_id):
    """A run that was asked to save and leave, and has not left."""
    story = Story(run.root).submitted(job_id).started(1, job_id)
    story.add("cancel_requested", save=True, job_id=job_id)


def test_a_job_that_was_asked_to_save_and_leave_is_waited_for(run, monkeypatch, capsys):
    """Who cancels with --save and resumes with the next command, as the first one says."""
    asked_to_save(run, "local-1")
    state = answers(monkeypatch, RUNNING, RUNNING, None)
    live_job.refuse_alive(run, SPEC)
    assert state["looks"] == 3
    assert capsys.readouterr().err == (
        "hpctrain: job local-1 was asked to save and leave; waiting for that up to 45 s\n"
    )


def test_a_job_whose_save_takes_long_is_refused(run, monkeypatch):
    asked_to_save(run, "local-1")
    answers(monkeypatch, RUNNING)
    with pytest.raises(RunAlive, match="asked to save and leave: try again when it has"):
        live_job.refuse_alive(run, SPEC)
