"""A rank's part at a stop and at the end, without an agent and without a signal."""

from __future__ import annotations

import os

import pytest
from submitit.core import utils

from hpctrain.core.base.records import StopCause
from hpctrain.ledger.run.fence import Attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent.end_writer import read_outcome
from hpctrain.submitit import helpers
from hpctrain.submitit import task as task_module
from hpctrain.submitit.job import JobFiles, dump
from hpctrain.submitit.task import Task, TaskSettings, as_submitit_sets_it


class Quiet:
    """Stands in the place of the watch: the test says when there is a stop."""

    def __init__(self, *_, **__):
        self.cause = None

    def start(self):
        pass

    def call(self, act):
        self.act = act

    def stop_acting(self):
        pass


class Work(helpers.Checkpointable):
    """Stops itself in its midst, as a signal would."""

    later = None
    always = False
    checkpoint_every_rank = False

    def __init__(self):
        self.starts = 0

    def __call__(self, cause=None, error=None):
        self.starts += 1
        if cause is not None and (self.starts == 1 or self.always):
            current[0].watch.cause = cause
            current[0].watch.act()
        if error:
            raise error
        return self.starts

    def checkpoint(self, *args, **kwargs):
        if isinstance(self.later, Exception):
            raise self.later
        return None if self.later == "none" else super().checkpoint(*args, **kwargs)


current = [None]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a rank of a job: the call is given once, for the first start."""
    monkeypatch.setattr(task_module, "StopWatch", Quiet)
    monkeypatch.setattr(task_module.Task, "_requests", lambda self: None)
    monkeypatch.setattr(task_module, "POLL_S", 0.01)
    run = RunDir(tmp_path / "run")
    files = JobFiles.of(run)
    files.folder.mkdir(parents=True)
    starts = [0]

    def go(call=None, *, most=None, rank=0, ranks=1, new_job=False):
        if call is not None:
            dump(call, files.pickle())
        starts[0] += 1
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        attempt = Attempt(starts[0], "t", "7", 0 if new_job else starts[0] - 1, 0.0)
        settings = TaskSettings("log", 20.0, 60.0, most, stderr_to_stdout=False)
        current[0] = Task(settings, run, attempt)
        current[0].run_call()
        return utils.pickle_load(files.result(rank))

    go.run, go.files = run, files
    return go


def outcome(start):
    return read_outcome(start.run, current[0].attempt.number)


@pytest.mark.parametrize("cause", [StopCause.TERM, StopCause.CLOCK, StopCause.USER])
def test_a_call_is_saved_at_a_stop_and_goes_on_in_the_next_start(start, cause):
    with pytest.raises(SystemExit) as left:
        start(utils.DelayedSubmission(Work(), cause))

    assert left.value.code == 0
    assert outcome(start) == {"outcome": "stopped", "step": None, "cause": cause}
    assert start() == ("success", 2)


def test_time_limits_end_a_job_only_where_they_are_counted(start):
    work = Work()
    work.always = True
    call = utils.DelayedSubmission(work, StopCause.CLOCK)
    for _ in range(2):
        with pytest.raises(SystemExit):
            start(call, most=2)

    with pytest.raises(utils.FailedJobError, match="timed-out too many times"):
        start(most=2)
    assert outcome(start)["outcome"] == "failed"


def test_a_preemption_is_never_counted(start):
    with pytest.raises(SystemExit):
        start(utils.DelayedSubmission(Work(), StopCause.TERM), most=0)
    assert start(most=0) == ("success", 2)


def plain(cause):
    current[0].watch.cause = cause
    current[0].watch.act()


def test_a_plain_function_begins_again_after_a_preemption_and_has_failed_at_its_limit(start):
    with pytest.raises(SystemExit):
        start(utils.DelayedSubmission(plain, StopCause.TERM))
    assert outcome(start)["outcome"] == "stopped"

    with pytest.raises(utils.FailedJobError, match="timed-out and not checkpointable"):
        start(utils.DelayedSubmission(plain, StopCause.CLOCK))
    assert outcome(start)["outcome"] == "failed"


def test_a_checkpoint_that_wants_no_requeue_ends_the_job(start):
    work = Work()
    work.later = "none"

    with pytest.raises(utils.FailedJobError, match="checkpoint function returned None"):
        start(utils.DelayedSubmission(work, StopCause.TERM))


def test_a_checkpoint_that_fails_costs_its_steps_and_not_the_job(start):
    work = Work()
    work.later = OSError("No space left on device")

    with pytest.raises(SystemExit):
        start(utils.DelayedSubmission(work, StopCause.TERM))

    assert outcome(start)["outcome"] == "stopped"
    assert start.files.saved_state().attempt == 0


def test_at_a_time_limit_it_is_the_jobs_failure_so_that_it_does_not_come_back_for_ever(start):
    work = Work()
    work.later = OSError("No space left on device")

    with pytest.raises(utils.FailedJobError, match="No space left"):
        start(utils.DelayedSubmission(work, StopCause.CLOCK))


def test_what_a_call_raises_is_its_result_and_no_start_makes_it_again(start):
    for _ in range(2):
        with pytest.raises(utils.FailedJobError, match="ValueError: no"):
            start(utils.DelayedSubmission(Work(), error=ValueError("no")))
        assert outcome(start) == {"outcome": "failed", "step": None, "cause": None}


def test_who_resumes_a_failed_job_has_it_tried_again(start):
    with pytest.raises(utils.FailedJobError):
        start(utils.DelayedSubmission(Work(), error=ValueError("no")))

    assert start(utils.DelayedSubmission(Work()), new_job=True) == ("success", 1)


def test_a_value_that_cannot_be_pickled_is_a_failure(start):
    with pytest.raises(utils.FailedJobError, match="pickle"):
        start(utils.DelayedSubmission(lambda: (x for x in ())))


class Unreadable:
    """Can be pickled, and not be read again."""

    def __reduce__(self):
        return int, ("no number",)


def test_a_value_that_cannot_be_read_again_is_the_callers_affair(start, monkeypatch):
    monkeypatch.setattr(Task, "_await_peers", lambda task, failed: ended.append(failed))
    ended = []

    with pytest.raises(ValueError, match="no number"):  # of who reads it here
        start(utils.DelayedSubmission(Unreadable))

    assert ended == [False]


def test_a_result_is_made_once_whatever_happens_to_the_other_ranks(start):
    dump(("success", "before"), start.files.result(0))

    assert start(utils.DelayedSubmission(Work())) == ("success", "before")


def test_another_rank_waits_for_rank_0_and_leaves_with_it(start):
    attempt = start.run.outcome(1)
    attempt.parent.mkdir(parents=True)
    saved = []

    def save_soon(*_):
        saved.append(1)
        attempt.write_text('{"outcome": "stopped"}')

    task_module.look_anew, before = save_soon, task_module.look_anew
    try:
        with pytest.raises(SystemExit):
            start(utils.DelayedSubmission(Work(), StopCause.TERM), rank=1, ranks=2)
    finally:
        task_module.look_anew = before

    assert saved
    assert not start.files.pickle(1, 1).exists()


def test_a_peers_closed_connection_is_no_failure_where_rank_0_has_saved(start):
    outcome_path = start.run.outcome(1)
    outcome_path.parent.mkdir(parents=True)
    outcome_path.write_text('{"outcome": "stopped"}')

    with pytest.raises(SystemExit):
        start(utils.DelayedSubmission(Work(), error=RuntimeError("Connection closed by peer")))
    assert not start.files.result(0).exists()


def test_submitits_environment_is_that_of_the_rank(monkeypatch):
    environ = dict(os.environ) | {"HPCTRAIN_CLUSTER": "local", "HPCTRAIN_JOB_ID": "local-3"}
    environ |= {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "GROUP_RANK": "2"}
    environ["GROUP_WORLD_SIZE"] = "4"
    as_submitit_sets_it(environ, "log/%j")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    env = helpers.JobEnvironment()

    assert (env.job_id, env.global_rank, env.local_rank, env.node) == ("local-3", 5, 1, 2)
    assert (env.num_tasks, env.num_nodes) == (8, 4)
    assert env.paths.folder.name == "local-3"
