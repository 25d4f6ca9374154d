"""What dies without a word: a rank, an agent, slurmctld. Each time the run goes on and finishes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.realtime(
        proved_by=(
            "tests/unit/agent/test_simulated_rounds.py",
            "tests/unit/agent/test_batch_side.py",
        )
    ),
]

SETTINGS = {
    "train.steps": 80,
    "train.step_delay_s": 0.2,
    "checkpoint.interval_steps": 5,
}


ONE_EACH = ("--nodes=2", "--ranks-per-node=1", "--time=10")


def _rank_pid(slurm, job_id, rank):
    """The process of the job that is this rank: the one that has its log open."""
    for pid in slurm.pids_of_job(job_id):
        log = f"rank-{rank:05d}.log"
        if any(path.endswith(log) for path in processes.open_files(pid)):
            return pid
    return None


def _agent_pid(slurm, run, node):
    """The process of the node that is the parent of its ranks."""
    ranks = {
        pid
        for pid in slurm.pids_of_job(run.job_id, node=node)
        if any("/rank-" in path for path in processes.open_files(pid))
    }
    parents = {int(_stat(pid)[1]) for pid in ranks} - ranks
    assert len(parents) == 1, (ranks, parents)
    return parents.pop()


def _stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _agents(run):
    """The processes of agents and ranks."""
    pids = run.slurm.pids_of_job(run.job_id)
    return [pid for pid in pids if "hpctrain.entry.slurm_task" in processes.command(pid)]


def _outside(run, what):
    """The batch script of the job, or its srun and that one's helper."""
    pids = run.slurm.pids_of_job(run.job_id)
    if what == "srun":
        return [pid for pid in pids if processes.executable(pid) == "srun"]
    return [pid for pid in pids if "slurm_script" in " ".join(processes.command(pid))]


@pytest.mark.soak  # tests/unit/agent/test_batch_side.py has what the batch script decides
def test_a_killed_srun_has_the_job_requeued_and_ranks_save_before(slurm, tmp_path):
    run = submit(slurm, tmp_path, *ONE_EACH, sets=SETTINGS, held={1: 20})
    run.wait_event("saved", attempt=1)

    processes.kill_all(_outside(run, "srun"))
    run.let_go(1)
    run.wait_done()

    assert run.ends() == [("crashed", "requeue"), ("completed", "stop")], run.story()
    assert slurm.job(run.job_id)["Restarts"] == "1"
    assert all(lost <= 5 for lost in run.steps_lost())


@pytest.mark.soak
@pytest.mark.parametrize("what", ["srun", "batch script"])
def test_a_stopped_srun_or_batch_script_keeps_the_nodes_until_somebody_cancels(
    slurm, tmp_path, what
):
    run = submit(slurm, tmp_path, *ONE_EACH, sets=SETTINGS, held={1: 20})
    run.wait_event("saved", attempt=1)

    stopped = _outside(run, what)
    processes.kill_all(stopped, signal.SIGSTOP)
    run.let_go(1)
    run.wait("the end of the agents", lambda: not _agents(run))
    assert run.ends() == [("completed", "stop")], run.story()
    assert slurm.job(run.job_id)["JobState"] == "RUNNING"
    assert all(map(processes.alive, stopped))

    assert f"cancelled job {run.job_id}" in run.cli("cancel", "run")
    slurm.wait_job(run.job_id, "CANCELLED")
    run.wait("an empty job", lambda: not slurm.pids_of_job(run.job_id))
    assert run.status()["state"] == "done"


def test_a_killed_rank_agent_and_slurmctld_each_end_in_a_finished_run(slurm, tmp_path):
    args = ("--nodes=2", "--ranks-per-node=2", "--time=10")
    run = submit(slurm, tmp_path, *args, sets=SETTINGS, held={1: 20, 2: 40, 3: 70})
    run.wait_event("saved", attempt=1)
    (_, last), _ = run.nodes()

    # Rank 3: its node's agent sees it first, all ranks start again inside the allocation.
    os.kill(run.wait("rank 3", lambda: _rank_pid(slurm, run.job_id, 3)), signal.SIGKILL)
    run.let_go(1)
    run.wait_event("restored", attempt=2)
    failure = run.wait_event("failure")
    assert (all_fields(failure)["rank"], all_fields(failure)["node"]) == (3, last)
    assert "SIGKILL" in all_fields(failure)["summary"]
    assert slurm.job(run.job_id)["Restarts"] == "0", run.story()

    # The agent of the last node: its ranks die with it, the step ends, the batch side requeues.
    run.wait_event("saved", attempt=2)
    os.kill(_agent_pid(slurm, run, last), signal.SIGKILL)
    run.let_go(2)
    run.wait_event("restored", attempt=3)
    assert slurm.job(run.job_id)["Restarts"] == "1"
    assert len(run.events("requeued")) == 1

    # slurmctld: nobody needs it while training runs.
    slurm.kill_slurmctld()
    run.wait_event("saved", attempt=3, count=2)
    slurm.start_slurmctld()
    run.let_go(3)
    run.wait_done()

    assert [reason for reason, _ in run.ends()] == ["crashed", "crashed", "completed"]
    assert all(lost <= 5 for lost in run.steps_lost())
