"""A run after another on the embedded cluster, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.local_runs import await_end, events, hpctrain, start
from tests.support.slurm_boot import wait_for

ENDS = 'while [ ! -e "$1" ]; do sleep 0.1; done; [ -s "$1" ]'


def status(folder, name):
    return json.loads(hpctrain(folder, "status", name, "--json"))


def reason(folder, name):
    job = status(folder, name)["job"]
    return job and job["reason"]


def test_a_follower_begins_when_its_predecessor_is_done_and_follows_a_resume(tmp_path):
    sign = tmp_path / "sign"
    first = start(tmp_path, "first", 1, 1, "--", "bash", "-c", ENDS, "bash", str(sign))
    said = 'echo "$HPCTRAIN_AFTER" > after'
    second = start(tmp_path, "second", 1, 1, "--after", "first", "--", "bash", "-c", said)
    third = start(tmp_path, "third", 1, 1, "--after", "first", "--", "true")
    assert reason(tmp_path, "second") == "Dependency"
    hpctrain(tmp_path, "cancel", "third")

    sign.touch()
    await_end(first)
    never = "DependencyNeverSatisfied"
    wait_for(lambda: reason(tmp_path, "second") == never, "that nothing follows")
    sign.write_text("good\n")
    told = json.loads(hpctrain(tmp_path, "resume", "first", "--json"))

    assert any("second (job local-2) now waits for job" in note for note in told["notes"])
    assert await_end(second)["reason"] == "completed"
    assert (tmp_path / "after").read_text() == f"{first}\n"
    assert events(second, "attempt_started")[0]["t"] > events(first, "done")[0]["t"]
    assert status(tmp_path, "third")["state"] == "cancelled"
    assert not events(third, "attempt_started")


def test_a_job_that_ended_well_is_not_enough(tmp_path):
    """Its run was told to leave, and is not done."""
    until_told = "trap 'exit 0' TERM; while :; do sleep 0.1; done"
    first = start(tmp_path, "first", 1, 1, "--", "bash", "-c", until_told)
    second = start(tmp_path, "second", 1, 1, "--after", "first", "--", "true")
    wait_for(lambda: events(first, "attempt_started"), "the first run's start")

    hpctrain(tmp_path, "cancel", "first", "--save")
    wait_for(lambda: events(second, "held_back"), "the second run's end")

    wait_for(lambda: status(tmp_path, "second")["state"] == "failed", "its state")
    assert "is to run after first, which is stopped" in status(tmp_path, "second")["why"]
    refused = subprocess.run(
        [sys.executable, "-m", "hpctrain", "resume", "second"],
        cwd=tmp_path,
        env={**os.environ, "HPCTRAIN_LOCAL_DIR": str(tmp_path / "local")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "`hpctrain resume first` first" in refused.stderr
