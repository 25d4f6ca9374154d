"""A local run whose nodes meet random faults loses no more than promised, and leaves nothing.

    HPCTRAIN_SEED=7 HPCTRAIN_DISTURBANCES=30 pytest --tier soak -m soak FILE

Each process of a node is killed, stopped or paused; disks are full and checkpoints torn as ranks
die. A run prints its seed, which draws the same faults again.
"""

from __future__ import annotations

import os
import random
import shutil
import time

import pytest

from hpctrain.cluster.scheduler import local as client
from tests.support import patience, processes, small_disk
from tests.support.node_faults import Course, left_behind, lost_beyond
from tests.support.recipe import (
    TINY,
    assert_same_bits,
    consumed_by_step,
    full_state,
    make_run,
    samples_of_step,
    train,
)
from tests.support.scenario import submit

pytestmark = [pytest.mark.soak, pytest.mark.two_users, pytest.mark.timeout(0)]

FAULTS = int(os.environ.get("HPCTRAIN_DISTURBANCES", "100"))
ENGINES = ("ddp", "fsdp2")
STEPS = 60
DISK_BYTES = 24 << 20
SETTINGS = {
    **TINY,
    "train.steps": STEPS,
    "train.step_delay_s": 0.1,
    "checkpoint.interval_steps": 10,
    "checkpoint.keep_last": 4,
    "checkpoint.timeout_s": 15,
    "run.restarts_in_job": 100,
    "run.restart_pause_s": 0,
    "run.end_wait_s": 10,
    "budget.crashes": 0,
    "budget.nodes": 0,
    "budget.no_progress": 0,
    "budget.storage": 0,
    "alive.memory": "auto",
    "alive.memory_steps": 2,
    "alive.hang_s": 4,
    "alive.first_step_s": 25,
}
NODES = ("--cluster=local", "--no-snapshot", "--nodes=2", "--ranks-per-node=2")


@pytest.fixture
def tell(capsys):
    def line(text):
        with capsys.disabled():
            print(f"{time.strftime('%T')} {text}", flush=True)

    return line


@pytest.fixture(scope="module")
def peace(tmp_path_factory):
    """What each engine comes to where nothing happens."""
    states = {}

    def of(engine):
        if engine not in states:
            root = tmp_path_factory.mktemp("peace") / "run"
            run = make_run(root, train__steps=STEPS, engine__kind=engine)
            train(run, 4)
            states[engine] = full_state(run, STEPS)
        return states[engine]

    return of


def wrong_with(course, peace, folder, local):
    """What is wrong with a run that has ended, in words."""
    run, wrong = course.run, lost_beyond(course)
    if not run.events("done"):
        return [*wrong, f"the run ended as {run.ends()[-1:]}"]
    try:
        assert_same_bits(peace, full_state(run.dir, STEPS))
    except AssertionError as error:
        wrong.append(f"other weights: {error}")
    used = consumed_by_step(run.dir)
    for step in range(1, STEPS + 1):
        if sorted(used.get(step, [])) != sorted(samples_of_step(run.dir, step)):
            wrong.append(f"step {step} used other samples")
    told = "".join(path.read_text() for path in run.dir.jobs.glob("*.out"))
    if count := told.count("Traceback (most recent call last)"):
        wrong.append(f"{count} tracebacks in the job's output")
    return wrong + left_behind(course, folder, "HPCTRAIN_LOCAL_DIR", str(local))


def disturbed(folder, monkeypatch, dice, engine, most):
    """A run of an engine with some faults, once it has ended."""
    local, temporary = folder / "local", folder / "tmp"
    temporary.mkdir(parents=True)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(local))
    monkeypatch.setenv("TMPDIR", str(temporary))
    sets = SETTINGS | {"engine.kind": engine}
    run = submit(None, folder / "disk", *NODES, sets=sets)
    course = Course(run, dice, folder / "disk")
    for _ in range(min(most, dice.randint(2, 4))):
        if not course.wait_until(min(STEPS - 6, course.step() + dice.randint(2, 15))):
            break
        course.fault()
    controller = client.read(run.job_id).controller_pid
    patience.until(
        lambda: not processes.alive(controller),
        lambda: f"{course.done}\n{course.look()}\n{run.story()}",
    )
    return course, temporary, local


def test_random_faults_of_a_runs_nodes_cost_no_more_than_promised(
    tmp_path, monkeypatch, peace, tell
):
    seed = int(os.environ.get("HPCTRAIN_SEED", time.time_ns() % 10**9))
    faults, runs, bad = 0, 0, []
    tell(f"seed {seed}, {FAULTS} faults")
    while faults < FAULTS:
        dice, engine = random.Random(f"{seed}/{runs}"), ENGINES[runs % len(ENGINES)]
        state, folder, runs = peace(engine), tmp_path / f"{runs}", runs + 1
        with small_disk.mounted(folder / "disk", DISK_BYTES), monkeypatch.context() as patch:
            course, temporary, local = disturbed(folder, patch, dice, engine, FAULTS - faults)
            wrong = wrong_with(course, state, temporary, local)
            faults += len(course.done)
            restored = course.run.restored()
            tell(
                f"run {runs}, {engine}: {course.done}, from {restored}: {wrong or 'nothing wrong'}"
            )
            bad += [f"run {runs}: {one}" for one in wrong]
            if wrong:  # the disk goes with its mount
                shutil.copytree(course.run.dir.root, folder / "kept", symlinks=True)
    tell(f"{faults} faults in {runs} runs, {len(bad)} wrong")
    assert bad == []
