"""Ranks of a real job are bound to the CPUs of their GPUs, as the site's map has them."""

from __future__ import annotations

import os

import pytest

from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

SCRIPT = "import os\nprint('cpus', *sorted(os.sched_getaffinity(0)))\n"
SITE = """
name = "posed"
[slurm]
gpu_request = "none"
[cpus]
of_gpu = {map}
"""


def test_ranks_of_a_job_run_on_the_cpus_of_their_gpus_and_status_shows_them(slurm, tmp_path):
    """The GPUs are posed: SLURM is not asked for any. Half of the nodes' CPUs would be too few."""
    here = sorted(os.sched_getaffinity(0))
    first, last = str(here[0]), str(here[-1])
    site = tmp_path / "posed.toml"
    site.write_text(SITE.format(map=[last, first]).replace("'", '"'))
    script = tmp_path / "affinity.py"
    script.write_text(SCRIPT)
    asked = ["--nodes=2", "--gpus-per-node=2", f"--site={site}", "--time=10"]
    run = submit(slurm, tmp_path, *asked, script=[str(script)])
    run.wait_done()

    logs = [run.dir.rank_log(1, rank).read_text() for rank in range(4)]
    assert logs == [f"cpus {last}\n", f"cpus {first}\n"] * 2
    assert f"CPUs of a node's ranks: {last}; {first}" in run.cli("status", run.dir.name, "--ranks")
