"""A flipped bit in one copy of the weights is found, its rank is named, and the run goes back."""

from __future__ import annotations

import json

import pytest
import torch

from hpctrain.core.world import World
from hpctrain.ledger.run import events as ledger
from hpctrain.observe.status.event_lines import in_words
from hpctrain.recipes.lm import train as recipe
from hpctrain.train.runtime.guarding import groups_of
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, train

SLICES, STEPS = 4, 30
WRONG = 1
OFF = {"guard__nonfinite": "off", "guard__spike": "off"}


@pytest.fixture
def flip(monkeypatch):
    """Flip a bit of one rank's weights, or of a moment, before the update of a step."""
    engines = []
    real_batches, real_rate = recipe.make_batches, recipe.lr_at

    def make_batches(tokens, settings, engine):
        engines.append(engine)
        return real_batches(tokens, settings, engine)

    def flip(step, number, key=""):
        def lr_at(now, **rest):
            engine = engines[-1]
            if now == step and engine.world.rank == WRONG:
                weights = [p for group in engine.optimizer.param_groups for p in group["params"]]
                weight = weights[number]
                tensor = engine.optimizer.state[weight][key] if key else weight
                part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                part.detach().view(-1).view(torch.int32)[3] ^= 1 << 20
            return real_rate(now, **rest)

        monkeypatch.setattr(recipe, "make_batches", make_batches)
        monkeypatch.setattr(recipe, "lr_at", lr_at)

    return flip


def facts(run, kind):
    return [all_fields(event) for event in ledger.read(run) if event.kind == kind]


def settings(**more):
    return {"guard__replicas": SLICES, "train__steps": STEPS, **OFF, **more}


@pytest.mark.parametrize(
    ("key", "number", "step"), [("", 0, 9), ("", 5, 10), ("exp_avg", 3, 11), ("exp_avg_sq", 8, 12)]
)
def test_a_flip_is_found_within_a_turn_and_its_rank_named(tmp_path, flip, key, number, step):
    flip(step, number, key)
    run = make_run(tmp_path / "run", **settings(guard__diverged="tell", train__steps=20))
    train(run, 3)

    (differ,) = facts(run, "replicas_differ")  # said once
    assert differ["ranks"] == [WRONG]
    assert differ["certain"] is True
    assert differ["compared"] == 3
    assert step < differ["step"] <= step + 2 * SLICES
    assert differ["clean"] <= step
    assert len(differ["nodes"]) == 1
    (line,) = [in_words(e) for e in ledger.read(run) if e.kind == "replicas_differ"]
    assert f"the weights of rank {WRONG} on " in line
    assert "are not those of the others" in line


def test_a_run_goes_back_behind_the_flip_and_ends_as_if_there_was_none(tmp_path, flip):
    quiet = make_run(tmp_path / "quiet", **settings(checkpoint__interval_steps=5))
    train(quiet, 3)
    run = make_run(tmp_path / "run", **settings(checkpoint__interval_steps=5))
    flip(17, 2)
    with pytest.raises(
        AssertionError, match=r"ReplicasDiverged: guard\.replicas: the weights of rank"
    ):
        train(run, 3)
    (differ,) = facts(run, "replicas_differ")
    aside = [event["step"] for event in facts(run, "checkpoint_set_aside")]
    assert aside
    assert all(differ["clean"] < step for step in aside)
    assert (
        not run.outcome(1).exists() or json.loads(run.outcome(1).read_text())["outcome"] != "failed"
    )

    flip(-1, 0)
    train(run, 3)

    restored = facts(run, "restored")[-1]["step"]
    assert 0 < restored <= min(differ["clean"], 17)
    assert len(facts(run, "replicas_differ")) == 1
    assert_same_bits(full_state(quiet, STEPS), full_state(run, STEPS))


def test_without_a_checkpoint_from_before_the_run_ends_for_good(tmp_path, flip):
    flip(9, 0)
    run = make_run(tmp_path / "run", **settings(checkpoint__interval_steps=11))
    with pytest.raises(AssertionError, match="no checkpoint from before"):
        train(run, 3)
    assert json.loads(run.outcome(1).read_text())["outcome"] == "failed"
    assert facts(run, "checkpoint_set_aside") == []


def test_the_last_steps_are_compared_before_the_last_checkpoint(tmp_path, flip):
    flip(STEPS - 1, 4)
    run = make_run(tmp_path / "run", **settings())
    with pytest.raises(AssertionError, match="ReplicasDiverged"):
        train(run, 2)
    (differ,) = facts(run, "replicas_differ")
    assert (differ["ranks"], differ["certain"]) == ([0, 1], False)
    assert not list(run.checkpoints.glob("step-*"))


def test_copies_that_never_were_the_same_are_told_of_and_nothing_is_done(tmp_path, flip):
    flip(1, 4)
    run = make_run(tmp_path / "run", **settings(train__steps=12))
    train(run, 3)
    assert len(facts(run, "replicas_differ")) == 1
    assert facts(run, "done")


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (4, {"engine__kind": "fsdp2", "engine__dp_replicate": "2"}),
        (2, {"engine__exact": True, "train__micro_batch": 6}),
        (2, {}),
    ],
)
def test_clean_copies_are_never_told_of(tmp_path, ranks, more):
    run = make_run(tmp_path / "run", **settings(**more))
    train(run, ranks)
    assert facts(run, "replicas_differ") == []
    assert facts(run, "done")


def test_shards_of_two_copies_are_compared_with_their_likes(tmp_path, flip):
    flip(9, 3)
    hybrid = {"engine__kind": "fsdp2", "engine__dp_replicate": "2"}
    run = make_run(tmp_path / "run", **settings(guard__diverged="tell", train__steps=20, **hybrid))
    train(run, 4)
    (differ,) = facts(run, "replicas_differ")
    assert (differ["ranks"], differ["compared"]) == ([1, 3], 2)


def test_a_single_process_has_no_copies():
    assert groups_of(None, World(0, 0, 1, torch.device("cpu"))) == []
