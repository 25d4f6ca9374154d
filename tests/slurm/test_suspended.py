"""A job that SLURM lets stand still, or holds: shown as such, nothing lost."""

from __future__ import annotations

import json

import pytest

from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.realtime(
        proved_by=(
            "tests/unit/history/test_stillness.py",
            "tests/unit/agent/test_stop_deadline.py",
            "tests/unit/scheduler/test_slurm_reasons.py",
        )
    ),
]
WAITS = {False: ['--set=slurm.extra=["--begin=now+1hour"]'], True: []}
"""Options with which a job waits until it is held."""
HELD = {
    "hold": "an administrator holds it, and only they can let it go; ask them; `scontrol release "
    "JOBID` is refused to users",
    "uhold": "it is held; `scontrol release JOBID` lets it go",
}
"""Commands that hold a job, given by root, and what `status` says then."""
ENDLESS = {"train.steps": 100_000, "train.step_delay_s": 0.05, "run.log_every_s": 1}


@pytest.mark.parametrize(
    ("nodes", "sets"),
    [
        pytest.param("--nodes=2", {}, id="plain"),
        pytest.param(
            "--nodes=2-3+1",
            {"alive.shrink": "auto", "alive.lease_s": 3},
            id="outlives its nodes",
            marks=pytest.mark.story(proved_by="tests/unit/agent/test_liveness_sides.py"),
        ),
    ],
)
def test_a_suspended_job_is_shown_so_goes_on_and_its_time_is_no_training(
    slurm, tmp_path, nodes, sets
):
    run = submit(slurm, tmp_path, nodes, "--ranks-per-node=1", sets=ENDLESS | sets)
    run.wait_step(5)
    ends = slurm.job(run.job_id)["EndTime"]

    slurm.run("scontrol", "suspend", run.job_id, check=True)
    slurm.wait_job(run.job_id, "SUSPENDED")

    def stood():
        classes = run.status()["goodput"]["classes"]
        return classes["suspended"]["seconds"] >= 6

    run.wait("six seconds of it", stood)
    status = run.status()
    assert status["state"] == "suspended"
    assert "is suspended by SLURM since" in status["words"]
    assert run.cli("status", "run").startswith("run  suspended  ")
    before = status["step"]
    slurm.run("scontrol", "resume", run.job_id, check=True)

    fact = all_fields(run.wait_event("suspended"))
    run.wait_step(before + 20)
    status = run.status()
    assert fact["seconds"] >= 6
    assert status["state"] == "running"
    assert status["goodput"]["classes"]["suspended"]["seconds"] == pytest.approx(fact["seconds"])
    assert status["speed"]["step_p50_s"] < 1
    assert len(status["attempts"]) == 1
    assert not run.events("node_lost")
    assert slurm.job(run.job_id)["EndTime"] > ends
    run.cli("cancel", "run", "--save")
    run.wait_event("attempt_ended")
    assert run.ends() == [("stopped", "stop")]


@pytest.mark.story(
    proved_by=("tests/unit/scheduler/test_slurm_reasons.py", "tests/docs/test_pages.py")
)
def test_a_run_that_is_requeued_and_held_names_its_release(slurm, tmp_path):
    run = submit(slurm, tmp_path, "--nodes=2", "--ranks-per-node=1", sets=ENDLESS)
    run.wait_step(5)

    slurm.run("scontrol", "requeuehold", run.job_id, check=True)
    run.wait_event("attempt_ended")
    run.wait("that it waits", lambda: slurm.job(run.job_id)["JobState"] == "PENDING")

    status = run.status()
    words = " ".join(run.cli("status", "run").split())
    assert run.ends() == [("requeued", "leave")]
    assert (status["state"], status["job"]["held"]) == ("requeued", True)
    assert f"`scontrol release {run.job_id}` lets it go" in words
    assert "planned by SLURM" not in words
    assert json.loads(run.cli("status", "--json"))[0]["job"]["held"]

    slurm.run("scontrol", "release", run.job_id, check=True)
    assert not run.status()["job"]["held"]


@pytest.mark.story(
    proved_by=("tests/unit/scheduler/test_slurm_reasons.py", "tests/docs/test_pages.py")
)
@pytest.mark.parametrize("has_run", [False, True], ids=["never started", "requeued"])
def test_a_run_that_is_held_while_it_waits_names_its_release(slurm, tmp_path, has_run):
    run = submit(slurm, tmp_path, "--nodes=2", "--ranks-per-node=1", *WAITS[has_run], sets=ENDLESS)
    if has_run:
        run.wait_step(5)
        slurm.run("scontrol", "requeue", run.job_id, check=True)
        run.wait_event("attempt_ended")
    run.wait("that it waits", lambda: slurm.job(run.job_id)["JobState"] == "PENDING")

    for hold, what in HELD.items():
        slurm.run("scontrol", hold, run.job_id, check=True)
        run.wait("the hold", lambda: slurm.job(run.job_id)["Priority"] == "0")
        status, words = run.status(), " ".join(run.cli("status", "run").split())
        assert status["job"]["held"], hold
        assert what.replace("JOBID", run.job_id) in words, hold
        assert "planned by SLURM" not in words, hold
        assert "expected to start" not in words, hold
        assert json.loads(run.cli("status", "--json"))[0]["job"]["held"], hold

        slurm.run("scontrol", "release", run.job_id, check=True)
        run.wait("the release", lambda: slurm.job(run.job_id)["Priority"] != "0")
        assert not run.status()["job"]["held"], hold
    run.cli("cancel", "run")
