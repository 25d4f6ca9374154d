"""A run after another: it begins once, when that one is done, however often that one came back."""

from __future__ import annotations

import json
import re

import pytest

from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.layout import RunDir
from tests.support.scenario import RunHandle, cli, submit

pytestmark = pytest.mark.slurm

UNTIL = 'while [ ! -e "$1" ]; do sleep 0.1; done; '
ONE = ("--nodes=1", "--time=10")


def bash(slurm, tmp_path, name, program, *words):
    """A run of a shell's lines; $1 is a file of the run's name that tells it to go on."""
    path = tmp_path / f"{name}.sh"
    path.write_text(program)
    script = ["bash", str(path), str(tmp_path / f"{name}.go")]
    return submit(slurm, tmp_path, *ONE, *words, name=name, script=script)


def reason(run):
    return run.slurm.job(run.job_id).get("Reason")


def wait_reason(run, wanted):
    run.wait(f"reason {wanted} of {run.dir.name}", lambda: reason(run) == wanted)


def names(chain):
    return [link["run"] for link in chain]


@pytest.mark.story(proved_by=("tests/e2e/test_after.py", "tests/unit/submit/test_after.py"))
def test_what_follows_a_preempted_run_begins_once_and_a_chain_is_shown_as_one(slurm, tmp_path):
    """Two by `--then`, two by `--after`; the second is preempted too."""
    twice = 'if [ "$HPCTRAIN_STARTS" = 1 ]; then sleep 600; fi'
    (tmp_path / "note.sh").write_text(f'echo "$HPCTRAIN_STARTS $HPCTRAIN_AFTER" >> "$1"\n{twice}')
    note = f"bash {tmp_path}/note.sh {tmp_path}"
    then = ("--then", f"{note}/then", "--then", "true")
    first = bash(slurm, tmp_path, "first", twice, *then)
    fourth = bash(slurm, tmp_path, "fourth", "", "--after", "first-then-2")
    fifth = bash(slurm, tmp_path, "fifth", "", "--after", "fourth")
    order = ["first", "first-then", "first-then-2", "fourth", "fifth"]
    second, third = (a_run(first, name) for name in order[1:3])
    disturb(slurm, first)

    assert {reason(run) for run in (second, third, fourth, fifth)} == {"Dependency"}
    for run in (first, third, fifth):
        chain = run.status()["chain"]
        assert names(chain) == order
        assert [link["words"] for link in chain[1:]] == [f"waits for {one}" for one in order[:-1]]
    table = first.cli("status").splitlines()
    assert [line.split()[-1] for line in table if line.startswith("fifth")] == ["fourth"]

    second.wait_event("attempt_started")
    assert "first" not in fifth.status()["words"]
    disturb(slurm, second)
    third.wait_done()
    fourth.cli("cancel", "fourth")
    fifth.cli("cancel", "fifth")
    for run in (first, second):
        assert slurm.job(run.job_id)["Restarts"] == "1"
        assert [end for end, _ in run.ends()] == ["preempted", "completed"]
    assert third.ends() == [("completed", "stop")]
    assert second.events("attempt_started")[0].t > first.events("done")[0].t
    lines = (tmp_path / "then").read_text().splitlines()
    assert lines == [f"{start} {first.dir.root}" for start in (1, 2)]  # it once came back itself


def a_run(first, name):
    """A run that was submitted with another."""
    run = RunDir(first.dir.root.parent / name)
    return RunHandle(first.slurm, first.cwd, run, RunHistory.read(run).state.job_id)


def disturb(slurm, run):
    """Preempt the run in its first attempt, and let it start again."""
    run.wait_event("attempt_started")
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    slurm.wait_job(urgent, "RUNNING")
    slurm.cancel(urgent)
    slurm.start_now(run.job_id)


@pytest.mark.story(
    proved_by=(
        "tests/e2e/test_after.py::test_a_job_that_ended_well_is_not_enough",
        "tests/unit/submit/test_after.py",
    )
)
def test_a_follower_never_begins_behind_what_is_not_done_until_that_is_resumed(slurm, tmp_path):
    """One fails, one is cancelled, one saves and leaves with exit code 0."""
    until_told = "trap 'exit 0' TERM; " + UNTIL
    fails = bash(slurm, tmp_path, "fails", UNTIL + '[ -s "$1" ]')
    saves = bash(slurm, tmp_path, "saves", until_told)
    cancelled = bash(slurm, tmp_path, "cancelled", until_told)
    behind = {
        run.dir.name: bash(slurm, tmp_path, f"b-{run.dir.name}", "", "--after", run.dir.name)
        for run in (fails, saves, cancelled)
    }
    for run in (fails, saves, cancelled):
        run.wait_event("attempt_started")
    (tmp_path / "fails.go").touch()
    cancelled.cli("cancel", "cancelled")
    saves.cli("cancel", "saves", "--save")
    wait_reason(behind["fails"], "DependencyNeverSatisfied")
    wait_reason(behind["cancelled"], "DependencyNeverSatisfied")
    held = behind["saves"]
    held.wait_event("held_back")
    slurm.wait_job(held.job_id, "FAILED")

    assert slurm.job(saves.job_id)["JobState"] == "COMPLETED"
    assert not held.events("attempt_started")
    assert held.status()["state"] == "failed"
    both = r"`hpctrain resume (\S*/)?saves`, then `hpctrain resume (\S*/)?b-saves`"
    assert re.search(both, held.status()["why"])
    assert behind["fails"].status()["state"] == "pending"
    behind["cancelled"].cli("cancel", "b-cancelled")
    refused = cli(slurm, tmp_path, "resume", "b-cancelled")
    assert refused.returncode == 2
    assert (
        "--after cancelled: it was cancelled; `hpctrain resume cancelled` first" in refused.stderr
    )

    (tmp_path / "fails.go").write_text("go\n")
    told = json.loads(fails.cli("resume", "fails", "--json"))
    assert told["notes"][-1] == (
        f"b-fails (job {behind['fails'].job_id}) now waits for job {told['job_id']}"
    )
    behind["fails"].wait_done()
    assert not RunDir(tmp_path / "runs" / "b-cancelled").attempt(1).exists()
