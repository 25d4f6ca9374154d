"""A job of submitit's comes back with its state where it dies under submitit's own executor."""

from __future__ import annotations

import time

import pytest

import hpctrain
from hpctrain import submitit
from tests.support import patience

pytestmark = pytest.mark.slurm


def counter(*, every_rank=False):
    """submitit's documented way: a callable that is its own state. Pickled by value."""

    class Counter(submitit.helpers.Checkpointable):
        checkpoint_every_rank = every_rank

        def __init__(self):
            self.n = 0
            self.starts = 0

        def __call__(self, total):
            self.starts += 1
            rank = submitit.JobEnvironment().global_rank
            while self.n < total:
                time.sleep(0.1)
                self.n += 1 + rank
                print(f"rank {rank} at {self.n} in start {self.starts}", flush=True)
            return rank, self.n, self.starts

    return Counter()


def executor(tmp_path, **parameters):
    made = submitit.AutoExecutor(tmp_path / "log", cluster="slurm", settings={"run.cpu_bind": "no"})
    made.update_parameters(**{"timeout_min": 10, **parameters})
    return made


def await_output(job, text):
    patience.until(
        lambda: text in (job.stdout() or ""),
        lambda: (job.stdout(), job.stderr(), job.state),
    )


def reasons(job):
    return [attempt.reason for attempt in hpctrain.status(str(job.run)).attempts]


def test_a_job_comes_back_from_a_preemption_by_sigterm_and_from_a_dead_node(
    slurm, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    job = executor(tmp_path, slurm_partition="grace").submit(counter(), 150)
    await_output(job, " in start 1")
    await_output(job, "rank 0 at 20 ")

    urgent = slurm.submit_urgent(4)
    slurm.wait_job(job.job_id, "PENDING")
    slurm.cancel(urgent)
    await_output(job, " in start 2")
    [node] = hpctrain.status(str(job.run)).attempts[-1].nodes
    slurm.kill_node(node)

    # The dead node's start had saved nothing; what the preemption has saved is there still.
    rank, n, starts = job.result()
    assert (rank, n, starts) == (0, 150, 2)
    assert reasons(job)[:2] == ["preempted", "node_failed"]
    begun = [line for line in job.stdout().splitlines() if line.endswith(" in start 2")]
    assert int(begun[0].split()[3]) > 20
    assert "saving the call" in job.stdout()


@pytest.mark.story(proved_by=("tests/unit/submitit/test_task.py", "tests/e2e/test_submitit_own.py"))
def test_a_limit_of_a_minute_stops_no_job_and_every_rank_keeps_its_own_state(
    slurm, tmp_path, monkeypatch
):
    """submitit warns such a job at once, counts it as timed out, and saves rank 0 alone."""
    monkeypatch.chdir(tmp_path)
    made = executor(tmp_path, timeout_min=1, tasks_per_node=2)

    job = made.submit(counter(every_rank=True), 400)

    (first, n, starts), (second, m, more) = job.results()
    assert (first, n, second, m) == (0, 400, 1, 400)
    assert starts > 1
    assert reasons(job)[0] == "timed_out"
    assert more in {1, starts}
