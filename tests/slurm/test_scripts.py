"""Programs of the user's own: one knows nothing of hpctrain, one raises, one dies."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

if TYPE_CHECKING:
    from tests.support.slurm_cluster import Record

pytestmark = pytest.mark.slurm

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
STEPS = 60
STEP_S = 0.4  # in all longer than the grace time, so that it does not finish inside of it


def is_over_or_again(job: Record) -> bool:
    return job["JobState"] in {"FAILED", "COMPLETED", "CANCELLED"} or job["Restarts"] != "0"


def test_an_unchanged_torchrun_script_is_preempted_and_goes_on_from_its_own_checkpoint(
    slurm, tmp_path
):
    checkpoint = tmp_path / "own.pt"
    command = [str(SCRIPTS / "torchrun_style.py"), str(checkpoint)]
    command += [f"--steps={STEPS}", f"--step-s={STEP_S}"]
    run = submit(slurm, tmp_path, "--nodes=2", "--partition=grace", "--time=10", script=command)
    run.wait("its first checkpoint", checkpoint.exists)
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    left_at = torch.load(checkpoint)["step"]
    slurm.cancel(urgent)
    run.wait_done()

    assert run.ends() == [slurm.end_in_grace, ("completed", "stop")]
    assert slurm.job(run.job_id)["Restarts"] == "1"
    assert 0 < left_at < STEPS
    for rank in (0, 1):
        assert run.dir.rank_log(2, rank).read_text() == f"starts at step {left_at}\n"
    assert torch.load(checkpoint)["weight"].item() == STEPS * (1 + 2)
    assert run.status()["state"] == "done"


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("-N 9", "the job asks for 9 nodes, and partition work has 4: it would wait for ever"),
        ("-N 5-9 -p grace", "the job asks for 5 nodes, and partition grace has 4"),
        ("-c 999", "the job asks for 999 CPUs of a node, and partition work has"),
    ],
)
def test_what_slurm_would_take_and_never_start_is_refused(slurm, tmp_path, typed, why):
    asked = ["hpctrain", "submit", "--cluster", "slurm", "--runs", str(tmp_path / "runs")]
    done = slurm.run(sys.executable, "-m", *asked, *typed.split())

    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "runs").exists()
    assert slurm.run("squeue", "--noheader").stdout == ""


def test_what_is_typed_in_sbatchs_words_is_what_slurm_is_asked_for(slurm, tmp_path):
    typed = "-N 1 -p grace -w n3 -t 90m -c 2 --ranks-per-node 1 --sbatch=--comment=mine -x n1"
    run = submit(slurm, tmp_path, *typed.split(), script=[str(SCRIPTS / "torchrun_style.py"), "x"])

    record = slurm.job(run.job_id)
    slurm.cancel(run.job_id)

    assert record["TimeLimit"] == "01:30:00"
    assert (record["Partition"], record["Comment"]) == ("grace", "mine")
    assert (record["ReqNodeList"], record["ExcNodeList"]) == ("n3", "n1")


@pytest.mark.story(proved_by=("tests/e2e/test_doctor_run.py", "tests/unit/plan/test_decide.py"))
def test_a_script_that_raises_shows_its_own_traceback_once_and_is_not_started_again(
    slurm, tmp_path
):
    command = [str(SCRIPTS / "raises.py")]
    run = submit(slurm, tmp_path, "--nodes=1", "--ranks-per-node=2", "--time=10", script=command)
    ended = slurm.wait_job(run.job_id, is_over_or_again)

    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")
    (failure,) = run.events("failure")
    summary = "ValueError: learning rate -0.5 is negative"
    assert (all_fields(failure)["summary"], all_fields(failure)["rank"]) == (summary, 0)
    traceback = all_fields(failure)["traceback"]
    assert re.findall(r'File ".*/(.*)", line \d+, in (\S+)', traceback) == [
        ("raises.py", "<module>"),
        ("raises.py", "main"),
        ("raises.py", "check_rate"),
    ]
    log = run.dir.rank_log(1, 0).read_text()
    assert traceback in log
    assert log.count(summary) == 1
    shown = run.cli("status", run.dir.name)
    assert shown.count("raises.py") == 3
    assert shown.count("Traceback") == 1
    (stopped,) = run.events("run_stopped")
    assert (all_fields(stopped)["reason"], all_fields(stopped)["exit_code"]) == ("user_error", 1)
    assert run.ends() == [("user_error", "stop")]
    assert not run.events("requeued")


def test_a_program_that_always_dies_before_a_new_save_stops_with_exit_code_93(slurm, tmp_path):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=1",
        "--time=10",
        sets={"budget.no_progress": 2, "run.log_every_s": 0.0},
        script=[str(SCRIPTS / "killed.py"), str(EXAMPLE)],
    )
    ended = slurm.wait_job(run.job_id, is_over_or_again)

    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "93:0", "0")
    assert [all_fields(e)["by"] for e in run.events("attempt_started")] == ["start", "restart"]
    assert run.ends() == [("crashed", "restart"), ("crashed", "stop")]
    assert [all_fields(e)["last"] for e in run.events("steps")] == [1, 2, 1, 2]
    assert all("SIGKILL" in all_fields(e)["summary"] for e in run.events("failure"))
    (stopped,) = run.events("run_stopped")
    assert all_fields(stopped)["exit_code"] == 93
    assert "2 attempts in a row without one new committed step" in all_fields(stopped)["detail"]
    assert run.status()["state"] == "stopped"
