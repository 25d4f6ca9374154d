"""A scheduler that hpctrain has never heard of takes a run: one file, from the protocols."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience
from tests.support.ledger_runs import all_fields

TOP = Path(__file__).parents[2]
PROGRAM = """\
import pathlib, time
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def third(tmp_path):
    """The command line with the third scheduler; returns what it printed."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {**os.environ, "THIRD_DIR": f"{tmp_path}/jobs", "PYTHONPATH": f"{TOP}"}

    def call(*words, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.third_scheduler", *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    return call


def await_event(run, kind, count):
    def seen():
        return [e for e in ledger.read(run) if e.kind == kind]

    patience.until(
        lambda: len(seen()) >= count,
        lambda: [path.read_text() for path in run.root.parent.parent.glob("jobs/*/output")],
    )
    return seen()[-1]


def test_it_takes_submit_status_cancel_and_resume(third, tmp_path):
    run = RunDir(tmp_path / "runs" / "lm")
    flags = ("--cluster", "third", "--site", "none", "--name", "lm", "--no-snapshot")

    shown = third("submit", *flags, "--dry-run", "--", "train.py")
    assert shown.endswith(f"# lm is dry-run in {run.root}")
    assert "1 on third" in third("submit", *flags, "--", "train.py")
    await_event(run, "attempt_started", 1)
    assert "job 1" in third("status", "lm")
    refused = third("resume", "lm", code=5)
    assert "lm has job 1 (in the third way), which may still write" in refused

    assert "cancelled job 1 of lm" in third("cancel", "lm")
    assert all_fields(await_event(run, "attempt_ended", 1))["reason"] == "cancelled"
    assert "cancelled" in third("status", "lm")

    (tmp_path / "go").touch()
    assert "job 2" in third("resume", "lm")
    ended = await_event(run, "attempt_ended", 2)
    assert (all_fields(ended)["reason"], all_fields(ended)["next"]) == ("completed", "stop")
    assert "done" in third("status", "lm")
