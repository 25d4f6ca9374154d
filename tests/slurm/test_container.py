"""Runs inside an image that has no command of SLURM's, on the real cluster."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import container_image, processes
from tests.support.recipe import assert_same_bits, consumed, full_state, make_run, train
from tests.support.scenario import cli, submit
from tests.unit.scheduler.test_image_file import sif

pytestmark = pytest.mark.container

LOOK = """
import json, pathlib, shutil, ssl, sqlite3, hpctrain
release = pathlib.Path("/etc/os-release").read_text()
print(json.dumps([release.split()[0], shutil.which("scontrol")]))
"""
STEPS = 40
RANKS = 2
AGENT = "hpctrain.entry.slurm_task"
SETTINGS = {"train.steps": STEPS, "train.step_delay_s": 0.1, "checkpoint.interval_steps": 5}


@pytest.fixture
def in_peace(tmp_path):
    """The same steps on as many ranks, never stopped, without SLURM and without a container."""
    run = make_run(tmp_path / "in-peace", train__steps=STEPS, train__dropout=0.0)
    train(run, RANKS)
    return run


def inside(image):
    """Settings of a run in the image, with the tests' own Python."""
    return {
        "container.image": f'"{image}"',
        "container.runtime": '"charliecloud"',
        "container.python": f'"{sys.executable}"',
        "container.mounts": container_image.mounts(),
        "container.options": ["--private-tmp"],  # what is not bound is not there, below /tmp too
    }


def roots_of_tasks(slurm, job_id):
    """Of each agent, rank and helper: its system's name, and where on its PATH is a scontrol."""
    agents = [pid for pid in slurm.pids_of_job(job_id) if AGENT in processes.command(pid)]
    seen = []
    for pid in {*agents, *processes.descendants(*agents)}:
        root = Path(f"/proc/{pid}/root")
        folders = processes.environment(pid).get("PATH", "").split(":")
        commands = [f for f in folders if root.joinpath(f.lstrip("/"), "scontrol").exists()]
        seen.append((root.joinpath("etc/os-release").read_text().split()[0], commands))
    return seen


def test_the_image_has_a_root_of_its_own_with_python_and_no_slurm(container_image_path):
    binds = [f"--bind={path}" for path in container_image.mounts()]
    done = subprocess.run(
        ["ch-run", *binds, str(container_image_path), "--", sys.executable, "-c", LOOK],
        env=os.environ | {"USER": "root"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stdout) == [f"ID={container_image.NAME}", None]


@pytest.mark.slurm
def test_a_run_inside_goes_through_a_preemption_and_a_dead_node_and_on_outside(
    slurm, tmp_path, in_peace, container_image_path
):
    args = ("--nodes=2", "--ranks-per-node=1", "--partition=grace")
    settings = SETTINGS | inside(container_image_path)
    settings["container.mounts"] = [*container_image.mounts(), str(tmp_path)]  # the gate's folder
    run = submit(slurm, tmp_path, *args, sets=settings, held={3: 35})
    run.wait_step(5)
    roots = roots_of_tasks(slurm, run.job_id)
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    slurm.cancel(urgent)
    run.wait_step(15, attempt=2)
    slurm.kill_node("n1")
    run.wait_step(25, attempt=3)
    run.cli("cancel", "run", "--save")
    run.let_go(3)
    slurm.wait_job(run.job_id, ("COMPLETED",))
    run.cli("resume", "run", "--set", "container.image=")
    run.wait_event("attempt_ended", attempt=4)

    assert len(roots) >= 2 * RANKS  # an agent for each
    assert [root for root in roots if root != (f"ID={container_image.NAME}", [])] == []
    status, logs = run.status(), run.cli("logs", "run")
    ends = [(one["reason"], one["nodes"]) for one in status["attempts"]]
    assert ends == [
        ("preempted", ["n1", "n2"]),
        ("node_failed", ["n1", "n2"]),
        ("stopped", ["n2", "n3"]),
        ("completed", ["n2", "n3"]),
    ], run.story()
    assert (status["state"], status["step"], status["image"]) == ("done", STEPS, None)
    requeued = [(e.fact.by, e.fact.next) for e in run.events("attempt_ended", attempt=1)]
    assert requeued == [("agent", "requeue")]  # so SLURM was asked for it from inside
    lost = run.steps_lost()
    assert (lost[0], lost[2]) == (0, 0)
    assert lost[1] <= 2 * SETTINGS["checkpoint.interval_steps"]
    assert "hpctrain: leaving at step" in logs
    assert f"step {STEPS}: loss" in logs
    assert "scontrol" not in logs
    assert_same_bits(full_state(in_peace, STEPS), full_state(run.dir, STEPS))
    assert consumed(run.dir) == consumed(in_peace)


@pytest.mark.slurm
def test_what_no_node_can_start_is_refused_by_what_slurm_says_of_them(slurm, tmp_path):
    other = {"x86_64": (b"04", "aarch64")}.get(platform.machine(), (b"02", "x86_64"))
    (tmp_path / "x.sif").write_bytes(sif(other[0]))
    unfit = f"{other[1]}, and the nodes of the default partition are {platform.machine()}"
    for image, runtime, code, words in (
        ("x.sif", "charliecloud", 3, f"made for {unfit}"),
        ("gone.sif", "charliecloud", 4, "nothing is there"),
        ("docker.io#debian", "enroot-pyxis", 3, "srun has no --container-image here"),
        ("pytorch", "cscs-ce", 3, "srun has no --environment here"),
    ):
        sets = (f"--set=container.runtime={runtime}", f"--container={image}")
        done = cli(slurm, tmp_path, "submit", "--cluster=slurm", *sets)
        assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
        assert words in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.sif"]


@pytest.mark.slurm
def test_where_no_container_starts_the_run_says_why_and_is_stopped(slurm, tmp_path):
    """Both that the submit could not know: what setup lines may bring is no reason to refuse."""
    gone = tmp_path / "gone"
    no_image = submit(
        slurm,
        tmp_path,
        "--nodes=1",
        name="no-image",
        sets=inside(gone) | {"slurm.setup": [f": {gone} is unpacked on each node"]},
    )
    no_runtime = submit(
        slurm,
        tmp_path,
        "--nodes=1",
        name="no-runtime",
        sets=inside("docker://debian")
        | {"container.runtime": '"apptainer"', "slurm.setup": [": module load apptainer"]},
    )
    for run, words in ((no_image, str(gone)), (no_runtime, "has no apptainer on its PATH")):
        run.wait_event("run_stopped")
        slurm.wait_job(run.job_id, ("FAILED",))

        assert run.ends() == [("crashed", "requeue"), ("user_error", "stop")]
        assert "no agent came up in the container: " in run.cli("logs", run.dir.name)
        assert words in run.status()["why"]
