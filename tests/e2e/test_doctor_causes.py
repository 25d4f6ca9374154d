"""Each cause that a machine without a GPU can have, by a real fault: the ledger's and the doctor's.

GPU errors are PyTorch's own classes with its words, raised in a rank. Not among them: what only a
scheduler's nodes have (walltime, node_fail, requeued, grown, unfit_node: tests/slurm).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience, processes
from tests.support.local_runs import SCRIPTS, await_end, events, hpctrain, start

if TYPE_CHECKING:
    from pathlib import Path


class Ending(NamedTuple):
    """A way to end, what the ledger calls it, and what the doctor does."""

    way: str
    cause: str
    kind: str
    sets: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


BRISK = ("checkpoint.interval_steps=4", "preflight.enabled=no")
ENDINGS = [
    Ending("nothing", "completed", "completed"),
    Ending("raises", "user_error", "code"),
    Ending("killed", "crashed", "killed"),
    Ending("worker", "data_worker", "data_worker"),
    Ending("not_finite", "nan", "nan"),
    Ending("memory", "host_oom", "host_oom"),
    Ending("full", "storage_full", "storage_full"),
    Ending("unreadable", "storage_error", "storage_error"),
    # Its collective timed out; that the other rank never came is nearer to the cause.
    Ending("silent_peer", "nccl_error", "hang", ("alive.hang=off",)),
    Ending("stands", "hang", "hang", ("alive.hang_s=4",)),
    Ending("leaves_out", "desync", "desync", ("alive.desync=restart",)),
    # No GPU here: the real classes, with the words that PyTorch has for them.
    Ending("gpu_memory", "gpu_oom", "gpu_oom"),
    Ending("gpu", "gpu_error", "gpu_error"),
    Ending("stays", "hung_end", "hung_end", ("run.end_wait_s=1",)),
    Ending("goes_on", "cancelled", "cancelled", (), ("cancel", "it")),
    Ending("goes_on", "stopped", "stopped", (), ("cancel", "it", "--save")),
    Ending("goes_on", "preempted", "preempted", (), ("local", "preempt", "it")),
]
QUICK = {"full", "not_finite"}


def _marked(ending: Ending):
    marks = [] if ending.way in QUICK else [pytest.mark.soak]
    return pytest.param(ending, id=ending.cause, marks=marks)


@pytest.mark.parametrize("ending", [_marked(ending) for ending in ENDINGS])
def test_the_ledger_and_the_doctor_name_what_ended_it(tmp_path: Path, ending: Ending):
    sets = [word for value in (*BRISK, *ending.sets) for word in ("--set", value)]
    run = start(tmp_path, "it", 1, 2, *sets, "--", str(SCRIPTS / "ends.py"), ending.way)
    if ending.command:
        patience.until(lambda: events(run, "saved"))
        hpctrain(tmp_path, *ending.command)
    if await_end(run)["next"] in {"restart", "requeue"}:
        # It fails in the same way again and again, and may have used up its budget by now.
        hpctrain(tmp_path, "cancel", "it", or_says="it is stopped")
    attempt = json.loads(hpctrain(tmp_path, "status", "it", "--json"))["attempts"][0]
    verdict = json.loads(hpctrain(tmp_path, "doctor", "it", "--attempt", "1", "--json"))

    assert attempt["cause"] == ending.cause
    assert verdict["kind"] == ending.kind
    # Who sent a SIGKILL is told by nobody.
    sure = {"possible"} if ending.way == "killed" else {"certain", "likely"}
    assert verdict["certainty"] in sure


@pytest.fixture
def goes_on(tmp_path: Path):
    """A run that has saved, and goes on."""
    sets = [word for value in BRISK for word in ("--set", value)]
    run = start(tmp_path, "it", 1, 2, *sets, "--", str(SCRIPTS / "ends.py"), "goes_on")
    _await(lambda: events(run, "saved"))
    return run


def _await(reached):
    patience.until(reached)


def _verdict(folder: Path, code: int) -> tuple[str, str]:
    """What the ledger and the doctor call the end of the first attempt."""
    words = [sys.executable, "-m", "hpctrain", "doctor", "it", "--attempt", "1", "--json"]
    env = {**os.environ, "HPCTRAIN_LOCAL_DIR": str(folder / "local")}
    told = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert told.returncode == code, told.stderr
    attempt = json.loads(hpctrain(folder, "status", "it", "--json"))["attempts"][0]
    return attempt["cause"], json.loads(told.stdout)["kind"]


@pytest.mark.soak
def test_an_attempt_that_was_taken_over_is_fenced(tmp_path: Path, goes_on: Path):
    take_attempt(RunDir(goes_on), job_id="local-1", restarts=0)
    _await(lambda: events(goes_on, "fenced"))

    assert _verdict(tmp_path, 0) == ("fenced", "fenced")


@pytest.mark.soak
def test_one_of_which_nothing_is_left_is_unknown_and_not_guessed(tmp_path: Path, goes_on: Path):
    """As when the power fails everywhere at once: job, agent and ranks are gone without a word."""
    local = str(tmp_path / "local")

    def left():
        mine = processes.environment
        return [p for p in processes.all_pids() if mine(p).get("HPCTRAIN_LOCAL_DIR") == local]

    assert left()
    while found := left():
        processes.kill_all(found)
    hpctrain(tmp_path, "resume", "it")
    _await(lambda: events(goes_on, "attempt_ended"))
    hpctrain(tmp_path, "cancel", "it")

    assert _verdict(tmp_path, 1) == ("unknown", "unknown")
