"""Mechanisms that keep a run alive change no bit of it, and each can be switched off alone.

Clean runs on the embedded cluster, held against ranks that no agent started and that have none of
them. That a mechanism which is off does nothing where there is something to do is held beside each.
"""

from __future__ import annotations

import json

import pytest

from hpctrain.ledger.run.layout import RunDir
from tests.support.local_runs import await_end, events, start
from tests.support.recipe import TINY, assert_same_bits, full_state, make_run, train

STEPS = 14
EXACT = {
    "engine.kind": "ddp",
    "engine.exact": True,
    "train.micro_batch": 4,
    "train.steps": STEPS,
}
ON = {
    "alive.hang": "restart",
    "alive.desync": "restart",
    "alive.stragglers": "tell",
    "alive.memory": "auto",
    "guard.nonfinite": "skip",
    "guard.spike": "skip",
    "guard.replicas": 2,
}
OFF = {
    "alive.hang": "off",
    "alive.desync": "off",
    "alive.stragglers": "off",
    "alive.memory": "no",
    "guard.nonfinite": "off",
    "guard.spike": "off",
    "guard.replicas": 0,
}
MISHAPS = (
    "hang",
    "desync",
    "straggler",
    "node_lost",
    "nonfinite",
    "spike",
    "replicas_differ",
)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What ranks come to that have no agent, and none of the mechanisms."""
    changed = {key.replace(".", "__"): value for key, value in (EXACT | OFF).items()}
    run = make_run(tmp_path_factory.mktemp("without") / "run", **changed)
    train(run, 2)
    return full_state(run, STEPS)


def trained(folder, mechanisms):
    """A run of two ranks with these mechanisms, in one attempt."""
    settings = {**TINY, **EXACT, "alive.memory_steps": 2, **mechanisms}
    flags = [f"--set={key}={json.dumps(value).strip(chr(34))}" for key, value in settings.items()]
    root = start(folder, "run", 1, 2, *flags)
    assert await_end(root)["reason"] == "completed"
    return RunDir(root)


def test_with_all_of_them_a_clean_run_has_the_bits_of_one_with_none(tmp_path, without):
    run = trained(tmp_path, ON)

    assert_same_bits(without, full_state(run, STEPS))
    assert events(run.root, "memory_copies")
    assert [kind for kind in MISHAPS if events(run.root, kind)] == []


def test_with_all_of_them_off_it_has_them_too_and_no_copies_are_made(tmp_path, without):
    run = trained(tmp_path, OFF)

    assert_same_bits(without, full_state(run, STEPS))
    assert not events(run.root, "memory_copies")


@pytest.mark.soak
@pytest.mark.parametrize("name", OFF)
def test_each_can_be_switched_off_alone(tmp_path, without, name):
    run = trained(tmp_path, {**ON, name: OFF[name]})

    assert_same_bits(without, full_state(run, STEPS))
    assert bool(events(run.root, "memory_copies")) is (name != "alive.memory")
    assert [kind for kind in MISHAPS if events(run.root, kind)] == []
