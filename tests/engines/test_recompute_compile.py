"""Recomputation and compilation under every native engine: the gradients of one plain process."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hpctrain.engines.blocks import find_blocks
from tests.support import lm_training as lmt
from tests.support.gloo import launch

WAYS = {
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "aot": {"compile": "aot_eager"},
    "full aot": {"activation_checkpointing": "full", "compile": "aot_eager"},
    "selective aot": {"activation_checkpointing": "selective", "compile": "aot_eager"},
}
FEW = ("selective", "aot", "full aot")
ENGINES = {
    "plain": (1, {}, tuple(WAYS)),
    "ddp": (2, {"kind": "ddp"}, FEW),
    "fsdp2": (2, {}, FEW),
    "tp 2": (2, {"tp": "2"}, FEW),
    "tp 2, whole sequence": (2, {"tp": "2", "sequence_parallel": False}, FEW),
    "dp 2 tp 2": (4, {"tp": "2"}, ("selective aot",)),
}
CASES = [(engine, way) for engine, (_, _, ways) in ENGINES.items() for way in ways]


def _world():
    from hpctrain.world import join_world

    if os.environ["WORLD_SIZE"] == "1":
        del os.environ["RANK"]
    return join_world()


def _each_way(ways, settings):
    """Of each way: gradients of the first step, and how many parameters the optimizer updates."""
    import warnings

    import torch

    warnings.simplefilter("ignore")  # an error inside torch's compiler breaks it
    world = _world()
    found = {}
    for name, changes in ways.items():
        torch._dynamo.reset()
        engine = lmt.engine_of(world, lmt.lm(), **settings, **changes)
        counts = [len(group["params"]) for group in engine.optimizer.param_groups]
        found[name] = (lmt.gradients(engine), counts)
    return found


@pytest.fixture(scope="module")
def expected():
    return launch(_each_way, 1, ways={"no": {}}, settings={})[0]["no"][0]


@functools.cache
def _ranks(engine):
    size, settings, ways = ENGINES[engine]
    return launch(_each_way, size, ways={way: WAYS[way] for way in ways}, settings=settings)


@pytest.mark.parametrize(("engine", "way"), CASES)
def test_every_parameter_gets_the_gradient_of_one_process(expected, engine, way):
    for ours in _ranks(engine):
        gradients, updated = ours[way]
        assert gradients.keys() == expected.keys()
        assert updated == [len(expected)]
        for name, gradient in expected.items():
            assert gradients[name] is not None, name
            scale = np.abs(gradient).max()
            assert scale > 0
            assert np.abs(gradients[name] - gradient).max() < 1e-4 * scale, name


def _operations(settings):
    """How often a step computes matrix products, activations, attention, and sums over ranks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = {}

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = operator.overloadpacket.__name__
            self.seen[name] = self.seen.get(name, 0) + 1
            return operator(*args, **(kwargs or {}))

    world = _world()
    found = {}
    for how in ("no", "selective", "full"):
        engine = lmt.engine_of(world, lmt.lm(), activation_checkpointing=how, **settings)
        with Counting() as counting:
            engine.forward_backward(lmt.microbatches(engine, 0, per_rank=1), lmt.share)
        found[how] = [counting.seen.get(name, 0) for name in COUNTED]
    return found


COUNTED = (
    "mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "silu",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
)


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "tp 2"])
def test_selective_recomputes_all_but_the_costly_and_full_recomputes_that_too(engine):
    size, settings, _ = ENGINES[engine]
    tp = engine == "tp 2"

    for ours in launch(_operations, size, settings=settings):
        # Two blocks of seven products, and the head; each costs two more in the backward pass.
        # Along `tp` an attention and an MLP gather their input once, not once for each matrix.
        assert ours["no"] == [45, 2, 2, 10 * tp, 11 * tp]
        assert ours["selective"] == [45, 2, 4, 10 * tp, 15 * tp]
        # Torch stops before a block's last product, whose result nothing needs.
        assert ours["full"] == [45 + 2 * 6, 4, 4, 12 * tp, 15 * tp]


class _Nested(nn.Module):
    """Three blocks, each with a longer list of small ones inside."""

    def __init__(self, wrap):
        super().__init__()
        self.front = nn.Sequential(*(nn.Dropout() for _ in range(9)))
        self.layers = nn.ModuleDict({str(number): wrap(_Experts()) for number in range(3)})


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))
        self.router = nn.Linear(2, 8)


@pytest.mark.parametrize("wrap", [lambda block: block, checkpoint_wrapper], ids=["bare", "wrapped"])
def test_blocks_are_the_list_that_holds_most_and_not_the_longest(wrap):
    model = _Nested(wrap)

    assert list(find_blocks(model)) == list(model.layers.values())


def test_a_model_without_a_list_has_no_blocks():
    assert not find_blocks(nn.Linear(2, 2))
