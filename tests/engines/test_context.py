"""Ranks that share sequences see what one process sees."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.ledger.plan.mesh import FAMILIES as FAMILIES_OF
from hpctrain.train.engines.engine import Microbatch
from tests.engines import test_decoders as decoders
from tests.engines import test_pretrained as pretrained
from tests.support import layouts
from tests.support import lm_training as lmt
from tests.support.gloo import launch

ALONE = decoders._alone()
FAMILIES = ("Llama", "Mistral", "Qwen3, tied", "Olmo2", "Gemma, tied", "Gemma3, tied")
CASES: dict[str, dict[str, Any]] = {
    "whole": {"whole": True},
    "full": {"activation_checkpointing": "full"},
    "selective, aot": {"activation_checkpointing": "selective", "compile": "aot_eager"},
}


def _seen(engine: Any) -> Any:
    """Gradients of one step, some steps, and the state."""
    tokens = lmt.microbatches(engine, 0)
    evaluated = engine.evaluate(tokens, decoders.share)
    engine.forward_backward(tokens, decoders.share)
    gradients = decoders.gradients_of(engine.model)
    steps = []
    engine.optimizer.zero_grad()
    for step in range(decoders.STEPS):
        batches = lmt.microbatches(engine, step, per_rank=1)
        steps.append((engine.forward_backward(batches, decoders.share), engine.step()))
    state = lmt.arrays(dict(engine.state().shared))
    return {"eval": evaluated, "gradients": gradients, "steps": np.array(steps), "state": state}


def _train(cases: Any) -> dict[str, Any]:
    from hpctrain.train.joining_ranks import join_world

    warnings.simplefilter("ignore")  # an error inside torch's compiler breaks it
    world = join_world()
    seen = {}
    for family, case in cases:
        engine = decoders.engine_of(world, family, cp="2", **CASES.get(case, {}))
        assert (engine.mesh.cp, engine.data_ranks) == (2, world.world_size // 2)
        assert engine.random_rank == world.rank  # other positions drop other channels
        assert engine.is_first_reader is (world.rank % 2 == 0)
        seen[family, case] = _seen(engine)
    return seen


def _alone(families: Any) -> Any:
    world = decoders._alone()
    return {family: _seen(decoders.engine_of(world, family, kind="ddp")) for family in families}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    import transformers

    for _, model, _ in decoders.FAMILIES.values():
        assert getattr(transformers, model)
    return launch(_alone, 1, families=FAMILIES)[0]


FEW = ("Llama", "Qwen3, tied", "Gemma3, tied")
"""Plain attention; norms of heads and tied weights; windows of two sizes."""


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(4, [(family, "") for family in FEW], id="some"),
        pytest.param(
            *(4, [(family, "") for family in FAMILIES if family not in FEW]),
            id="the others",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *(2, [("Llama", "whole"), ("Qwen3, tied", "full"), ("Olmo2", "selective, aot")]),
            id="recomputed and compiled",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_decoders_train_as_in_one_process(alone, ranks, cases):
    for ours in launch(_train, ranks, cases=cases):
        for (family, _), numbers in ours.items():
            theirs = alone[family]
            assert abs(numbers["eval"] - theirs["eval"]) < decoders.LOSS, family
            for name, gradient in theirs["gradients"].items():
                far = np.abs(numbers["gradients"][name] - gradient).max()
                assert far < 1e-4 * np.abs(gradient).max() + 1e-8, (family, name)
            losses, norms = numbers["steps"].T
            assert np.allclose(losses, theirs["steps"][:, 0], rtol=0, atol=decoders.LOSS)
            assert np.allclose(norms, theirs["steps"][:, 1], rtol=decoders.NORM, atol=0)
            for name, tensor in theirs["state"].items():
                assert np.allclose(numbers["state"][name], tensor, rtol=0, atol=decoders.WEIGHT)


def _recipe(ranks: int) -> Any:
    """Two layouts of the recipe's model, with experts too, in one group."""
    layout = "CPxFSDP2@4" if ranks > 1 else "one process"
    seen = []
    for experts in (0, 2):
        engine = layouts.build(layout, experts=experts)
        first = layouts.steps(engine, 0, layouts.SEED)
        held_out = engine.evaluate(layouts.microbatches(engine, 90), layouts.share)
        seen.append((first, held_out, layouts.whole(engine)))
    return seen


def test_the_recipe_trains_as_in_one_process():
    (theirs,) = launch(_recipe, 1, ranks=1)
    for ours in launch(_recipe, 4, ranks=4):
        for (steps, held_out, state), (right, right_out, right_state) in zip(
            ours, theirs, strict=True
        ):
            assert np.allclose(np.array(steps), np.array(right), rtol=2e-5, atol=2e-6)
            assert abs(held_out - right_out) < 2e-6
            for name, tensor in right_state.items():
                assert np.allclose(state[name], tensor, rtol=0, atol=3e-5), name


def _types() -> dict[str, tuple[float, float]]:
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.parallelize import parallelize
    from hpctrain.train.joining_ranks import join_world

    world, losses = join_world(), {}
    for kind in sorted(FAMILIES_OF["cp"]):
        places = ((EngineSettings(kind="fsdp2", cp="2"), world), (EngineSettings(), ALONE))
        spread, whole = (
            parallelize(partial(pretrained.of_type, kind), pretrained.adam, settings, place, seed=5)
            for settings, place in places
        )
        tokens = [Microbatch(*(torch.arange(24).view(2, 12) % 64 for _ in range(2)))]
        losses[kind] = tuple(each.evaluate(tokens, total) for each in (spread, whole))
    return losses


def total(output: Any, targets: Any) -> Any:
    """A sum over positions."""
    logits = output.logits.flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def test_what_submit_lets_through_shares_sequences():
    for losses in launch(_types, 2):
        assert losses.keys() == FAMILIES_OF["cp"]
        for kind, (ours, theirs) in losses.items():
            assert abs(ours - theirs) < 1e-6 * theirs, kind


class Blind(nn.Module):
    """Takes no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return self.layers[0](x)


class Deaf(Blind):
    """Takes positions, and has no attention."""

    def forward(self, x: Any, position_ids: Any = None) -> Any:
        return self.layers[0](x) + position_ids


def mean(output: Any, targets: Any) -> Any:
    """A mean over the positions that are there."""
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 4


def _refusals() -> dict[str, str]:
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.parallelize import parallelize
    from hpctrain.train.joining_ranks import join_world

    world, said = join_world(), {}

    def refused(what: str, act: Any) -> None:
        with pytest.raises(UsageError) as caught:
            act()
        said[what] = str(caught.value)

    def spread(model: nn.Module) -> Any:
        settings = EngineSettings(kind="fsdp2", cp="2")
        return parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), settings, world)

    refused("blind", lambda: spread(Blind()))
    refused("deaf", lambda: spread(Deaf()))
    engine = decoders.engine_of(world, "Llama", cp="2")
    tokens = torch.arange(12).view(1, 12)
    refused("outside", lambda: engine.model(tokens))
    refused("mean", lambda: engine.forward_backward([Microbatch(tokens, tokens)], mean))
    odd = Microbatch(tokens[:, :10], tokens[:, :10])
    refused("length", lambda: engine.forward_backward([odd], decoders.share))
    capped = decoders.engine_of(world, "Gemma2, tied", cp="2")
    refused("cap", lambda: capped.forward_backward([Microbatch(tokens, tokens)], decoders.share))
    return said


def test_what_cannot_share_sequences_says_so_in_one_line():
    words = {
        "blind": "Blind.forward takes no position_ids",
        "deaf": "Deaf has no attention that is known",
        "outside": "call engine.forward_backward or engine.evaluate",
        "mean": "takes a mean over those that it gets",
        "length": "engine.cp 2 cannot share sequences of 10 positions",
        "cap": "Gemma2Attention has an attention mask or a soft cap",
    }
    for said in launch(_refusals, 2):
        assert said.keys() == words.keys()
        for what, text in said.items():
            assert words[what] in text
            assert "\n" not in text


def _of_two_lengths(ranks: int) -> list[tuple[float, float]]:
    """Steps whose microbatches have other lengths."""
    from hpctrain.train.joining_ranks import join_world

    world = join_world() if ranks > 1 else ALONE
    engine = decoders.engine_of(world, "Llama", **({"cp": "2"} if ranks > 1 else {}))
    row = torch.arange(13) * 7 % 250
    batches = [Microbatch(row[None, :n], row[None, 1 : n + 1]) for n in (12, 8)]
    return [(engine.forward_backward(batches, total), engine.step()) for _ in range(3)]


def test_microbatches_of_a_step_may_have_other_lengths():
    (theirs,) = launch(_of_two_lengths, 1, ranks=1)
    for ours in launch(_of_two_lengths, 2, ranks=2):
        assert np.allclose(ours, theirs, rtol=2e-6)
