"""Every dtype that a checkpoint can hold is saved by two ranks and loaded by one and by three.

As plain tensors on every rank, as DDP has them, and cut by FSDP2 as far as torch can cut them. What
torch cannot send or cut is refused by torch itself where the program wraps its model, before any
step: docs/checkpoints.md has the table.
"""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.tensors.boxes import AS_STORED, DTYPES
from tests.support.gloo import launch
from tests.support.resumed import start

ROWS = 7
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
NOT_CUT = {name for name, dtype in NAMES.items() if dtype in AS_STORED and "int" in name}
"""Whole numbers of less than a byte, which torch cannot copy, and so cannot cut."""
NOT_PADDED = {"complex32", "float4_e2m1fn_x2"}
"""What torch cuts only where each rank gets as many rows."""
NOT_SENT = NOT_CUT | {name for name in NAMES if name.startswith(("float8", "float4"))} | {
    "int16", "uint16", "uint32", "uint64",
}  # fmt: skip
"""What gloo cannot broadcast; DDP does so with parameters and buffers as it wraps a model."""


def content(dtype, *, seed):
    """Some bytes of a dtype; of a truth value only those that it has."""
    place = torch.Generator().manual_seed(seed + list(DTYPES).index(dtype))
    most = 2 if dtype == torch.bool else 256
    size = (ROWS, 4 * dtype.itemsize)
    return torch.randint(0, most, size, generator=place, dtype=torch.uint8).view(dtype)


class Every(nn.Module):
    """A frozen parameter and a buffer of each dtype, beside a layer that trains."""

    def __init__(self, *, seed, cut):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, dtype in NAMES.items():
            self.register_buffer(f"buffer_{name}", content(dtype, seed=seed))
            if not cut or name not in NOT_CUT | NOT_PADDED:
                value = nn.Parameter(content(dtype, seed=seed + 99), requires_grad=False)
                self.register_parameter(f"parameter_{name}", value)


def held(tensor, whole):
    """This rank's bytes of a tensor, and the same of what it should be."""
    if hasattr(tensor, "to_local"):
        (box,) = tensor.__create_chunk_list__()
        first, count = box.offsets[0], box.sizes[0]
        tensor, whole = tensor.to_local(), whole.view(torch.uint8)[first : first + count]
    both = [each.detach().contiguous().view(torch.uint8) for each in (tensor, whole)]
    return [each.numpy().tobytes() for each in both]


def on_ranks(folder, total, seed, cut):
    """Which of this rank's tensors are not as the program with seed 0 has made them, and how many.

    A start with another seed has other values until it loads.
    """

    def program(run, total):
        model = Every(seed=seed, cut=cut)
        if cut:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(total):
            for parameter in model.layer.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        expected = Every(seed=0, cut=cut)
        wrong, count = [], 0
        for name, whole in [*expected.named_parameters(), *expected.named_buffers()]:
            if not name.startswith("layer"):
                mine, right = held(model.get_parameter(name) if "param" in name
                                   else model.get_buffer(name), whole)  # fmt: skip
                wrong += [name] * (mine != right)
                count += 1
        return wrong, count

    return start(folder, program, total)


@pytest.mark.parametrize("cut", [False, True], ids=["on every rank", "fsdp2"])
def test_every_dtype_goes_on_at_any_number_of_ranks(tmp_path, cut):
    launch(on_ranks, 2, folder=tmp_path / "two", total=1, seed=0, cut=cut)
    count = 2 * len(NAMES) - (len(NOT_CUT | NOT_PADDED) if cut else 0)

    for ranks in (1, 3):
        folder = shutil.copytree(tmp_path / "two", tmp_path / str(ranks))
        ends = launch(on_ranks, ranks, folder=folder, total=2, seed=7, cut=cut)
        assert ends == [([], count)] * ranks


def refused_by(sharding):
    """Names of dtypes of which torch refuses a frozen parameter as a model is wrapped."""
    from torch.distributed.fsdp import fully_shard

    from hpctrain.train.joining_ranks import join_world

    join_world()
    warnings.simplefilter("ignore")
    wrap, refused = fully_shard if sharding else nn.parallel.DistributedDataParallel, set()
    for name, dtype in NAMES.items():
        module = nn.Linear(2, 2)
        module.frozen = nn.Parameter(content(dtype, seed=0), requires_grad=False)
        try:
            wrap(module)
        except (RuntimeError, NotImplementedError):
            refused.add(name)
    return refused


@pytest.mark.parametrize(("sharding", "refused"), [(True, NOT_CUT), (False, NOT_SENT)])
def test_the_rest_is_refused_by_torch_before_any_step(sharding, refused):
    """If a newer torch takes more, correct docs/checkpoints.md."""
    assert launch(refused_by, 2, sharding=sharding) == [refused] * 2
