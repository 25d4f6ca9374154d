"""Saves from a GPU: of one step each, in page-locked memory, and without harm where memory ends."""

from __future__ import annotations

import gc
from contextlib import closing, contextmanager
from functools import partial

import pytest
import torch

from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.tensors import boxes
from hpctrain.checkpoint.tensors.arena import Arena
from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.checkpoint.tensors.device_copy import PageLocked, copy_to_host
from hpctrain.checkpoint.tensors.restore import Wanted, restore
from hpctrain.checkpoint.tensors.save import Saver, save
from hpctrain.core.world import World
from hpctrain.errors import CheckpointError
from hpctrain.ledger.run.layout import RunDir
from tests.support import sharded

ROUNDS = 200
MIB = 1 << 20


@pytest.fixture
def alone(device) -> World:
    """This process without a group."""
    return World(0, 0, 1, device)


@pytest.fixture
def width(is_cuda) -> int:
    """Of a square weight: 16 MiB on a GPU, so that a copy takes longer than its launch."""
    return 2048 if is_cuda else 64


class Weights:
    """A weight, a transposed one, and products of them that keep the device busy."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.plain = torch.zeros(width, width, device=device)
        self.turned = torch.zeros(width, width, device=device).t()
        self.tensors = {"model.plain": self.plain, "model.turned": self.turned}

    def compute(self) -> None:
        for _ in range(3):
            self.plain @ self.turned

    def update(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(1.0)


def test_a_copy_is_of_the_moment_at_which_it_began_however_soon_weights_change(device, width, note):
    weights, locked = Weights(width, device), PageLocked()
    nbytes = 2 * width * width * 4
    with closing(Arena(nbytes)) as arena:
        locked.lock(arena.view(0, nbytes), device)
        host = torch.frombuffer(arena.view(0, nbytes), dtype=torch.float32)
        targets = list(host.chunk(2))
        wrong = []
        for number in range(ROUNDS):
            weights.compute()
            sources = [tensor.contiguous().view(-1) for tensor in weights.tensors.values()]
            sources[0] = weights.plain.view(-1)
            copied = copy_to_host(targets, sources)
            weights.compute()
            weights.update()
            if copied is not None:
                copied.synchronize()
            wrong += [number] * (not host.eq(number).all().item())
        locked.unlock()
    assert wrong == []
    note.on_gpu("device_copy: the own stream, its event, and page-locked memory")


def test_each_checkpoint_of_a_busy_gpu_holds_one_step(alone, folder, width):
    weights = Weights(width, alone.device)
    place = sharded.place(alone, folder / "run")
    saver = Saver(place, alone)
    state = State({**weights.tensors})
    for step in range(1, 4):
        weights.update()
        weights.compute()
        saver.begin(state, sharded.manifest(alone, step))
        weights.compute()
        weights.update()  # and back: the next round's step is in them again
        for tensor in weights.tensors.values():
            tensor.sub_(1.0)
        assert saver.land().error is None
        _require(alone, place, weights, float(step))
    saver.close()


def _require(world, place, weights, value):
    """The newest checkpoint holds this value in every element, loaded into the device again."""
    loaded = {name: torch.empty_like(t).fill_(-1.0) for name, t in weights.tensors.items()}
    restore(place, world, lambda _: Wanted(State(loaded)))
    assert [float(t.min()) for t in loaded.values()] == [value] * 2
    assert [float(t.max()) for t in loaded.values()] == [value] * 2


def test_page_locked_memory_is_locked_while_it_is_used_and_free_behind_that(alone, folder, note):
    saver = Saver(sharded.place(alone, folder / "run"), alone)
    assert saver.prepare(State({"model.w": torch.zeros(MIB, device=alone.device)})) == ""
    first = torch.frombuffer(saver.arena.view(0, MIB), dtype=torch.uint8)
    was_pinned = note.on_gpu("PageLocked: cudaHostRegister and its end") and first.is_pinned()
    assert was_pinned == (alone.device.type == "cuda")
    # The arena grows: what is mapped anew is locked anew, and the old pages are let go.
    assert saver.prepare(State({"model.w": torch.zeros(4 * MIB, device=alone.device)})) == ""
    second = torch.frombuffer(saver.arena.view(0, MIB), dtype=torch.uint8)
    if alone.device.type == "cuda":
        assert not first.is_pinned()
        assert second.is_pinned()
    saver.close()
    if alone.device.type == "cuda":
        assert not second.is_pinned()


@pytest.fixture
def no_memory(device, monkeypatch):
    """`with no_memory():` nothing is left on the device; a CPU is said to be full."""
    return partial(_full_gpu, device) if device.type == "cuda" else partial(_full_cpu, monkeypatch)


@contextmanager
def _full_gpu(device):
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = _rest(device)
    try:
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _full_cpu(monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB.\nMore.")

    with monkeypatch.context() as patch:
        patch.setattr(boxes, "view_of", refuse)
        patch.setattr(torch, "zeros_like", refuse)
        yield


def _rest(device):
    """All that the allocator has yet, down to pieces of a MiB."""
    held, size = [], 64 * MIB
    while size >= MIB // 2:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return held


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_memory_while_saving_leaves_the_older_checkpoint_and_one_line(
    alone, folder, mode, no_memory, note
):
    weights, place = Weights(2048, alone.device), sharded.place(alone, folder / "run")
    saver = Saver(place, alone)
    save(place, alone, State(weights.tensors), sharded.manifest(alone, 1))
    with no_memory():
        if mode == "sync":
            with pytest.raises(CheckpointError) as caught:
                save(place, alone, State(weights.tensors), sharded.manifest(alone, 2))
            error = caught.value
        else:
            saver.begin(State(weights.tensors), sharded.manifest(alone, 2))
            error = saver.land().error
    saver.close()
    note.on_gpu("a real CUDA OOM in the copy of a transposed weight")
    assert "step 2 was not committed: rank 0: OutOfMemoryError: CUDA out of memory." in str(error)
    assert "\n" not in str(error)
    assert [candidate.step for candidate in find.candidates(RunDir(folder / "run"))] == [1]
    save(place, alone, State(weights.tensors), sharded.manifest(alone, 3))


def test_no_memory_while_restoring_leaves_the_checkpoint_and_one_line(
    alone, folder, no_memory, note
):
    weights, place = Weights(2048, alone.device), sharded.place(alone, folder / "run")
    save(place, alone, State(weights.tensors), sharded.manifest(alone, 1))

    def wanted(_):
        return Wanted(State({name: torch.zeros_like(t) for name, t in weights.tensors.items()}))

    with no_memory(), pytest.raises(CheckpointError) as caught:
        restore(place, alone, wanted)
    note.on_gpu("a real CUDA OOM for the moments of an optimizer that is restored")
    assert "OutOfMemoryError: CUDA out of memory." in str(caught.value)
    assert "\n" not in str(caught.value)
    assert restore(place, alone, wanted).step == 1
