"""What a rank of many makes of a model before any value is there: one process stands for it."""

from __future__ import annotations

import os

import numpy as np
import torch

from tests.support.fake_ranks import rank_of
from tests.support.gloo import launch


def engine_of(world, *, layers, dim, heads, **settings):
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.recipes.lm.model import LM, LMConfig
    from hpctrain.train.engines.parallelize import parallelize

    config = LMConfig(layers=layers, dim=dim, heads=heads, seq_len=16)
    return parallelize(
        lambda: LM(config, seed=0),
        lambda model: torch.optim.AdamW(model.parameters()),
        EngineSettings(kind="fsdp2", precision="fp32", **settings),
        world,
        is_restored=True,
    )


def boxes_of(ranks, **settings):
    """This process's, as one rank of so many."""
    from hpctrain.checkpoint.tensors.boxes import held

    with rank_of(int(os.environ["RANK"]), ranks, ranks_per_node=4) as world:
        engine = engine_of(world, layers=2, dim=24, heads=4, **settings)
        boxes = held(engine.state(with_optimizer=False), world)
        return [(box.piece, box.replica, box.replicas, tuple(box.local.shape)) for box in boxes]


def test_the_boxes_of_ranks_that_never_met_cover_every_tensor_once():
    ranks = 8
    found = launch(boxes_of, ranks, ranks=ranks, tp="2")

    painted = {}
    for boxes in found:
        for piece, replica, replicas, shape in boxes:
            assert shape == piece.extent
            sums = painted.setdefault(piece.name, np.zeros((replicas, *piece.shape), int))
            place = zip(piece.begin, piece.extent, strict=True)
            sums[(replica, *(slice(begin, begin + extent) for begin, extent in place))] += 1
    for name, sums in painted.items():
        assert (sums == 1).all(), name


def plan_of_512():
    from torch.distributed.tensor import DTensor

    from hpctrain.checkpoint.tensors.boxes import held
    from tests.engines.test_deferred import memory

    asked = []
    real = DTensor.__create_chunk_list__
    DTensor.__create_chunk_list__ = lambda tensor: asked.append(tensor) or real(tensor)
    with rank_of(511, 512) as world:
        engine_of(world, layers=1, dim=32, heads=4, tp="4")  # what torch itself loads
        before = memory("VmRSS")
        asked.clear()
        engine = engine_of(world, layers=4, dim=8192, heads=64, tp="8")
        boxes = held(engine.state(with_optimizer=False), world)
        kinds = {(tensor.shape, tensor.placements) for tensor in engine.model.parameters()}
        return memory("VmRSS") - before, sum(b.piece.nbytes for b in boxes), len(asked), len(kinds)


def test_a_rank_of_512_plans_its_part_of_a_large_model_without_its_memory():
    ((taken, part, asked, kinds),) = launch(plan_of_512, 1)

    assert part > 20e6  # of the 3.2 B parameters of 4 layers
    assert taken < 32e6
    assert asked == kinds  # torch takes milliseconds for each at this size
