"""sbatch/train.sbatch: people whose site demands their own batch file get the same run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpctrain.core.base.env import HPCTRAIN_FAULTS
from hpctrain.ledger.run.layout import RunDir
from tests.support.gates import steps_held
from tests.support.recipe import TINY
from tests.support.scenario import RunHandle, cli

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]


def test_a_hand_written_batch_file_survives_a_preemption_in_the_same_way(slurm, tmp_path):
    settings = TINY | {"train.steps": 40, "train.step_delay_s": 0.2, "train.dropout": 0.0}
    words = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    made = cli(
        slurm, tmp_path, "submit", "--cluster=slurm", "--name=own", "--no-submit", "--json",
        "--ranks-per-node=2", *words,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    root = Path(json.loads(made.stdout)["run_dir"])
    script = (ROOT / "sbatch" / "train.sbatch").read_text()
    script = script.replace("/path/to/runs/my-run", str(root))
    script = script.replace("/path/to/venv/bin/python", sys.executable)
    gates, faults = steps_held(tmp_path, {1: 10})
    before = "# Whatever the site needs"
    script = script.replace(before, f"export {HPCTRAIN_FAULTS}='{faults}'\n{before}")
    (tmp_path / "own.sbatch").write_text(script)

    submitted = slurm.run(
        "sbatch", "--parsable", "--partition=grace", "--nodes=1", "--time=10", "--output=/dev/null",
        f"--export=ALL,PYTHONPATH={ROOT}", str(tmp_path / "own.sbatch"), check=True,
    )  # fmt: skip
    run = RunHandle(slurm, tmp_path, RunDir(root), submitted.stdout.strip(), gates)
    run.wait_step(3)
    urgent = slurm.submit_urgent(4)
    run.wait_preempted()
    run.let_go(1)
    slurm.wait_job(run.job_id, "PENDING")
    slurm.cancel(urgent)
    run.wait_done()

    assert [reason for reason, _ in run.ends()] == ["preempted", "completed"]
    assert run.steps_lost() == [0]
    assert run.status()["state"] == "done"
