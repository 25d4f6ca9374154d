"""SIGKILL in the middle of saves: of one rank, of all, of a writer process, at random moments.

A checkpoint is either committed or not there, and the run ends as if nobody had disturbed it.
Each kill is followed by a resume, which must find the newest committed step with every value right.
"""

from __future__ import annotations

import itertools

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.ledger.run import events as ledger
from tests.support.campaign import KINDS, Lane, run_lanes, summary
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, train

STEPS = 5
SETTINGS = {"train__steps": STEPS, "checkpoint__interval_steps": 1, "checkpoint__keep_last": 2}
FEW = [("sync", 0, 3), ("sync", 0, 11), ("sync", 1, 1), ("async", 0, 5)]
ALL = list(itertools.product(("sync", "async"), (0, 1), range(30)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_resume_after_a_kill_finds_the_newest_committed_step_and_sweeps(tmp_path, mode):
    lane = Lane(tmp_path / "run", mode, kills=10, seed=7).run()

    print(summary([lane]))
    assert sum(kill.hit for kill in lane.done) >= 3  # in a save, or this shows little
    assert lane.resumes >= 2


@pytest.mark.soak
def test_a_thousand_kills_in_saves_cost_no_committed_step(tmp_path):
    lanes = [
        Lane(tmp_path / f"run-{seed}", mode, kills=250, seed=seed)
        for seed, mode in enumerate(("sync", "async", "sync", "async"), start=20261121)
    ]

    done = run_lanes(lanes)

    print(summary(done))
    kills = [kill for lane in done for kill in lane.done]
    assert len(kills) >= 1000
    assert {kill.kind for kill in kills} == set(KINDS["async"])
    assert sum(kill.hit for kill in kills) >= 500
    assert sum(kill.staged for kill in kills) >= 150


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", **SETTINGS)
    train(run, 2)
    return run


def _kill_and_resume(root, undisturbed, mode, victim, call):
    run = make_run(root, checkpoint__mode=mode, **SETTINGS)
    train(run, 2, kill_at=call, victim=victim)
    committed = [found.step for found in find.candidates(run) if found.problem is None]
    finished = any(e.kind == "done" for e in ledger.read(run))
    train(run, 2)

    restored = [all_fields(e)["step"] for e in ledger.read(run) if e.kind == "restored"]
    assert restored[-1] == max(committed, default=0)
    assert all(found.problem is None for found in find.candidates(run))
    assert not find.staged(run)  # what the dead attempt left has been swept
    assert_same_bits(full_state(undisturbed, STEPS), full_state(run, STEPS))
    return finished


@pytest.mark.parametrize(("mode", "victim", "call"), FEW)
def test_a_training_run_killed_in_a_save_ends_bit_equal(tmp_path, undisturbed, mode, victim, call):
    finished = _kill_and_resume(tmp_path / "run", undisturbed, mode, victim, call)

    assert not finished  # it was killed, or this test shows nothing


@pytest.mark.soak
def test_a_training_run_killed_at_every_point_of_its_saves_ends_bit_equal(tmp_path, undisturbed):
    killed = 0
    for number, point in enumerate(ALL):
        killed += not _kill_and_resume(tmp_path / f"run-{number}", undisturbed, *point)

    print(f"{len(ALL)} runs, {killed} killed in a save")
    assert killed >= 50
