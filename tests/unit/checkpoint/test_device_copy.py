"""Saves from a device: whatever order it does things in, a checkpoint is the state of one step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.tensors import boxes
from hpctrain.checkpoint.tensors.boxes import State, bytes_of, held
from hpctrain.checkpoint.tensors.device_copy import PageLocked, copy_to_host
from hpctrain.checkpoint.tensors.restore import Wanted, restore
from hpctrain.checkpoint.tensors.save import Saver, save
from hpctrain.core.world import World
from hpctrain.errors import CheckpointError
from hpctrain.node.memory.copies import RankCopies
from tests.support import sharded
from tests.support.stand_in_device import StandInDevice

GPU = torch.device("cuda", 0)


class Training:
    """Two weights, one of them not contiguous, a moment, and a buffer that the forward changes."""

    def __init__(self, put):
        torch.manual_seed(0)
        self.put = put
        self.w = put(torch.rand(5, 6))
        self.turned = put(torch.rand(6, 5)).t()
        self.moment = put(torch.zeros(5, 6))
        self.buffer = put(torch.ones(6))
        self.grad = None

    def forward_backward(self, step):
        self.buffer.mul_(0.5).add_(self.w.sum(0))
        self.grad = self.put(torch.full((5, 6), 0.1 * step)) + self.w * 0.01 + self.turned * 0.02

    def update(self):
        self.moment.mul_(0.9).add_(self.grad)
        self.w.sub_(self.moment)
        self.turned.sub_(self.moment)

    @property
    def tensors(self):
        return {
            "model.w": self.w,
            "model.turned": self.turned,
            "optim.w.moment": self.moment,
            "model.buffer": self.buffer,
        }


@pytest.fixture
def device(monkeypatch, request):
    """A stand-in device for this seed, and what CUDA was asked for beside."""
    found = StandInDevice(request.param)
    found.install(monkeypatch)
    found.locked, found.unlocked, found.chosen, found.refusal = [], [], [], 0
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.chosen.append)

    def lock(address, nbytes, flags):
        found.locked.append((address, nbytes, flags))
        return found.refusal

    cudart = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=found.unlocked.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return found


def seeds(count):
    return pytest.mark.parametrize("device", range(count), indirect=True, ids=str)


@seeds(60)
def test_copies_are_of_the_step_at_which_they_began(device):
    training, mirror = Training(device.put), Training(torch.clone)
    for step in range(1, 4):
        sources = [tensor.detach().reshape(-1) for tensor in training.tensors.values()]
        hosts = [torch.full((s.numel(),), float("nan")) for s in sources]
        copied = copy_to_host(hosts, sources)
        del sources  # the temporaries' memory belongs to what follows
        there = [tensor.clone().reshape(-1) for tensor in mirror.tensors.values()]

        training.forward_backward(step)
        training.update()
        copied.synchronize()
        mirror.forward_backward(step)
        mirror.update()

        for name, host, right in zip(training.tensors, hosts, there, strict=True):
            assert torch.equal(host, right), (step, name)


@seeds(1)
def test_the_host_does_not_wait_for_a_devices_copies(device):
    training = Training(device.put)
    device.run_until(lambda: device.run_alone(device.own))
    device._eagerness = 0.0
    host = torch.full((30,), float("nan"))

    copied = copy_to_host([host], [training.w.reshape(-1)])
    assert host.isnan().all()
    copied.synchronize()
    assert not host.isnan().any()


def test_on_a_cpu_all_is_copied_at_once():
    host, source = torch.zeros(3), torch.arange(3.0)

    assert copy_to_host([host], [source]) is None
    assert torch.equal(host, source)


@seeds(6)
def test_a_checkpoint_saved_behind_training_is_of_one_step(device, tmp_path):
    world = World(0, 0, 1, GPU)
    place = sharded.place(world, tmp_path / "run")
    saver = Saver(place, world)
    training, mirror, right = Training(device.put), Training(torch.clone), {}
    for step in range(1, 4):
        for side in (training, mirror):
            side.forward_backward(step)
        for side in (training, mirror):
            side.update()
        if step > 1:
            assert saver.land().saved.step == step - 1
        saver.begin(State(training.tensors), sharded.manifest(world, step))
        right[step] = {name: tensor.clone() for name, tensor in mirror.tensors.items()}
    assert saver.land().saved.step == 3
    saver.close()

    for candidate in find.candidates(place.run):
        loaded = {name: torch.zeros_like(t).contiguous() for name, t in mirror.tensors.items()}
        source = CheckpointSource.open(candidate.path, candidate.manifest)
        there = held(State(loaded), CPU)
        source.read([Target(box.piece, bytes_of(box.local)) for box in there])
        for name, tensor in loaded.items():
            assert torch.equal(tensor, right[candidate.step][name]), (candidate.step, name)
    assert [flags for _, _, flags in device.locked] == [1]  # the arena has not grown
    assert device.unlocked == [device.locked[0][0]]


@seeds(6)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_device_saved_comes_back_into_its_memory(device, tmp_path, mode):
    """Weights by way of host memory, once all is proved; moments, which are new, in batches."""
    world = World(0, 0, 1, GPU)
    place = sharded.place(world, tmp_path / "run")
    training, mirror = Training(device.put), Training(torch.clone)
    for side in (training, mirror):
        side.forward_backward(1)
        side.update()
    state, manifest = State(training.tensors), sharded.manifest(world, 1)
    saver = Saver(place, world)
    if mode == "sync":
        save(place, world, state, manifest)
    else:
        saver.begin(state, manifest)
        assert saver.land().error is None
    fresh = Training(device.put)
    fresh.forward_backward(1)  # still in its queue when the weights are put into place

    wanted = Wanted(State(fresh.tensors), frozenset({"optim.w.moment"}))
    restored = restore(place, world, lambda _: wanted, arena=saver.arena)
    fresh.moment.add_(0.0)
    saver.close()

    assert restored.step == 1
    device.run_until(lambda: not device.own.queue)
    for name, tensor in fresh.tensors.items():
        assert torch.equal(tensor.raw, mirror.tensors[name]), name


@seeds(1)
def test_the_arena_grows_when_it_is_not_locked(device, tmp_path, monkeypatch):
    """The driver would go on to copy into addresses that are no longer mapped."""
    world = World(0, 0, 1, GPU)
    saver = Saver(sharded.place(world, tmp_path / "run"), world)
    at_growth = []
    ensure = saver._arena.ensure
    monkeypatch.setattr(
        saver._arena,
        "ensure",
        lambda n: (at_growth.append(len(device.locked) - len(device.unlocked)), ensure(n)),
    )
    for count in (1_000, 500, 100_000):
        assert not saver.prepare(State({"model.w": torch.zeros(count)}))
    saver.close()

    assert at_growth == [0, 0]
    assert [nbytes for _, nbytes, _ in device.locked] == [4096, 401_408]
    assert len(device.unlocked) == 2
    assert device.chosen == [GPU] * 3


NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 79 GiB"
CPU = World(0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_memory_for_a_contiguous_copy_fails_the_save_where_all_ranks_hear_of_it(
    tmp_path, monkeypatch, mode
):
    """Raised on one rank alone it would leave the others waiting for that one's report."""
    place, training = sharded.place(CPU, tmp_path / "run"), Training(torch.clone)
    save(place, CPU, State(training.tensors), sharded.manifest(CPU, 1))
    monkeypatch.setattr(boxes, "view_of", refuse)

    saver = Saver(place, CPU)
    if mode == "async":
        saver.begin(State(training.tensors), sharded.manifest(CPU, 2))
        error = saver.land().error
    else:
        with pytest.raises(CheckpointError) as caught:
            save(place, CPU, State(training.tensors), sharded.manifest(CPU, 2))
        error = caught.value
    saver.close()

    said = NO_MEMORY.partition("\n")[0]
    assert str(error) == f"step 2 was not committed: rank 0: OutOfMemoryError: {said}"
    assert [candidate.step for candidate in find.candidates(place.run)] == [1]


def refuse(*_):
    raise torch.OutOfMemoryError(NO_MEMORY)


def test_no_memory_for_a_contiguous_copy_costs_the_copy_in_the_nodes_memory_alone(
    monkeypatch, capsys
):
    left_out = []
    line = SimpleNamespace(
        take_slot=lambda: 0,
        room=1 << 20,
        slots=[memoryview(bytearray(1 << 20))],
        left_out=lambda *words: left_out.append(words),
    )
    copies = RankCopies(CPU, line)
    copies._taking = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(boxes, "view_of", refuse)
    copies.copy(State(Training(torch.clone).tensors), sharded.manifest(CPU, 2))

    assert left_out == [(2, 0)]
    said = NO_MEMORY.partition("\n")[0]
    assert f"step 2 has no copy in memory: {said}\n" in capsys.readouterr().err


@seeds(1)
def test_memory_is_locked_once_and_let_go_before_it_is_mapped_anew(device):
    locked, memory, other = PageLocked(), memoryview(bytearray(64)), memoryview(bytearray(128))
    for part in (memory, memory, other):
        locked.lock(part, GPU)
    locked.unlock()
    locked.unlock()

    assert [nbytes for _, nbytes, _ in device.locked] == [64, 128]
    assert device.unlocked == [address for address, _, _ in device.locked]


@seeds(1)
def test_a_driver_that_refuses_to_lock_is_told_of_once(device, capsys):
    device.refusal = 2
    locked, memory = PageLocked(), memoryview(bytearray(64))
    locked.lock(memory, GPU)
    locked.lock(memory, GPU)
    locked.unlock()

    assert len(device.locked) == 1
    assert device.unlocked == []
    assert capsys.readouterr().err.count("pageable memory") == 1


def test_other_devices_lock_nothing():
    locked = PageLocked()
    locked.lock(memoryview(bytearray(8)), torch.device("cpu"))
    locked.unlock()
