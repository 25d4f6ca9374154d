"""A model that was loaded in 16 bits trains with fp32 masters, as the same weights in fp32 do."""

from __future__ import annotations

import warnings

import pytest
import torch

from hpctrain.core.world import World
from hpctrain.train.joining_ranks import join_world
from tests.support import layouts
from tests.support import lm_training as lmt
from tests.support.gloo import launch

pytestmark = pytest.mark.quick

ALONE = World(0, 0, 1, torch.device("cpu"))
KINDS = ("ddp", "fsdp2", "zero1")


def trained(world, kind, born, dtype):
    """Three steps of weights rounded to `dtype`, with how all is held."""
    model = lmt.lm().to(dtype)
    model.register_buffer("mean", torch.ones(3, dtype=dtype))
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    engine = lmt.engine_of(world, model.to(born), kind=kind)
    steps = [
        (engine.forward_backward(lmt.microbatches(engine, step), lmt.share), engine.step())
        for step in range(3)
    ]
    held = {name: getattr(one, "local", one) for name, one in engine.state().shared.items()}
    return steps, layouts.whole(engine), {name: tensor.dtype for name, tensor in held.items()}


def trained_alone(dtype):
    return [trained(ALONE, "ddp", born, dtype) for born in (dtype, torch.float32)]


def assert_alike(ours, theirs):
    (steps, tensors, dtypes), (its_steps, its_tensors, its_dtypes) = ours, theirs
    assert steps == its_steps
    assert tensors.keys() == its_tensors.keys()
    assert not [name for name in tensors if not tensors[name].equal(its_tensors[name])]
    assert dtypes == its_dtypes
    assert dtypes["model.count"] is torch.int64
    assert set(dtypes.values()) - {torch.int64} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_process_trains_masters_in_fp32(dtype):
    assert_alike(*trained_alone(dtype))


def test_every_engine_trains_masters_in_fp32():
    for found in launch(several, 2):
        for kind in KINDS:
            assert_alike(*found[kind])


def several():
    warnings.simplefilter("ignore")  # DeepSpeed's imports
    world = join_world()
    births = (torch.bfloat16, torch.float32)
    return {kind: [trained(world, kind, born, torch.bfloat16) for born in births] for kind in KINDS}
