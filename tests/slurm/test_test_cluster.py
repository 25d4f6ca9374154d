"""The test cluster itself: other tests believe it, so its promises are tests too."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import patience, processes
from tests.support.slurm_boot import MARK, _left_of, wait_for
from tests.support.slurm_cluster import SlurmCluster, parse_record
from tests.support.slurm_config import Ports

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
LACKING = """
import sys, pytest
from tests.support import slurm_boot
slurm_boot.BINARIES = ("no-such-slurmd",)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]]))
"""


def sleeper(cluster: SlurmCluster, *argv: str, srun: str = "") -> str:
    """A job whose ranks daemonise, ignore SIGTERM and sleep; returns once two run on each node."""
    body = "trap '' TERM; setsid sleep 6000 & exec sleep 6001"
    job_id = cluster.sbatch(*argv, "-o", "/dev/null", "--wrap", f'srun {srun} sh -c "{body}"')
    nodes = int(cluster.wait_job(job_id, "RUNNING")["NumNodes"])

    def asleep() -> bool:
        names = [processes.executable(pid) for pid in cluster.pids_of_job(job_id)]
        return names.count("sleep") == 2 * nodes

    cluster.wait_for(asleep, f"{2 * nodes} sleeping processes of job {job_id}")
    return job_id


def sleepers_of(cluster: SlurmCluster, job_id: str, node: str) -> list[int]:
    """Those of a node of the job."""
    pids = cluster.pids_of_job(job_id, node)
    return [pid for pid in pids if processes.executable(pid) == "sleep"]


@pytest.mark.slurm
def test_killing_a_node_kills_its_ranks_alone_and_requeues_the_job(slurm: SlurmCluster) -> None:
    job = sleeper(slurm, "-N2", "-w", "n1,n2")
    elsewhere = sleeper(slurm, "-w", "n3")
    others = slurm.pids_of_job(elsewhere)

    slurm.kill_node("n2")

    assert slurm.pids_of_job(job, "n2") == []
    assert slurm.pids_of_job(elsewhere) == others
    assert slurm.run("sinfo", "-h", "-n", "n2", "-p", "work", "-o", "%t").stdout.startswith("down")
    slurm.wait_job(job, lambda record: record["Restarts"] == "1")
    slurm.revive_node("n2")
    assert slurm.run("srun", "-w", "n2", "printenv", "SLURMD_NODENAME").stdout == "n2\n"


@pytest.mark.slurm
def test_the_first_nodes_death_does_not_end_the_step_elsewhere(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sleeper(slurm, "-N2", "-w", "n1,n2", "--no-kill", srun="--no-kill")
    elsewhere = sleepers_of(slurm, job, "n2")
    sruns = [pid for pid in slurm.pids_of_job(job) if processes.executable(pid) == "srun"]
    helpers = [pid for pid in sruns if processes.parent(pid) in sruns]
    assert (len(sruns), len(helpers)) == (2, 1), "srun has forked what looks after its death"
    killed: list[int] = []
    kill_all = processes.kill_all

    def kill(pids: Iterable[int], signum: int = signal.SIGKILL) -> None:
        pids = list(pids)
        killed.extend(pids if signum == signal.SIGKILL else [])
        kill_all(pids, signum)

    monkeypatch.setattr(processes, "kill_all", kill)
    slurm.kill_node("n1")

    assert killed.index(helpers[0]) < min(killed.index(pid) for pid in sruns if pid not in helpers)
    assert sleepers_of(slurm, job, "n2") == elsewhere != []
    slurm.cancel(job)


@pytest.mark.slurm
def test_a_node_may_die_and_leave_its_ranks_behind_until_the_next_test(slurm: SlurmCluster) -> None:
    job = sleeper(slurm, "-w", "n1")

    slurm.kill_node("n1", leave_ranks=True)

    left = slurm.pids_of_job(job, "n1")
    assert [processes.executable(pid) for pid in left].count("sleep") == 2
    slurm.reset()
    assert not [pid for pid in left if processes.alive(pid)]
    assert slurm.run("squeue", "-h").stdout == ""


@pytest.mark.slurm
def test_a_job_outlives_the_death_of_slurmctld(slurm: SlurmCluster) -> None:
    job = sleeper(slurm, "-w", "n1")
    ranks = slurm.pids_of_job(job)

    slurm.kill_slurmctld()
    assert slurm.run("scontrol", "ping").returncode
    slurm.start_slurmctld()

    assert slurm.job(job)["JobState"] == "RUNNING"
    assert slurm.pids_of_job(job) == ranks


@pytest.mark.slurm
def test_accounting_remembers_a_finished_job(slurm: SlurmCluster) -> None:
    job = slurm.sbatch("-o", "/dev/null", "--account=lab", "--wrap", "exit 7")
    slurm.wait_job(job, "FAILED")

    def told() -> str:
        rows = slurm.run("sacct", "-nPX", "-j", job, "-o", "state,exitcode,account").stdout
        return rows.strip() if "FAILED" in rows else ""

    assert slurm.wait_for(told, "sacct to know the end of the job") == "FAILED|7:0|lab"


@pytest.mark.slurm
def test_a_wait_in_vain_tells_the_job_and_the_log(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 1.0)
    job = slurm.sbatch("-H", "-o", "/dev/null", "--wrap", "true")

    with pytest.raises(AssertionError, match=r"(?s)RUNNING.*JobHeldUser.*_slurm_rpc_submit_batch"):
        slurm.wait_job(job, "RUNNING")


@pytest.mark.slurm
def test_nothing_outlives_a_cluster_whose_owner_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    inside = 'sbatch -N4 -o /dev/null --wrap "srun setsid sleep 6002"; exec sleep 6003'
    owner = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.slurm_cluster", "run"),
            *("--dir", str(folder), "--", "sh", "-c", inside),
        ],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    conf = {"SLURM_CONF": str(folder / "slurm.conf")}

    def ranks() -> list[int]:
        ours = [pid for pid in _left_of(folder) if processes.executable(pid) == "sleep"]
        return ours if len(ours) == 4 else []

    wait_for(ranks, f"four ranks in {conf}")
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()

    wait_for(lambda: not folder.exists() and not _left_of(folder), f"the end of {folder}")


@pytest.mark.slurm
def test_stop_clears_away_all_even_when_the_replica_server_was_killed(tmp_path: Path) -> None:
    cluster = SlurmCluster(tmp_path / "c")
    cluster.start()
    sleeper(cluster, "-N2")
    replica_server = cluster._daemons._replica_server
    assert replica_server is not None

    replica_server.kill()
    cluster.stop()

    assert not (tmp_path / "c").exists()
    assert _left_of(tmp_path / "c") == []


@pytest.mark.slurm
def test_a_port_that_somebody_took_meanwhile_costs_a_second_start_and_no_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick = Ports.pick
    given: list[Ports] = []

    with socket.socket() as somebody:
        somebody.bind(("", 0))
        somebody.listen()

        def late(nodes: int) -> Ports:
            ports = pick(nodes)
            if not given:
                ports = replace(ports, slurmd=(*ports.slurmd[:3], somebody.getsockname()[1]))
            given.append(ports)
            return ports

        monkeypatch.setattr(Ports, "pick", late)
        with SlurmCluster(tmp_path / "c") as cluster:
            assert set(cluster.run("sinfo", "-h", "-o", "%T").stdout.split()) == {"idle"}

    assert len(given) == 2


@pytest.mark.parametrize(("required", "outcome"), [("", "1 skipped"), ("gpu,slurm", "1 error")])
def test_where_slurm_is_missing_a_slurm_test_is_skipped_unless_required(
    required: str, outcome: str
) -> None:
    node = f"{Path(__file__).relative_to(ROOT)}::test_accounting_remembers_a_finished_job"
    env = os.environ | {"HPCTRAIN_REQUIRE": required, "PYTEST_ADDOPTS": ""}

    done = subprocess.run(
        [sys.executable, "-c", LACKING, node],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    assert outcome in done.stdout
    assert "missing: no-such-slurmd" in done.stdout
    assert "install_slurm.sh" in done.stdout


def test_records_with_spaces_in_their_values_are_read() -> None:
    line = "JobId=7 JobName=a b=c Reason=None AllocNode:Sid=localhost:3 Command=/a b/x TRES=cpu=1"

    found = parse_record(line)

    assert found["JobName"] == "a b=c"
    assert found["AllocNode:Sid"] == "localhost:3"
    assert found["Command"] == "/a b/x"
    assert found["TRES"] == "cpu=1"


def test_a_users_shell_with_the_cluster_in_its_environment_is_not_the_clusters() -> None:
    folder = Path("/nowhere/at/all")
    shell = subprocess.Popen(["sleep", "60"], env={"SLURM_CONF": f"{folder}/slurm.conf"})
    daemon = subprocess.Popen(["sleep", "60"], env={MARK: str(folder)})
    try:
        # A parent goes on once its child's pipes are closed; the kernel gives the child its
        # environment a moment later. Read in between, it is empty.
        for child in (shell, daemon):
            wait_for(lambda pid=child.pid: processes.environment(pid), f"process {child.pid}")
        assert _left_of(folder) == [daemon.pid]
    finally:
        for process in (shell, daemon):
            process.kill()
            process.wait()
