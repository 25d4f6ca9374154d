"""From one rank to two and back on one GPU: what each holds is the part that it should be."""

from __future__ import annotations

import pytest
import torch

from hpctrain.core.world import World
from tests.gpu import ranks
from tests.gpu.training import Training, bits, different

KINDS = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def resharded(device, is_cuda, tmp_path_factory):
    """One rank saves, two load, change and save that, one loads."""
    folder = tmp_path_factory.mktemp("ranks")
    first, last, world = {}, {}, World(0, 0, 1, device)
    trainings = {kind: Training.of(world, shape=ranks.SHAPE) for kind in KINDS}
    for kind, training in trainings.items():
        ranks.change(training.engine)
        training.save(folder / f"{kind}-by-1", 1)
        first[kind] = bits(training.engine)
    said = ranks.spread(folder, KINDS, anew=is_cuda)
    for kind, training in trainings.items():
        assert training.load(folder / f"{kind}-by-2") == 2
        last[kind] = bits(training.engine)
    return first, said, last


def whole(kind, of_ranks):
    """The tensors that the ranks' parts are of."""
    return {
        name: torch.cat([parts[name] for parts in of_ranks])
        if kind == "fsdp2" and tensor.ndim
        else tensor
        for name, tensor in of_ranks[0].items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_rank_saved_two_ranks_hold_together(resharded, kind, device, note):
    first, said, _ = resharded
    assert different(first[kind], whole(kind, [each[kind]["loaded"] for each in said])) == []
    assert {each[kind]["device"] for each in said} == {str(device)}
    note.on_gpu("two ranks on one GPU: CUDA tensors over gloo")


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_saved_one_rank_holds(resharded, kind):
    first, said, last = resharded
    changed = whole(kind, [each[kind]["changed"] for each in said])
    assert different(last[kind], changed) == []
    assert different(first[kind], changed), "the ranks have changed nothing"
