"""Trap 10: SIGKILL in the middle of a save, at each flush and rename, on either rank.

Promise 3: a checkpoint is either committed or not there; promise 1: the run ends as if undisturbed.
"""

from __future__ import annotations

import itertools

import pytest

from hpctrain.checkpoint import find
from hpctrain.ledger import events as ledger
from tests.support.recipe import assert_same_bits, full_state, make_run, train

STEPS = 5
SETTINGS = {"train__steps": STEPS, "checkpoint__interval_steps": 1, "checkpoint__keep_last": 2}
FEW = [(0, 0), (0, 3), (0, 9), (1, 1)]
ALL = list(itertools.product((0, 1), range(30)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", **SETTINGS)
    train(run, 2)
    return run


def _kill_and_resume(root, undisturbed, victim, call):
    run = make_run(root, **SETTINGS)
    train(run, 2, kill_at=call, victim=victim)
    committed = [found.step for found in find.candidates(run) if found.problem is None]
    finished = any(e.kind == "done" for e in ledger.read(run))
    train(run, 2)

    restored = [e.data["step"] for e in ledger.read(run) if e.kind == "restored"]
    assert restored[-1] == max(committed, default=0)
    assert all(found.problem is None for found in find.candidates(run))
    assert not find.staged(run)  # what the dead attempt left has been swept
    assert_same_bits(full_state(undisturbed, STEPS), full_state(run, STEPS))
    return finished


@pytest.mark.parametrize(("victim", "call"), FEW)
def test_a_rank_killed_in_a_save_leaves_a_whole_checkpoint_or_none(
    tmp_path, undisturbed, victim, call
):
    finished = _kill_and_resume(tmp_path / "run", undisturbed, victim, call)

    assert not finished  # it was killed, or this test shows nothing


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_rank_killed_at_every_point_of_its_saves(tmp_path, undisturbed):
    killed = 0
    for victim, call in ALL:
        killed += not _kill_and_resume(tmp_path / f"run-{victim}-{call}", undisturbed, victim, call)

    assert killed >= 25
