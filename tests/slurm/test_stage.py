"""A run's nodes start from a copy of its Python environment; where they cannot, they say so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import all_fields
from tests.support.scenario import RunHandle
from tests.support.small_disk import mounted
from tests.support.small_environment import make_environment

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]  # a gigabyte packed, unpacked, deleted

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "where_from.py"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The prefix of an environment with hpctrain and torch."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    make_environment(folder, "hpctrain")
    return folder


@pytest.fixture
def nodes(slurm, tmp_path):
    """A folder for each node, as if it were its own disk; nodes of the cluster share a machine."""
    for name in slurm.nodes:
        (tmp_path / "disk" / name).mkdir(parents=True)
    yield tmp_path / "disk"
    for folder in (tmp_path / "disk", *(tmp_path / "runs").glob(".environments-*")):
        shutil.rmtree(folder)  # a gigabyte for each node


def submit(slurm, cwd, environment, *sets, stage_dir, count=2, hold=False):
    """Submit, as the user of that environment, a program that says where it runs."""
    (cwd / "told").mkdir(exist_ok=True)
    env = {name: value for name, value in slurm.env.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{environment / 'bin'}{os.pathsep}{env['PATH']}"
    env["VIRTUAL_ENV"] = str(environment)
    words = [f"--set={one}" for one in (f"environment.stage_dir={stage_dir}", *sets)]
    done = subprocess.run(
        [
            *(environment / "bin" / "python", "-m", "hpctrain", "submit", "--cluster=slurm"),
            *("--json", "--no-snapshot", f"--nodes={count}", "--ranks-per-node=2", "--time=10"),
            *("--set=environment.stage=yes", "--set=slurm.exclude=n3,n4", *words),
            *(['--set=slurm.extra=["--hold"]'] if hold else []),
            *("--", SCRIPT, cwd / "told", cwd / "go"),
        ],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return RunHandle(slurm, cwd, RunDir(Path(told["run_dir"])), str(told["job_id"])), told["notes"]


def reported_by(run, start, ranks=4):
    """What each rank of a start says."""
    paths = [run.cwd / "told" / f"{start}-{rank}.json" for rank in range(ranks)]
    run.wait(f"all ranks of start {start}", lambda: all(path.exists() for path in paths))
    return [json.loads(path.read_text()) for path in paths]


def log_of(run, node=""):
    """What the batch script has said, or the task of a node."""
    return next(run.dir.jobs.glob(f"*-????????{node}.out")).read_text()


def staged(run):
    """The outcome of each start of the job: nodes that unpacked, had it, went without."""
    facts = [all_fields(event) for event in run.events("environment_staged")]
    return [(fact["staged"], fact["reused"], fact["not_staged"]) for fact in facts]


UNITS = ("tests/unit/scheduler/test_stage_node.py", "tests/unit/scheduler/test_stage_script.py")


@pytest.mark.story(proved_by=UNITS)
def test_ranks_run_from_their_nodes_own_disk_and_a_later_start_finds_it_there(
    slurm, tmp_path, environment, nodes
):
    run, notes = submit(slurm, tmp_path, environment, stage_dir=nodes / "$SLURMD_NODENAME")
    first = reported_by(run, 1)
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    (tmp_path / "go").touch()
    slurm.cancel(urgent)
    slurm.start_now(run.job_id)
    run.wait_done()

    assert any("packed in" in note for note in notes)
    for rank, facts in enumerate(first + reported_by(run, 2)):
        disk = str(nodes / f"n{rank % 4 // 2 + 1}")
        on_disk = ("prefix", "base_prefix", "torch", "hpctrain", "os", "python")
        assert {facts[name].startswith(disk) for name in on_disk} == {True}, facts
        assert not any(path.startswith(str(environment)) for path in facts["path"])
    assert staged(run) == [(2, 0, 0), (0, 2, 0)]
    assert "environment staged on 2 nodes" in run.cli("events", run.dir.name)
    assert "environment reused on 2 nodes" in log_of(run)


@pytest.mark.story(proved_by=UNITS)
def test_one_node_gets_it_by_sbcast(slurm, tmp_path, environment, nodes):
    (tmp_path / "go").touch()
    run, _ = submit(slurm, tmp_path, environment, stage_dir=nodes, count=1)
    run.wait_done()

    (fact,) = map(all_fields, run.events("environment_staged"))
    assert (fact["staged"], fact["way"]) == (1, "sbcast")
    assert {facts["prefix"] for facts in reported_by(run, 1, 2)} == {
        f"{fact['folder']}/{json.loads(run.dir.staging.read_text())['archive']['key']}/env"
    }
    assert not list(Path(fact["folder"]).glob("*.sent-*"))


@pytest.mark.soak
def test_a_node_without_room_starts_from_the_shared_environment_and_says_so(
    slurm, tmp_path, environment, nodes
):
    (tmp_path / "go").touch()
    (nodes / "n2").rmdir()
    with mounted(nodes / "n2", 64 << 20):
        run, _ = submit(slurm, tmp_path, environment, stage_dir=nodes / "$SLURMD_NODENAME")
        run.wait_done()

    prefixes = [facts["prefix"] for facts in reported_by(run, 1)]
    assert [prefix.startswith(str(nodes / "n1")) for prefix in prefixes] == [True] * 2 + [False] * 2
    assert prefixes[2:] == [str(environment)] * 2
    assert staged(run) == [(1, 0, 1)]
    (fact,) = map(all_fields, run.events("environment_staged"))
    assert fact["why"].startswith(f"n2: no room in {nodes}/n2/hpctrain-environments-")
    assert "environment staged on 1 node, not staged on 1 node" in log_of(run)
    assert "n2 starts from the shared environment" in log_of(run, "-1")


@pytest.mark.soak
def test_an_archive_that_is_torn_or_gone_costs_the_run_nothing(slurm, tmp_path, environment, nodes):
    run, _ = submit(slurm, tmp_path, environment, stage_dir=nodes / "$SLURMD_NODENAME", hold=True)
    archive = Path(json.loads(run.dir.staging.read_text())["archive"]["path"])
    with archive.open("r+b") as file:
        file.seek(archive.stat().st_size // 2)
        file.write(b"torn")
    slurm.run("scontrol", "release", run.job_id, check=True)
    reported_by(run, 1)
    archive.unlink()
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    (tmp_path / "go").touch()
    slurm.cancel(urgent)
    slurm.start_now(run.job_id)
    run.wait_done()

    assert {facts["prefix"] for facts in reported_by(run, 1) + reported_by(run, 2)} == {
        str(environment)
    }
    torn, gone = (all_fields(event)["why"] for event in run.events("environment_staged"))
    assert re.match(rf"n\[1-2\]: {archive} (is torn|cannot be unpacked): ", torn)
    assert gone == f"n[1-2]: {archive} cannot be read any more"
    assert staged(run) == [(0, 0, 2), (0, 0, 2)]
