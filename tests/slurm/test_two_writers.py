"""Never two writers, never an orphan job: submitting twice is safe, whatever dies in between."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import all_fields
from tests.support.patience import PATIENCE_S
from tests.support.recipe import TINY
from tests.support.scenario import RunHandle, cli, submit

pytestmark = pytest.mark.slurm

REAL = "real_sbatch"
NO_ANSWER = (
    f'"${REAL}" "$@" >/dev/null\n'
    "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2"
    "\nexit 1"
)
KILLED = f'"${REAL}" "$@" >/dev/null; kill -KILL $$'
KILLS_ITS_CALLER = f'"${REAL}" "$@" >/dev/null; kill -KILL $PPID'
LATE = f'kill -KILL $PPID; read -r _ <"$gate"; exec "${REAL}" "$@"'
SLOW = f'echo called >>"$gate.calls"; read -r _ <"$gate"; exec "${REAL}" "$@"'
ENDLESS = {**TINY, "train.steps": 100_000, "train.step_delay_s": 0.05}
SETS = [f"--set={key}={str(value).lower()}" for key, value in ENDLESS.items()]
ALIVE = 5


@pytest.fixture
def sbatch(slurm, tmp_path):
    """Put another sbatch first on PATH, which may call the real one; returns the environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    real = slurm.run("sh", "-c", "command -v sbatch", check=True).stdout.strip()
    os.mkfifo(tmp_path / "gate")

    def install(body):
        path = folder / "sbatch"
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        search = f"{folder}{os.pathsep}{slurm.env['PATH']}"
        return {"PATH": search, REAL: real, "gate": str(tmp_path / "gate")}

    return install


@pytest.fixture
def full(slurm):
    """All nodes are taken, so that what is submitted waits in the queue."""
    job_id = slurm.submit_urgent(4)
    slurm.wait_job(job_id, "RUNNING")
    return job_id


def open_gate(tmp_path):
    """Let the sbatch that waits at the gate go on; waits until it has come there."""
    (tmp_path / "gate").write_text("go\n")


def prepared(slurm, tmp_path):
    """A run directory without a job."""
    done = cli(slurm, tmp_path, "submit", "--cluster=slurm", "--name=run", "--no-submit", *SETS)
    assert done.returncode == 0, done.stderr
    return RunDir(tmp_path / "runs" / "run")


@pytest.fixture
def start_cli(slurm, tmp_path):
    """hpctrain in the background."""
    with contextlib.ExitStack() as stack:

        def start(*args, env=()):
            process = subprocess.Popen(
                [sys.executable, "-m", "hpctrain", *args],
                cwd=tmp_path,
                env={**slurm.env, "PYTHONPATH": str(Path(__file__).parents[2]), **dict(env)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def jobs_of_run(slurm):
    """Ids of all jobs that the run has in the queue."""
    return slurm.run("squeue", "-h", "-n", "run", "-o", "%A").stdout.split()


def one_line(text):
    return text.startswith("hpctrain: error: ") and text.count("\n") == 1


def test_of_several_resumes_at_once_one_wins_and_the_others_name_its_job(
    slurm, tmp_path, full, start_cli
):
    run = prepared(slurm, tmp_path)

    all_of_them = [start_cli("resume", "run") for _ in range(4)]
    errors = [process.communicate(timeout=PATIENCE_S)[1] for process in all_of_them]

    codes = [process.returncode for process in all_of_them]
    assert sorted(codes) == [0, ALIVE, ALIVE, ALIVE]
    (job_id,) = jobs_of_run(slurm)
    told = [error for code, error in zip(codes, errors, strict=True) if code]
    assert all(one_line(error) and f"job {job_id} (pending)" in error for error in told)
    assert len(list(run.jobs.glob("*.sh"))) == 1


def test_a_resume_waits_for_one_that_is_talking_to_slurm_and_then_leaves(
    slurm, tmp_path, full, sbatch, start_cli
):
    prepared(slurm, tmp_path)
    calls = tmp_path / "gate.calls"
    env = sbatch(SLOW)

    first = start_cli("resume", "run", env=env)
    slurm.wait_for(calls.exists, "the first sbatch")
    second = start_cli("resume", "run", env=env)
    while "mesh" not in second.stdout.readline():  # its plan; the lock comes next
        pass
    status = json.loads(cli(slurm, tmp_path, "status", "run", "--json").stdout)
    waits = second.poll() is None and calls.read_text() == "called\n"
    open_gate(tmp_path)
    out, _ = first.communicate(timeout=PATIENCE_S)
    _, error = second.communicate(timeout=PATIENCE_S)

    assert waits
    assert status["state"] == "submitting"
    assert (first.returncode, second.returncode) == (0, ALIVE)
    (job_id,) = jobs_of_run(slurm)
    assert f"job          {job_id}" in out
    assert one_line(error)
    assert f"job {job_id} (pending)" in error


def test_a_second_submit_of_a_name_says_what_to_do_instead(slurm, tmp_path, full):
    run = submit(slurm, tmp_path, name="run")

    again = cli(slurm, tmp_path, "submit", "--cluster=slurm", "--name=run", *SETS)

    assert again.returncode == ALIVE
    assert one_line(again.stderr)
    assert "hpctrain resume run" in again.stderr
    assert jobs_of_run(slurm) == [run.job_id]


@pytest.mark.parametrize("body", [NO_ANSWER, KILLED], ids=["timed out", "killed"])
def test_a_submission_that_was_accepted_without_an_answer_is_adopted(
    slurm, tmp_path, full, sbatch, body
):
    run = submit(slurm, tmp_path, env=sbatch(body))

    assert jobs_of_run(slurm) == [run.job_id]
    assert all_fields(run.events("submitted")[0])["job_id"] == run.job_id
    again = cli(slurm, tmp_path, "resume", "run")
    assert again.returncode == ALIVE
    assert f"job {run.job_id} (pending)" in again.stderr


def test_a_submit_that_died_before_it_knew_its_job_is_found_by_the_next_command(
    slurm, tmp_path, full, sbatch
):
    args = ("submit", "--cluster=slurm", "--name=run", *SETS)
    died = cli(slurm, tmp_path, *args, env=sbatch(KILLS_ITS_CALLER))
    (job_id,) = slurm.wait_for(lambda: jobs_of_run(slurm), "the job")
    run = RunHandle(slurm, tmp_path, RunDir(tmp_path / "runs" / "run"), job_id)
    known = [e for e in ledger.read(run.dir) if all_fields(e).get("job_id")]

    before = run.status()
    resumed = cli(slurm, tmp_path, "resume", "run")
    submitted = cli(slurm, tmp_path, *args)

    assert died.returncode == -signal.SIGKILL
    assert not known
    assert before["state"] == "pending"
    assert resumed.returncode == submitted.returncode == ALIVE
    assert f"job {job_id} (pending)" in resumed.stderr
    assert jobs_of_run(slurm) == [job_id]
    assert all_fields(run.events("submit_adopted")[0])["job_id"] == job_id
    run.cli("cancel", "run")
    assert slurm.wait_job(job_id, "CANCELLED")
    assert run.status()["state"] == "cancelled"


def test_the_job_of_an_older_submission_that_starts_late_leaves_without_writing(
    slurm, tmp_path, sbatch
):
    """Its submit died while sbatch was still on its way; meanwhile the run was resumed."""
    args = ("submit", "--cluster=slurm", "--name=run", "--nodes=2", *SETS)
    died = cli(slurm, tmp_path, *args, env=sbatch(LATE))
    assert died.returncode == -signal.SIGKILL, died.stderr
    told = cli(slurm, tmp_path, "resume", "run")
    assert told.returncode == 0, told.stderr
    (job_id,) = jobs_of_run(slurm)
    run = RunHandle(slurm, tmp_path, RunDir(tmp_path / "runs" / "run"), job_id)
    threading.Thread(target=open_gate, args=(tmp_path,), daemon=True).start()
    late = slurm.wait_for(lambda: set(jobs_of_run(slurm)) - {job_id}, "the late job").pop()
    slurm.wait_job(late, "COMPLETED")
    step = run.wait_step(3)

    assert [all_fields(e)["job_id"] for e in run.events("orphan_left")] == [late]
    assert [all_fields(e)["job_id"] for e in run.events("attempt_started")] == [job_id]
    assert slurm.job(late)["Restarts"] == "0"
    run.wait_step(step + 3)
    assert run.status()["state"] == "running"
    assert run.status()["job_id"] == job_id
    run.cli("cancel", "run")
