"""A job's state is its run's, and one question is asked for all jobs of a folder."""

from __future__ import annotations

import pickle

import pytest

import hpctrain
from hpctrain.submitit import Job, JobPaths, UncompletedJobError
from hpctrain.submitit import job as job_module
from hpctrain.submitit.job import RunWatcher
from tests.support.ledger_runs import Story, local_job


@pytest.fixture
def story(tmp_path, monkeypatch):
    """A local job 'local-17' of a run, in a folder of its own."""
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(tmp_path / "runs" / "lm").submitted("local-17")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "local-17_run").symlink_to("../runs/lm")
    return story


@pytest.fixture
def job(story, tmp_path):
    return Job(tmp_path / "log", "local-17")


def test_a_running_job_is_running_and_not_done(job, story):
    story.started(1, "local-17")

    assert job.state == "RUNNING"
    assert not job.done(force_check=True)
    assert job.run == story.run.root


@pytest.mark.parametrize(
    ("reason", "state"), [("completed", "COMPLETED"), ("user_error", "FAILED")]
)
def test_a_run_that_is_over_ends_its_job(job, story, reason, state):
    story.started(1, "local-17").ended(1, reason, "stop")

    assert job.get_info()["State"] == state
    assert job.done()


def test_a_job_without_a_result_says_its_state(job, story):
    story.started(1, "local-17").ended(1, "user_error", "stop")
    job._results_timeout_s = 0

    with pytest.raises(UncompletedJobError, match="state: FAILED"):
        job.result()


def test_a_job_that_no_scheduler_knows_is_not_taken_for_done_at_once(job, story, tmp_path):
    """Between two starts a scheduler may not know it."""
    story.started(1, "local-17")
    (tmp_path / "local" / "local-17" / "job.json").unlink()

    assert (job.get_info()["State"], job.done()) == ("UNKNOWN", False)
    job.watcher._lost_since["local-17"] -= job_module.LOST_S + 1
    job.watcher._last_status_check = 0.0
    assert job.done(force_check=True)
    assert job.state == "LOST"


def test_a_suspended_job_is_not_done(job, story, tmp_path):
    story.started(1, "local-17")
    local_job(tmp_path / "local", "local-17", state="SUSPENDED")

    assert (job.state, job.done(force_check=True)) == ("SUSPENDED", False)

    local_job(tmp_path / "local", "local-17", state="RUNNING")
    job.watcher._last_status_check = 0.0
    assert (job.done(force_check=True), job.state) == (False, "RUNNING")


def test_a_run_that_was_removed_hides_no_other_job(job, story, tmp_path):
    story.started(1, "local-17")
    (tmp_path / "log" / "local-18_run").symlink_to("../runs/removed")
    removed = Job(tmp_path / "log", "local-18")

    assert (job.state, removed.state) == ("RUNNING", "UNKNOWN")
    job.watcher._lost_since["local-18"] -= job_module.LOST_S + 1
    job.watcher._last_status_check = 0.0
    assert removed.done(force_check=True)


def test_cancel_ends_the_run(job, story):
    story.started(1, "local-17")

    job.cancel()

    assert hpctrain.status(str(job.run)).facts["cancel_requested"] == "cancel"


def test_a_job_that_is_over_is_cancelled_without_a_word_as_scancel_does(job, story, tmp_path):
    local_job(tmp_path / "local", "local-17", state="COMPLETED")
    story.started(1, "local-17").ended(1, "completed", "stop")

    job.cancel()
    assert job.state == "COMPLETED"


def test_a_job_that_cannot_be_cancelled_says_why_where_that_is_to_be_checked(tmp_path):
    job = Job(tmp_path, "99")

    job.cancel(check=False)
    with pytest.raises(hpctrain.UsageError, match="job 99 is no run"):
        job.cancel()


def test_one_question_is_asked_for_all(story, tmp_path, monkeypatch):
    surveys = []
    real = job_module.RunWatcher._ask
    monkeypatch.setattr(
        RunWatcher, "_ask", lambda self, name, jobs: surveys.append(name) or real(self, name, jobs)
    )
    local_job(tmp_path / "local", "local-18", state="RUNNING")
    Story(tmp_path / "runs" / "lm2").submitted("local-18")
    (tmp_path / "log" / "local-18_run").symlink_to("../runs/lm2")

    jobs = [Job(tmp_path / "log", f"local-{number}") for number in (17, 18)]

    assert {job.state for job in jobs} == {"RUNNING"}
    assert surveys == ["local"]


def test_a_pickled_job_finds_its_run_again(job, story):
    again = pickle.loads(pickle.dumps(job))  # noqa: S301 - our own

    assert again.run == story.run.root
    assert again.watcher is job.watcher


def test_a_number_that_is_no_job_of_the_folder_is_unknown(tmp_path):
    job = Job(tmp_path, "99")

    assert job.state == "UNKNOWN"
    with pytest.raises(hpctrain.UsageError, match="99_run is not there"):
        _ = job.run
    assert JobPaths(tmp_path, "99").folder == tmp_path
