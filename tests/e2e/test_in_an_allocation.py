"""A local run that is submitted inside of a job of SLURM's sees nothing of that job."""

from __future__ import annotations

import json

from hpctrain.cluster.scheduler.slurm.command import KEPT
from tests.support.local_runs import await_end, start

SHOWS = 'env > environment; echo "$WORLD_SIZE" > size'
OF_THE_JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
    "SLURM_JOB_NODELIST": "n9",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n9",
    "PMI_RANK": "0",
}


def test_its_ranks_have_none_of_the_variables_that_submit_says_it_drops(tmp_path, monkeypatch):
    for name, value in OF_THE_JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    run = start(tmp_path, "inside", 1, 1, "--", "bash", "-c", SHOWS)
    await_end(run)

    names = {line.partition("=")[0] for line in (tmp_path / "environment").read_text().splitlines()}
    dropped = json.loads((run / "spec.json").read_text())["dropped_env"]
    assert set(dropped) >= OF_THE_JOB.keys()
    assert not names & set(dropped)
    assert not {name for name in names if name.startswith("SLURM")} - set(KEPT)
    assert "CUDA_VISIBLE_DEVICES" in names  # the devices that are here are this job's
    assert (tmp_path / "size").read_text() == "1\n"
