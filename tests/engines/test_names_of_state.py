"""Names are those of the unwrapped model, by knowing the wrappers; one memory has one value."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.checkpoint.tensors import restore
from hpctrain.errors import CheckpointError
from hpctrain.train.engines import state
from tests.support.gloo import launch
from tests.support.resumed import start, values

pytestmark = pytest.mark.quick


def layers(name="module"):
    model = nn.Sequential()
    model.add_module(name, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model.add_module("last", nn.Linear(2, 1))
    return model


def named(model):
    found = [name for name, _ in state.parameters(model)]
    return found + [place.name for place, buffer in state.buffers(model) if buffer is not None]


def test_a_submodule_keeps_the_name_of_a_wrapper():
    for name in ("module", "_orig_mod", "_checkpoint_wrapped_module"):
        model = layers(name)
        assert sorted(named(model)) == sorted(model.state_dict())


@pytest.mark.parametrize("name", ["module", "body"])
def test_wrappers_leave_no_trace_in_names(name):
    plain = layers(name)
    expected = named(plain)

    assert named(torch.compile(plain, backend="eager")) == expected
    assert named(nn.DataParallel(plain)) == expected
    plain[0] = checkpoint_wrapper(plain[0])
    assert named(plain) == expected
    wrapped = torch.compile(nn.DataParallel(plain), backend="eager")
    assert named(wrapped) == expected
    told = state.collect(plain, None)
    assert list(told) == ["model." + each for each in expected]
    assert {state.MODEL + place.name for place, _ in state.buffers(wrapped)} == {
        f"model.{each}" for each in expected if "running" in each or "num_batches" in each
    }


def test_names_are_those_that_torch_gives():
    """Which older checkpoints have."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = layers("module")
    model[0] = checkpoint_wrapper(model[0])
    model.averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))

    told = get_model_state_dict(torch.compile(model, backend="eager"))

    assert set(state.collect(model, None)) == {"model." + name for name in told}


def under_ddp(root, name, total):
    """Two ranks' own running means; what each has after a restore."""

    def program(run, total):
        model = layers(name)
        known = inspect.signature(DistributedDataParallel).parameters
        key = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        wrapped = DistributedDataParallel(model, **{key: False})
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        run.track(model=wrapped, optimizer=optimizer)
        seen = None
        for step in run.steps(total):
            seen = model[0][1].running_mean.tolist() if seen is None else seen
            made = torch.Generator().manual_seed(10 * step + run.world.rank)
            wrapped(torch.randn(4, 2, generator=made)).sum().backward()
            optimizer.step()
        return seen, model[0][1].running_mean.tolist()

    return start(root, program, total)


@pytest.mark.parametrize("name", ["module", "body"])
def test_buffers_of_the_first_rank_come_back_whatever_the_submodule_is_called(tmp_path, name):
    ends = launch(under_ddp, 2, root=tmp_path, name=name, total=2)
    assert ends[0][1] != ends[1][1]

    begun = launch(under_ddp, 2, root=tmp_path, name=name, total=3)

    assert [seen for seen, _ in begun] == [ends[0][1]] * 2


class Pair(nn.Module):
    def __init__(self, *, tied, frozen=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(not frozen)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.head(self.embedding(x) * self.scale)


def pair(run, total, *, tied, same=False, frozen=False):
    model = Pair(tied=tied, frozen=frozen)
    if same:
        model.head.weight.data = model.embedding.weight.data.clone()
    rate = 0.0 if same else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(total):
        optimizer.zero_grad()
        model(torch.tensor([0, 1])).pow(2).sum().backward()
        optimizer.step()
    return values(model)


def test_two_values_for_one_memory_are_refused(tmp_path):
    start(tmp_path, lambda run, total: pair(run, total, tied=False), 3)

    with pytest.raises(CheckpointError, match=r"head\.weight and .*are one tensor"):
        start(tmp_path, lambda run, total: pair(run, total, tied=True), 4)


@pytest.mark.parametrize("row", [0, 2])
def test_two_values_are_refused_wherever_they_differ(tmp_path, monkeypatch, row):
    """Two names of one memory are compared part by part."""
    monkeypatch.setattr(restore, "COMPARED_BYTES", 8)  # a row

    def program(run, total, *, tied):
        model = Pair(tied=tied)
        if not tied:
            model.head.weight.data = model.embedding.weight.data.clone()
            model.head.weight.data[row] += 1
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.steps(total):
            pass

    start(tmp_path, lambda run, total: program(run, total, tied=False), 1)

    with pytest.raises(CheckpointError, match=r"head\.weight and .*are one tensor"):
        start(tmp_path, lambda run, total: program(run, total, tied=True), 2)


def test_equal_values_for_one_memory_are_loaded(tmp_path):
    before = start(tmp_path, lambda run, total: pair(run, total, tied=False, same=True), 3)

    after = start(tmp_path, lambda run, total: pair(run, total, tied=True), 3)

    assert after == before


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tied_weight_goes_on(tmp_path, frozen):
    def program(run, total):
        return pair(run, total, tied=True, frozen=frozen)

    start(tmp_path / "stopped", program, 3)
    assert start(tmp_path / "stopped", program, 6) == start(tmp_path / "whole", program, 6)


class Allocations(TorchDispatchMode):
    """Sizes of new memory that torch gives, in bytes, and how many of each."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "new_empty", "clone", "zeros")):
            self.sizes.append(made.nbytes)
        return made


@pytest.mark.parametrize(("tied", "copies"), [(True, 1), (False, 2)])
def test_a_tied_weight_takes_no_second_copy_of_memory_at_a_load(
    tmp_path, monkeypatch, tied, copies
):
    """Weights are read into host memory first, once for each memory, and names are compared."""
    monkeypatch.setattr(restore, "COMPARED_BYTES", 1 << 14)
    sizes = []

    def program(run, total):
        model = nn.Module()
        model.embedding, model.head = nn.Embedding(4096, 64), nn.Linear(64, 4096, bias=False)
        if tied:
            model.head.weight = model.embedding.weight
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        steps = run.steps(total)
        with Allocations() as seen:
            next(steps)  # which loads
        sizes[:] = [size for size in seen.sizes if size >= model.head.weight.nbytes // 4]
        list(steps)

    start(tmp_path, program, 1)
    assert sizes == []
    start(tmp_path, program, 2)
    assert sum(sizes) == 4096 * 64 * 4 * copies


def tied_on_shards(root, tied):
    def program(run, total):
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(Pair(tied=tied))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(total):
            model(torch.tensor([0, 1])).pow(2).sum().backward()
            optimizer.step()

    try:
        start(root, program, 2 if not tied else 3)
    except CheckpointError as error:
        return str(error)
    return ""


def test_two_values_for_one_sharded_memory_are_refused_on_every_rank(tmp_path):
    assert launch(tied_on_shards, 2, root=tmp_path, tied=False) == ["", ""]

    for said in launch(tied_on_shards, 2, root=tmp_path, tied=True):
        assert "are one tensor in the program" in said


def test_a_parameter_that_no_module_has_is_refused_by_its_shape():
    model, extra = nn.Linear(2, 2), nn.Parameter(torch.ones(7))
    optimizer = torch.optim.AdamW([*model.parameters(), extra])
    (model(torch.ones(1, 2)).sum() + extra.sum()).backward()
    optimizer.step()

    with pytest.raises(CheckpointError, match=r"AdamW updates a parameter of shape \[7\]"):
        state.collect(model, optimizer)


def test_fsdp1_is_refused_in_one_line():
    class FullyShardedDataParallel(nn.Module):
        pass

    FullyShardedDataParallel.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    FullyShardedDataParallel.__qualname__ = "FullyShardedDataParallel"

    with pytest.raises(CheckpointError, match=r"FSDP1.*fully_shard"):
        state.collect(FullyShardedDataParallel(), None)


ODD = ("q/k", "名 é", "module", "step", "exp_avg:int", "0", "model", "optim", "w~2")
"""Names that mean something in paths, in wrappers and in a checkpoint's own state."""


def oddly_named(run, total):
    model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ODD})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(total):
        optimizer.zero_grad()
        used = [layer for number, layer in enumerate(model.values()) if step % (number + 1) == 0]
        sum(layer(torch.ones(1, 2)).square().sum() for layer in used).backward()
        optimizer.step()
    counts = [optimizer.state[one]["step"].item() for one in model.parameters()]
    return values(model), counts


def test_layers_may_have_any_name(tmp_path):
    expected, counts = start(tmp_path / "whole", oddly_named, 9)
    assert len(set(counts)) > 4  # else a mix-up of two layers would not be seen

    start(tmp_path / "stopped", oddly_named, 5)

    assert start(tmp_path / "stopped", oddly_named, 9) == (expected, counts)
