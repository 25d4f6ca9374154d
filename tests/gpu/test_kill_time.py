"""From SIGKILL of a rank to its next step on the GPU, from the node's memory and from disk."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.gpu.test_runs import DATA, LARGE, ONE, SMALL
from tests.support.ledger_runs import all_fields
from tests.support.scenario import copies_in_memory, submit

KILLED_AT, STEPS = 12, 20
WAYS = {
    "memory": copies_in_memory(STEPS, 2),
    "disk": {"checkpoint.interval_steps": 5, "run.log_every_s": 0, "run.restart_pause_s": 0},
}


@pytest.fixture(scope="module")
def runs(is_cuda, local_jobs, tmp_path_factory):
    """One run for each way, at once; their processes mostly wait."""
    shape = {**(LARGE if is_cuda else SMALL), **DATA, "train.steps": STEPS}
    started = {}
    for way in WAYS if is_cuda else ["memory"]:
        folder, sets = tmp_path_factory.mktemp(way), {**shape, **WAYS[way]}
        started[way] = submit(None, folder, *ONE, sets=sets, held={1: KILLED_AT})
    yield started
    for run in started.values():
        if not run.events("done"):
            run.cli("cancel", "run")


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_comes_back_and_its_time_is_told(runs, way, note):
    if not note.on_gpu(f"a killed rank's state from {way}") and way != "memory":
        return  # test_runs.py rehearses the other
    run = runs[way]
    [(_, pid)] = run.gates[1].wait()
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)
    run.let_go(1)
    run.wait_event("attempt_ended", count=2)

    [first] = [e for e in run.events("phase", 2) if all_fields(e).get("name") == "first_step"]
    restored = all_fields(run.events("restored", 2)[0])
    note.at_most(f"SIGKILL of a rank to its next step, {way}", first.t - killed_at, unit="s")
    note.at_most(f"steps lost at the kill, {way}", run.steps_lost()[0], 5, "steps")
    assert bool(restored["read_from"]) == (way == "memory"), restored
