"""Stop signals that come while the agent still imports torch: the job lives, and comes back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
GATE = ROOT / "tests" / "support" / "scripts" / "gate"
STEPS = 40  # 4 s: without the signals, the first attempt would be done inside its grace time


def test_signals_during_the_import_neither_kill_the_job_nor_are_they_lost(slurm, tmp_path):
    importing = tmp_path / "importing"
    environ = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(GATE)]),
        "HPCTRAIN_TEST_GATE": str(importing),
    }
    run = submit(
        slurm,
        tmp_path,
        "--nodes=1",
        "--partition=grace",
        "--time=10",
        sets={"train.steps": STEPS, "train.step_delay_s": 0.1},
        env=environ,
    )
    run.wait("the agent's import of torch", importing.exists)
    slurm.run("scancel", "--signal=USR2", run.job_id, check=True)
    urgent = slurm.submit_urgent(4)
    back = slurm.wait_job(run.job_id, ("PENDING", "FAILED", "COMPLETED"))
    slurm.cancel(urgent)

    assert (back["JobState"], back["Restarts"]) == ("PENDING", "1")
    # "leave" where the machine was so slow that the grace time ended first: SLURM requeues then.
    assert run.ends()[0] in {("preempted", "requeue"), ("preempted", "leave")}, run.story()
    assert len(run.events("requeued")) == 1
    run.wait_done()
    assert not any(run.steps_lost())  # the first attempt may have left before it began a step
    assert run.ends()[1:] == [("completed", "stop")]
