"""SLURM's step signals reach every process of a job: no child of a rank may die of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "children.py"


def test_workers_and_commands_live_through_the_storm_until_the_save_and_not_longer(slurm, tmp_path):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=1",
        "--partition=grace",
        "--time=10",
        sets={"run.log_every_s": 0.0},
        script=[str(SCRIPT)],
    )
    run.wait_step(2)
    children = json.loads((tmp_path / "children-1.json").read_text())
    slurm.run("scancel", "--signal=USR2", run.job_id, check=True)
    run.wait_step(run.wait_step(3) + 5)
    urgent = slurm.submit_urgent(4)
    back = slurm.wait_job(run.job_id, ("PENDING", "FAILED", "COMPLETED"))

    assert not run.events("failure")
    assert json.loads((tmp_path / "end-1.json").read_text()) == children
    (stopped,) = run.events("stopped")
    assert [all_fields(e)["step"] for e in run.events("saved")] == [all_fields(stopped)["step"]]
    assert len(run.events("requeued")) == 1
    assert (back["JobState"], back["Restarts"]) == ("PENDING", "1")
    run.wait("the end of its processes", lambda: not slurm.pids_of_job(run.job_id))
    assert not [pid for pid in children if processes.alive(pid)]

    slurm.cancel(urgent)
    run.wait_done()
    assert run.steps_lost() == [0]
    assert run.ends() == [slurm.end_in_grace, ("completed", "stop")]
    left = json.loads((tmp_path / "children-2.json").read_text())
    assert not [pid for pid in left if processes.alive(pid)]
