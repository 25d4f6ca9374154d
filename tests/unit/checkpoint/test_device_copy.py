"""Saves from a device: whatever order it does things in, a checkpoint is the state of one step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.tensors import boxes, device_copy
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
STEADY = ("model.w", "model.turned", "optim.w.moment")


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
    device_copy._side_stream.cache_clear()
    yield found
    device_copy._side_stream.cache_clear()


def seeds(count):
    return pytest.mark.parametrize("device", range(count), indirect=True, ids=str)


def copies_of(tensors, steady=()):
    """Host memory that the tensors are copied into, and the copies."""
    sources = [tensor.detach().reshape(-1) for tensor in tensors.values()]
    hosts = [torch.full((s.numel(),), float("nan")) for s in sources]
    watched = [tensors[name] if name in steady else None for name in tensors]
    return hosts, copy_to_host(hosts, sources, watched)


@seeds(60)
@pytest.mark.parametrize("steady", [(), STEADY], ids=["held at once", "held at the update"])
def test_copies_are_of_the_step_at_which_they_began(device, steady):
    training, mirror = Training(device.put), Training(torch.clone)
    for step in range(1, 4):
        hosts, copies = copies_of(training.tensors, steady)
        there = [tensor.clone().reshape(-1) for tensor in mirror.tensors.values()]

        training.forward_backward(step)
        if steady:
            copies.hold()
        training.update()
        beside = copies.wait()
        mirror.forward_backward(step)
        mirror.update()

        for name, host, right in zip(training.tensors, hosts, there, strict=True):
            assert torch.equal(host, right), (step, name)
        assert beside is not bool(steady)


@seeds(1)
@pytest.mark.parametrize("steady", [False, True])
def test_the_device_computes_while_steady_tensors_are_copied_and_only_then(device, steady):
    training = Training(device.put)
    weights = {name: training.tensors[name] for name in STEADY}
    device.run_until(lambda: device.run_alone(device.own))
    device._eagerness = 0.0

    hosts, copies = copies_of(weights, STEADY if steady else ())
    assert all(host.isnan().all() for host in hosts)  # nor does the host wait
    device.run_alone(device.own)  # as far as the event that the copies wait for
    training.forward_backward(1)
    assert device.run_alone(device.own) is steady
    copies.hold()
    training.update()
    assert not device.run_alone(device.own)
    copies.wait()
    assert device.run_alone(device.own)


@seeds(1)
@pytest.mark.parametrize("copies_first", [False, True])
def test_what_the_device_waits_before_the_update_is_told(device, copies_first):
    training = Training(device.put)
    weights = {name: training.tensors[name] for name in STEADY}
    device.run_until(lambda: device.run_alone(device.own))
    device._eagerness = 0.0
    _, copies = copies_of(weights, STEADY)
    device.run_alone(device.own)
    side = next(stream for stream in device.streams if stream is not device.own)
    if copies_first:
        assert device.run_alone(side)
    training.forward_backward(1)
    copies.hold()
    device.run_alone(device.own)  # to the update, for which it has to wait or has not
    copies.wait()

    assert (copies.held_s > 0) is not copies_first


@seeds(10)
def test_a_weight_that_changes_while_it_is_copied_is_an_error(device):
    training = Training(device.put)
    _, copies = copies_of(training.tensors, STEADY)
    with torch.no_grad():
        training.w.clamp_(-0.1, 0.1)
    copies.hold()

    with pytest.raises(CheckpointError, match=r"checkpoint\.overlap_copy = false"):
        copies.wait()


@seeds(10)
@pytest.mark.parametrize("ends", ["hold", "prove"])
def test_a_change_behind_the_hold_or_behind_the_proof_is_none(device, ends):
    training = Training(device.put)
    _, copies = copies_of(training.tensors, STEADY)
    if ends == "prove":
        copies.wait()
    getattr(copies, ends)()
    training.w.add_(1.0)
    copies.hold()
    copies.wait()
    copies.prove()


@seeds(1)
def test_a_change_that_is_counted_only_after_the_copies_is_noticed(device):
    training = Training(device.put)
    _, copies = copies_of(training.tensors, STEADY)
    copies.wait()
    training.w.add_(1.0)

    with pytest.raises(CheckpointError, match="outside of the optimizer"):
        copies.prove()


def test_on_a_cpu_what_is_small_is_copied_at_once():
    host, source = torch.zeros(3), torch.arange(3.0)
    copies = copy_to_host([host], [source])

    assert torch.equal(host, source)
    assert copies.wait() is False
    copies.hold()


@seeds(6)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_checkpoint_saved_behind_training_is_of_one_step(device, tmp_path, overlap):
    world = World(0, 0, 1, GPU)
    place = sharded.place(world, tmp_path / "run", overlap_copy=overlap)
    saver = Saver(place, world)
    training, mirror, right = Training(device.put), Training(torch.clone), {}
    for step in range(1, 4):
        for side in (training, mirror):
            side.forward_backward(step)
        if overlap:
            saver.before_update()
        for side in (training, mirror):
            side.update()
        if step > 1:
            assert saver.land().saved.step == step - 1
        saver.begin(
            State(training.tensors, steady=frozenset(STEADY)), sharded.manifest(world, step)
        )
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
