"""What was cancelled stays cancelled, also in a save, in a grace time and in the queue.

tests/stories has a run that is cancelled as it trains, and one that is asked to save first.
"""

from __future__ import annotations

import time

import pytest

from hpctrain.checkpoint.store import find
from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit
from tests.support.slurm_config import KILL_WAIT_S

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.realtime(
        proved_by=("tests/unit/plan/test_decide.py", "tests/unit/entry/test_local_contract.py")
    ),
]

ENDLESS = {"train.steps": 100_000, "train.step_delay_s": 0.05}
SLOW_SAVE = {"train.dim": 512, "train.layers": 8, "train.heads": 8, "train.global_batch": 2}
GONE_S = KILL_WAIT_S + 2


def cancel_and_wait(run, cancel):
    """Cancel, wait until the job and all its processes are gone; how long that took."""
    began = time.monotonic()
    cancel(run.job_id)
    run.slurm.wait_job(run.job_id, "CANCELLED")
    run.wait("the end of its processes", lambda: not run.slurm.pids_of_job(run.job_id))
    return time.monotonic() - began


def assert_cancelled_for_good(run):
    record = run.slurm.job(run.job_id)
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", "0"), run.story()
    assert run.ends() == [("cancelled", "stop")]
    assert not run.events("requeued")
    assert run.status()["state"] == "cancelled"


@pytest.mark.story(
    proved_by=("tests/engines/test_kill_during_save.py", "tests/unit/checkpoint/test_commit.py")
)
def test_scancel_in_the_middle_of_a_save_ends_it_for_good_and_the_leftover_is_not_in_the_way(
    slurm, tmp_path
):
    sets = ENDLESS | SLOW_SAVE | {"checkpoint.interval_steps": 1}
    run = submit(slurm, tmp_path, "--nodes=1", "--ranks-per-node=2", sets=sets)
    run.wait_event("saved", count=2)
    run.wait("a save that is under way", lambda: find.staged(run.dir))

    seconds = cancel_and_wait(run, slurm.cancel)

    assert seconds < GONE_S
    assert_cancelled_for_good(run)
    (left,) = find.staged(run.dir)
    newest = find.steps(run.dir)[0]
    run.cli("resume", "run")
    assert all_fields(run.wait_event("restored", attempt=2))["step"] == newest
    assert all_fields(run.wait_event("saved", attempt=2))["step"] == left.step
    assert not [one for one in find.staged(run.dir) if one.attempt == 1]
    run.cli("cancel", "run")


@pytest.mark.every_slurm
def test_scancel_during_the_grace_time_of_a_preemption_ends_it_for_good(slurm, tmp_path):
    slow = {**ENDLESS, "train.step_delay_s": 6}
    run = submit(slurm, tmp_path, "--nodes=1", "--partition=grace", sets=slow)
    run.wait_step(1)
    slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, lambda record: record.get("PreemptTime", "None") != "None")

    seconds = cancel_and_wait(run, slurm.cancel)

    assert seconds < GONE_S
    assert_cancelled_for_good(run)


def test_a_run_that_waits_in_the_queue_stays_cancelled(slurm, tmp_path):
    """Also one that waits for its second start after a preemption."""
    first = submit(slurm, tmp_path, "--nodes=4", name="first", sets=ENDLESS)
    first.wait_step(2)
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(first.job_id, "PENDING")
    second = submit(slurm, tmp_path, "--nodes=1", name="second", sets=ENDLESS)
    third = submit(slurm, tmp_path, "--nodes=1", name="third", sets=ENDLESS)

    slurm.cancel(first.job_id)
    slurm.cancel(second.job_id)
    told = third.cli("cancel", "third", "--save")
    slurm.cancel(urgent)

    assert "nothing more to save" in told
    for run, attempts in ((first, 1), (second, 0), (third, 0)):
        assert slurm.wait_job(run.job_id, "CANCELLED")["Restarts"] == str(attempts)
        assert run.status()["state"] == "cancelled"
        assert len(run.events("attempt_started")) == attempts
    assert slurm.run("squeue", "-h", "-p", "work").stdout == ""
    assert third.cli("resume", "third", "--dry-run").startswith("run          third")
