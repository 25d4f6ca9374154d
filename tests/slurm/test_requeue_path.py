"""The way back is blocked, slow, or forbidden; each ends as documented."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.support import processes
from tests.support.ledger_runs import all_fields
from tests.support.scenario import cli, submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.realtime(
        proved_by=("tests/unit/agent/test_batch_side.py", "tests/unit/agent/test_ending.py")
    ),
]

SETTINGS = {"train.steps": 60, "train.step_delay_s": 0.2}
ONE_BY_TWO = ("--nodes=1", "--ranks-per-node=2", "--time=10")


@pytest.mark.story(
    proved_by=(
        "tests/unit/agent/test_batch_side.py",
        "tests/unit/scheduler/test_slurm_command.py::test_silence_is_tried_again_until_it_ends",
    )
)
def test_a_slurmctld_that_is_silent_during_the_stop_is_waited_for(slurm, tmp_path):
    """The stop comes while slurmctld is down: nobody can be asked, and the requeue waits for it."""
    run = submit(slurm, tmp_path, *ONE_BY_TWO, sets=SETTINGS, held={1: 10})
    run.wait_step(3)
    pids = slurm.pids_of_job(run.job_id)

    slurm.kill_slurmctld()
    for pid in pids:
        _signal_if_rank(pid)
    run.let_go(1)
    run.wait_event("stopped")
    run.wait_event("attempt_ended")
    slurm.start_slurmctld()
    run.wait_done()

    assert run.ends()[0][1] in {"ask_batch", "requeue"}
    assert run.steps_lost() == [0]
    assert slurm.job(run.job_id)["Restarts"] == "1"


@pytest.mark.soak
def test_a_munged_that_is_away_during_the_stop_is_waited_for(slurm, tmp_path):
    """Its restart is an update's everyday; meanwhile SLURM says what sounds like a refusal."""
    run = submit(slurm, tmp_path, *ONE_BY_TWO, sets=SETTINGS, held={1: 10})
    run.wait_step(3)
    pids = slurm.pids_of_job(run.job_id)
    # The table of all runs asks squeue, and this one what a single run's status does not ask.
    [listed] = json.loads(run.cli("status", "--json"))
    assert (listed["state"], listed["job_id"]) == ("running", run.job_id)

    slurm.kill_munged()
    for pid in pids:
        _signal_if_rank(pid)
    run.let_go(1)
    run.wait_event("stopped")
    run.wait_event("attempt_ended")
    slurm.start_munged()
    run.wait_done()

    assert run.steps_lost() == [0]
    assert slurm.job(run.job_id)["Restarts"] == "1"


def test_a_job_that_may_not_requeue_ends_with_a_clear_code_and_can_be_resumed(slurm, tmp_path):
    settings = SETTINGS | {"train.steps": 25}
    run = submit(slurm, tmp_path, *ONE_BY_TWO, sets=settings, held={1: 10})
    run.wait_step(3)
    slurm.run("scontrol", "update", f"jobid={run.job_id}", "Requeue=0", check=True)

    for pid in slurm.pids_of_job(run.job_id):
        _signal_if_rank(pid)
    run.let_go(1)
    slurm.wait_job(run.job_id, ("FAILED", "COMPLETED"))

    failed = run.wait_event("requeue_failed")
    assert "disabled" in all_fields(failed)["why"].lower()
    assert slurm.job(run.job_id)["ExitCode"] == "75:0"
    assert run.status()["state"] not in {"running", "pending", "done"}
    told = run.cli("resume", run.dir.name)
    assert "takes step-" in told
    run.wait_event("done")
    assert run.steps_lost() == [0]


def test_a_partition_that_slurm_does_not_have_is_one_line_and_leaves_nothing(slurm, tmp_path):
    done = cli(slurm, tmp_path, "submit", "--name=p", "--cluster=slurm", "--partition=nosuch")

    assert done.returncode == 6
    assert len(done.stderr.strip().splitlines()) == 1
    assert "nosuch" in done.stderr or "partition" in done.stderr
    assert not (tmp_path / "runs").exists()
    assert not slurm.run("squeue", "-h").stdout


@pytest.mark.story(
    proved_by=(
        "tests/unit/agent/test_batch_side.py::"
        "test_a_decision_is_written_before_it_is_carried_out_and_without_a_pause"
    )
)
def test_a_long_ledger_keeps_no_side_from_ending_within_kill_wait(slurm, tmp_path):
    """The agent, which cannot ask SLURM, and then the batch side, all between one SIGTERM and the
    SIGKILL that follows it; of an end that comes later, the next start would write.
    """
    container = tmp_path / "container-python"
    container.write_text(
        '#!/bin/sh\ncase "$*" in *hpctrain.entry.slurm_task*) PATH=/none ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    container.chmod(0o755)
    settings = SETTINGS | {"slurm.setup": [f"export HPCTRAIN_PYTHON={container}"]}
    run = submit(slurm, tmp_path, "--nodes=1", "--ranks-per-node=1", "--time=10", sets=settings)
    run.wait_step(3)
    mark = run.events("steps")[0]
    told = json.dumps(all_fields(mark) | {"grad_norm": 0.123456789, "slow_by": 0.0123456789})[1:]
    line = f'{{"t": {mark.t}, "kind": "steps", "attempt": 1, {told}\n'
    with run.dir.events.open("a") as file:
        file.write(line * (50_000_000 // len(line)))

    urgent = slurm.submit_urgent(4)
    back = slurm.wait_job(run.job_id, "PENDING")
    slurm.cancel(run.job_id)
    slurm.cancel(urgent)

    told = [(all_fields(e)["by"], all_fields(e)["next"]) for e in run.events("attempt_ended")]
    assert told == [("agent", "ask_batch"), ("batch", "leave")]
    assert back["Restarts"] == "1"


def _signal_if_rank(pid):
    """SIGTERM to the processes that write a rank's log: the ranks alone, not their agent."""
    import os
    import signal

    from tests.support import processes

    if any("/rank-" in path for path in processes.open_files(pid)):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.every_slurm
def test_a_start_after_the_end_leaves_at_once_and_does_nothing(slurm, tmp_path):
    """A job that cannot tell SLURM that its run is over, after a requeue that SLURM remembers."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        '#!/bin/sh\ncase "$*" in *Requeue=0* | "show partition"*) exit 1 ;; esac\n'
        f'PATH=${{PATH#{scontrol.parent}:}} exec scontrol "$@"\n'
    )
    scontrol.chmod(0o755)
    settings = {
        "train.steps": 30,
        "train.step_delay_s": 0.2,
        "slurm.setup": [f"export PATH={scontrol.parent}:$PATH"],
    }
    run = submit(slurm, tmp_path, "--nodes=1", "--partition=grace", "--time=10", sets=settings)
    run.wait_step(3)
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    slurm.cancel(urgent)
    run.wait_event("done")
    slurm.wait_job(run.job_id, "COMPLETED")  # after a third start, where one comes

    once_more = slurm.by_version({(22, 5): 0, (24, 5): 1, (26, 5): 0})
    assert int(slurm.job(run.job_id)["Restarts"]) == 1 + once_more
    assert run.ends() == [("preempted", "requeue"), ("completed", "stop")]
    assert [all_fields(e)["by"] for e in run.events("requeued")] == ["agent"]
    left = [all_fields(e)["why"] for e in run.events("orphan_left")]
    why = f"job {run.job_id} has ended the run (completed); it does not start again"
    assert left == [why] * once_more
    assert run.status()["state"] == "done"


@pytest.mark.soak
def test_a_requeue_of_agents_that_say_nothing_is_told_by_slurms_account(slurm, tmp_path):
    """All of them are gone before they can say a word: stopped, requeued, and killed."""
    run = submit(slurm, tmp_path, "--nodes=1", "--ranks-per-node=2", "--time=10", sets=SETTINGS)
    run.wait_step(3, attempt=1)
    pids = slurm.pids_of_job(run.job_id)
    processes.kill_all(pids, signal.SIGSTOP)

    slurm.run("scontrol", "requeue", run.job_id, check=True)
    processes.kill_all(pids)
    run.wait_step(6, attempt=2)

    first = run.status()["attempts"][0]
    assert first["cause"] == "requeued"
    assert run.doctor(1) == "requeued"
    run.cli("cancel", "run")
