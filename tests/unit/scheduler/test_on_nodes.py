"""A program that is started on the nodes of a running job; tests/slurm/test_drill.py does it."""

from __future__ import annotations

import stat
import sys

import pytest

from hpctrain.cluster.scheduler.base import Cluster
from hpctrain.cluster.scheduler.local import LocalCluster
from hpctrain.cluster.scheduler.slurm.client import SlurmCluster
from hpctrain.errors import ClusterError, UsageError


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """An srun that tells its own words and the SLURM_* that it was given."""
    path = tmp_path / "srun"
    path.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nenv | grep ^SLURM_\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLURM_JOB_ID", "3")  # of the shell that the drill runs in
    monkeypatch.setenv("SLURM_NTASKS", "64")


def test_a_step_beside_the_agents_has_one_task_on_each_node(srun):
    said = SlurmCluster().on_nodes("17", ["n2", "n5"], ["true", "--really"]).splitlines()

    assert said[-4:-1] == ["--job-name=hpctrain-beside", "true", "--really"]
    assert {"--jobid=17", "--overlap", "--nodelist=n2,n5"} < set(said)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} < set(said)
    assert said[-1] == "SLURM_CONF=/etc/slurm.conf"


def test_what_is_no_job_gets_no_step(srun):
    with pytest.raises(ClusterError, match="no job's id"):
        SlurmCluster().on_nodes("--uid=0", ["n2"], ["true"])


def test_nodes_that_are_this_machine_need_nobody():
    words = [sys.executable, "-c", "print('here')"]
    assert LocalCluster().on_nodes("local-1", ["local0"], words) == "here\n"
    alone = [sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())"]
    assert LocalCluster().on_nodes("local-1", ["local0"], alone) == "True\n", "it hears no Ctrl-C"
    fails = [sys.executable, "-c", "import sys; sys.exit('no such rank')"]
    with pytest.raises(ClusterError, match="no such rank"):
        LocalCluster().on_nodes("local-1", ["local0"], fails)


def test_a_scheduler_that_starts_nothing_says_so():
    class Other(Cluster):
        name = "other"

    with pytest.raises(UsageError, match="other starts no program"):
        Other().on_nodes("1", ["n1"], ["true"])
