"""submitit's own tests of local jobs, on our executor and the local cluster: real jobs.

Adapted from submitit 1.5.4, local/test_local.py and auto/test_auto.py:
Copyright (c) Facebook, Inc. and its affiliates, under the MIT licence
(https://github.com/facebookincubator/submitit/blob/main/LICENSE). All jobs are submitted first, so
that they run beside each other, and waits of fixed length are gone.

Left out, since they test what a run does not use: submitit's controller process (its return codes,
`_process`, the variables that it is started with), its count of time-outs and `setup` lines, which
a local run refuses. tests/slurm/test_submitit.py has jobs that are interrupted.
"""

from __future__ import annotations

import sys
import time

import pytest
from submitit.core import utils

from hpctrain.ledger.run.find_run import find_run
from hpctrain.submitit import AutoExecutor, JobEnvironment, helpers
from tests.support import patience


class Slacker(helpers.Checkpointable):
    """submitit's custom checkpoint."""

    def __call__(self, slack=True):
        if slack:
            print("Slacking", flush=True)
            time.sleep(600)
            raise RuntimeError("I really don't want to work")
        return "worked hard"

    def __submitit_checkpoint__(self, slack=True):
        if slack:
            print("Interrupted while slacking. I won't slack next time.", flush=True)
        return utils.DelayedSubmission(self, slack=False)


def per_rank(p):
    return p * JobEnvironment().local_rank


def failing_job():
    raise RuntimeError("Failed on purpose")


def flaky():
    rank = JobEnvironment().local_rank
    print("hello from", rank)
    print("bye from", rank, file=sys.stderr)
    if rank > 0:
        raise RuntimeError(f"Failed on purpose: {rank}")


def where():
    env = JobEnvironment()
    distributed = helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    told = (distributed.rank, distributed.world_size, distributed.master_port > 0)
    return env.num_tasks, env.num_nodes, env.node, env.paths.submitted_pickle.exists(), *told


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("submitit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_LOCAL_DIR", str(folder / "local"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        executor = AutoExecutor(folder / "%j", cluster="local", local_python=sys.executable)
        executor.update_parameters(timeout_min=10)
        found = {"array": executor.map_array(max, [1, 2], [0, 5])}
        found["error"] = executor.submit(failing_job)
        found["slacker"] = executor.submit(Slacker(), slack=True)
        executor.update_parameters(tasks_per_node=3, nodes=1)
        found["flaky"] = executor.submit(flaky)
        executor.update_parameters(tasks_per_node=1, nodes=2, stderr_to_stdout=True)
        found["where"] = executor.submit(where)
        yield found


def test_local_map_array(jobs):
    assert [job.result() for job in jobs["array"]] == [1, 5]
    assert all(job.exception() is None for job in jobs["array"])
    assert jobs["array"][0].done()


def test_its_runs_are_found_from_every_folder(jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = jobs["array"][1]
    assert find_run(job.job_id).root == job.run


def test_local_error(jobs):
    exception = jobs["error"].exception()
    assert isinstance(exception, utils.FailedJobError)
    assert "Traceback" in exception.args[0]
    assert "Failed on purpose" in exception.args[0]
    with pytest.raises(utils.FailedJobError):
        jobs["error"].result()


def test_get_first_task_error_and_stdout(jobs):
    job = jobs["flaky"]
    exception = job.exception()
    assert isinstance(exception, utils.FailedJobError)
    assert "Failed on purpose: 1" in exception.args[0]
    assert job.task(0).result() is None
    with pytest.raises(ValueError, match="must be between 0 and 2"):
        job.task(4).result()
    for rank in range(3):
        assert f"hello from {rank}\n" in job.stdout()
        assert f"bye from {rank}\n" in job.stderr()


def test_job_environment_and_torch_s(jobs):
    """The export of submitit's raises where an agent has exported the same already."""
    assert jobs["where"].results() == [
        (2, 2, 0, True, 0, 2, True),
        (2, 2, 1, True, 1, 2, True),
    ]
    assert jobs["where"].stderr() is None


def test_custom_checkpoint(jobs):
    job = jobs["slacker"]
    patience.until(lambda: "Slacking" in (job.stdout() or ""), lambda: job.state)

    job._interrupt()

    assert job.result() == "worked hard"
    assert "I won't slack next time." in job.stdout()


def test_cancel(jobs):
    """Also a job that is over."""
    jobs["error"].cancel()
    jobs["error"].cancel(check=False)


def test_load_submission(jobs):
    job = jobs["array"][1]
    again = type(job)(job.paths._folder, job.job_id)
    assert again.submission().function is max
    assert again.submission().args == (2, 5)
    assert again.submission()._result is None
    assert again.result() == 5
