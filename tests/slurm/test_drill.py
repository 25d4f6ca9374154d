"""A drill on a real SLURM: ranks are met on their own nodes, and each fault is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.client import BESIDE
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir

pytestmark = pytest.mark.slurm

LATE_S = 1500
NO_PROCESS_OF_ITS_NODES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""What a login node sees of them; here all of them are one machine."""


def told(slurm, folder, *words):
    """Its run, and what came of each fault by its name. It finds SLURM by itself."""
    elsewhere = NO_PROCESS_OF_ITS_NODES if os.getuid() == 0 else ()
    done = subprocess.run(
        [*elsewhere, sys.executable, "-m", "hpctrain", "drill", "--json", *words],
        cwd=folder,
        env={**slurm.env, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LATE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    found = {one["name"]: (one["outcome"], one["why"]) for one in said["faults"]}
    return RunDir(folder / "runs" / said["run"]), found


def _reached(slurm, job_id, count):
    """On which node each step was that the drill has started, by SLURM's own account."""

    def rows():
        words = ("sacct", "-nP", "--duplicates", f"--jobs={job_id}", "--format=JobName,NodeList")
        lines = slurm.run(*words, check=True).stdout.splitlines()
        found = [line.partition("|")[2] for line in lines if line.startswith(f"{BESIDE}|")]
        return found if len(found) >= count else None

    return slurm.wait_for(rows, f"{count} steps in SLURM's account of job {job_id}")


@pytest.mark.story(
    proved_by=(
        "tests/e2e/test_drill.py::test_a_killed_rank_and_a_turned_bit_end_as_promised",
        "tests/unit/entry/test_drill_node.py",
    )
)
def test_a_rank_is_killed_and_frozen_on_its_node_and_the_notice_is_heard(slurm, tmp_path):
    brisk = ("--set=train.step_delay_s=0.05", "--set=run.restart_pause_s=0")
    faults = "--faults=kill_rank,preempt,freeze_rank"
    run, found = told(slurm, tmp_path, "--nodes=2", faults, *brisk)

    assert {outcome for outcome, _ in found.values()} == {"kept"}, found
    assert "the newest committed" in found["kill_rank"][1]
    assert "resumed from there" in found["preempt"][1]
    history = RunHistory.of(ledger.read(run))
    first, *_, last = attempts(history)
    assert _reached(slurm, first.job_id, 2) == [first.nodes[-1], last.nodes[-1]]
    assert [one.reason for one in attempts(history)[:2]] == ["crashed", "preempted"]


@pytest.mark.soak
@pytest.mark.timeout(LATE_S)
def test_every_fault_ends_as_promised(slurm, tmp_path, capsys):
    _, found = told(slurm, tmp_path, "--nodes=2")
    with capsys.disabled():
        print(
            "", *(f"{name}: {outcome}: {why}" for name, (outcome, why) in found.items()), sep="\n"
        )

    assert {outcome for outcome, _ in found.values()} == {"kept"}, found
    assert len(found) == 9
