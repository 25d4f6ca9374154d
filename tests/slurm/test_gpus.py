"""GPUs as people ask for them, on a cluster of two types, which SLURM counts and nobody has."""

from __future__ import annotations

import pytest

from tests.support.scenario import cli
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_config import Shape

pytestmark = pytest.mark.slurm

GPUS = {"n1": "gpu:a100:2", "n2": "gpu:a100:2", "n3": "gpu:h100:1"}
WAITS = "#!/bin/sh\nexec sleep 1000\n"


@pytest.fixture(scope="module")
def slurm_cluster():
    with SlurmCluster(shape=Shape(gpus=GPUS)) as cluster:
        yield cluster


@pytest.fixture
def submits(slurm, tmp_path):
    """Submits a program; its job's record, and what was said."""
    (tmp_path / "train.sh").write_text(WAITS)
    (tmp_path / "train.sh").chmod(0o755)

    def typed(*words):
        done = cli(slurm, tmp_path, "submit", "--name", "r", *words, "--", "./train.sh")
        assert done.returncode == 0, done.stderr
        job_id = done.stdout.partition("job ")[2].split()[0]
        return slurm.wait_job(job_id, "RUNNING"), done.stderr

    return typed


@pytest.mark.parametrize(
    ("typed", "nodes", "asked"),
    [
        ("-N 2 --gpus-per-node a100:2", "n[1-2]", "gpu:a100:2"),
        ("-N 1 --gres=gpu:h100:1", "n3", "gpu:h100:1"),
        ("-N 1 --gpus-per-node 2", "n1", "gpu:2"),
    ],
)
def test_a_type_and_a_number_are_what_the_job_gets(submits, typed, nodes, asked):
    job, said = submits(*typed.split())

    assert job["NodeList"] == nodes
    assert job["TresPerNode"] in {f"gres:{asked}", f"gres/{asked}"}  # by version
    assert "no GPUs are asked for" not in said


def test_a_job_that_asks_for_none_is_told_what_there_is(submits):
    """It had whole nodes with one rank on a CPU, and no word."""
    _, said = submits("-N", "1")

    assert (
        "note: no GPUs are asked for, and nodes of the default partition have 2 GPUs: "
        "add --gpus-per-node 2; 0 if you mean none"
    ) in said
