"""Whole runs on the GPU, by `hpctrain submit --cluster local`: stopped, killed, hanging."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpctrain.cluster.scheduler import local as client
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state
from tests.support.scenario import submit

if TYPE_CHECKING:
    from tests.support.scenario import RunHandle

TOP = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
ONE = ("--cluster=local", "--nodes=1", "--ranks-per-node=1", "--no-snapshot")
LOOP = "examples/own_loop.py"
STEPS = {"recipe": 24, LOOP: 200}
LARGE = {"train.layers": 4, "train.dim": 512, "train.heads": 8, "train.seq_len": 256}
SMALL = {"train.layers": 2, "train.dim": 32, "train.heads": 2, "train.seq_len": 16}
DATA = {"train.data": str(TOP / "hpctrain" / "node" / "agent"), "train.data_limit_mb": 0.2}
RECIPE = {**DATA, "train.steps": STEPS["recipe"]}
EVERY = {"checkpoint.interval_steps": 5, "run.log_every_s": 0.0, "run.restart_pause_s": 0.0}
GRACE_S = 600.0
HANG_S = 0.5
"""Ten times that is waited where no rank can be told to wait for another."""
HANG = {**EVERY, "alive.hang_s": HANG_S}


@pytest.fixture(scope="module")
def runs(is_cuda, local_jobs, tmp_path_factory):
    """All runs of this file at once: they wait for processes to start, mostly."""
    folder = tmp_path_factory.mktemp("runs")
    started = {("hangs", ""): start(folder / "hangs", [f"{SCRIPTS / 'hangs.py'}"], HANG)}
    for name in list(STEPS) if is_cuda else [LOOP]:
        words = [f"{SCRIPTS / 'deterministic.py'}", name if name == "recipe" else f"{TOP / name}"]
        sets = {**EVERY, **RECIPE, **LARGE} if name == "recipe" else EVERY
        for kind in ("disturbed", "peace"):
            place = folder / f"{kind}-{Path(name).stem}"
            its_words = [*words, f"{place}"] if kind == "disturbed" else words
            started[name, kind] = start(place, its_words, sets)
    yield started
    for run in started.values():
        if not run.events("done"):
            run.cli("cancel", "run")


def start(place: Path, script: list[str], sets: dict[str, Any]) -> RunHandle:
    """Submit a program."""
    place.mkdir()
    return submit(None, place, *ONE, sets=sets, script=script)


@pytest.mark.parametrize("program", STEPS)
def test_a_run_that_is_stopped_and_killed_ends_with_the_bits_of_one_left_in_peace(
    runs, program, note
):
    if not note.on_gpu(f"{program}: stopped, killed and resumed on the GPU") and program != LOOP:
        return  # test_kill_time.py rehearses the recipe
    run, peace = runs[program, "disturbed"], runs[program, "peace"]
    held(run, 1)
    client.request(run.job_id, "preempt", leave=1, grace_s=GRACE_S)
    pid = held(run, 2)
    stacks = json.loads(run.cli("stacks", "run", "--json"))
    os.kill(pid, signal.SIGKILL)
    run.wait_event("attempt_ended", count=3)
    peace.wait_event("attempt_ended")

    lost = run.steps_lost()
    note.at_most(f"{program}: steps lost at a graceful stop", lost[0], 0, "steps")
    note.at_most(f"{program}: steps lost at a kill, with a save every 5", lost[1], 5, "steps")
    assert [str(reason) for reason, _ in run.ends()] == ["preempted", "crashed", "completed"]
    assert_same_bits(full_state(peace.dir, STEPS[program]), full_state(run.dir, STEPS[program]))
    assert "deterministic.py" in json.dumps(stacks["ranks"]), "stacks of a live rank"
    if note.is_cuda:
        devices = [all_fields(e).get("device") for e in run.events("phase")]
        assert "cpu" not in devices
        assert any(devices)


def held(run: RunHandle, attempt: int) -> int:
    """Wait until an attempt's rank stands; return its process number."""
    path = run.cwd / f"held-{attempt}"
    pid: int = run.wait(f"a rank at {path}", lambda: path.exists() and int(path.read_text()))
    return pid


def test_a_rank_that_waits_for_its_gpu_for_ever_is_named_ended_and_started_again(runs, note):
    run = runs["hangs", ""]
    run.wait_event("attempt_ended", count=2)

    [hang] = [all_fields(e) for e in run.events("hang")]
    assert (hang["ranks"], hang["ended"]) == ([0], True)
    [row] = json.loads((run.dir.attempt(1) / "hang.json").read_text())["ranks"]
    assert "waits_for_the_device" in json.dumps(row)
    assert row["step"] == 5
    assert [str(reason) for reason, _ in run.ends()][-1] == "completed"
    assert row["collectives"], "nothing of torch's flight recorder"
    note.on_gpu("the flight recorder of a real NCCL communicator, and a GPU that never answers")
