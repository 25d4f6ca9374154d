"""Copies made by a thread beside training: of one moment, or refused."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.tensors import device_copy
from hpctrain.checkpoint.tensors.boxes import AS_STORED, DTYPES, State
from hpctrain.checkpoint.tensors.device_copy import CopyTorn, copy_to_host
from hpctrain.checkpoint.tensors.save import Saver
from hpctrain.core.testing import points
from hpctrain.core.world import World
from hpctrain.errors import CheckpointError
from tests.support import sharded

ALONE = World(0, 0, 1, torch.device("cpu"))
COUNT = 200_000
"""Elements of fp32 that are more than one probe apart."""


class Gate:
    """Keeps the thread from copying until it is opened."""

    def __init__(self):
        self.reached, self._open = threading.Event(), threading.Event()
        self.is_shut, self.error = False, None

    def __call__(self, reached):
        if reached.point == "arena.behind":
            self.reached.set()
            if self.is_shut:
                assert self._open.wait(60)
            if self.error is not None:
                raise self.error

    def open(self):
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    """Shut."""
    found = Gate()
    found.is_shut = True
    monkeypatch.setattr(points, "handler", found)
    yield found
    found.open()


def copies_of(tensor, *, is_steady=True):
    """Host memory that a tensor is copied into, and the copies."""
    target = torch.zeros(tensor.numel(), dtype=tensor.dtype)
    watched = [tensor if is_steady else None]
    return target, copy_to_host([target], [tensor.detach().reshape(-1)], watched)


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each not in AS_STORED], ids=str)
@pytest.mark.parametrize("count", [1, 7, 70_001])
def test_a_copy_has_the_bits_of_its_source_whatever_it_is_of(monkeypatch, dtype, count):
    monkeypatch.setattr(device_copy, "SMALL_BYTES", 0)
    random = np.random.default_rng(0).integers(0, 2, count * dtype.itemsize, dtype=np.uint8)
    source = torch.from_numpy(random).view(dtype)

    target, copies = copies_of(source)
    copies.wait()
    copies.prove()

    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


def test_the_copy_is_made_beside_training_which_waits_only_before_the_next_change(gate):
    weight = torch.rand(COUNT)
    before = weight.clone()

    target, copies = copies_of(weight)
    assert copies.is_awaited
    assert gate.reached.wait(60)
    assert not target.any()  # nothing was copied yet, and training has gone on

    began = time.monotonic()
    threading.Timer(0.2, gate.open).start()
    copies.hold()
    waited = time.monotonic() - began
    weight.add_(1.0)
    copies.wait()
    copies.prove()

    assert torch.equal(target, before)
    assert 0.15 < copies.held_s <= waited
    assert not copies.is_awaited


def test_training_does_not_wait_for_a_copy_that_is_made(gate):
    gate.open()
    _, copies = copies_of(torch.rand(COUNT))
    copies.wait()
    copies.hold()

    assert copies.held_s == 0.0


def test_small_tensors_and_those_that_may_change_are_copied_at_once():
    small, moving = torch.rand(100), torch.rand(COUNT)
    for tensor, is_steady in ((small, True), (moving, False)):
        before = tensor.clone()
        target, copies = copies_of(tensor, is_steady=is_steady)
        assert not copies.is_awaited
        tensor.zero_()
        assert torch.equal(target, before)


def grow(weight):
    weight.mul_(1.5)


def through_data(weight):
    weight.data.copy_(torch.rand(COUNT))


def in_bare_memory(weight):
    weight.detach().numpy()[:] *= 2.0


def of_the_last_elements(weight):
    weight.data[-2:] += 1.0


def of_one_element(weight):
    with torch.no_grad():
        weight[COUNT // 2 + 1] = 7.0


@pytest.mark.parametrize(
    "change", [grow, through_data, in_bare_memory, of_the_last_elements, of_one_element]
)
def test_a_change_while_it_is_copied_is_noticed(gate, change):
    weight = torch.rand(COUNT)
    _, copies = copies_of(weight)
    change(weight)
    gate.open()
    copies.hold()

    with pytest.raises(CopyTorn, match=r"checkpoint\.overlap_copy = false"):
        copies.wait()
    with pytest.raises(CopyTorn):
        copies.prove()


def test_a_change_that_is_counted_after_the_copy_was_made_is_noticed_before_it_is_believed():
    """Torch counts a change in place when it is done; the copy may have been made meanwhile."""
    weight = torch.rand(COUNT)
    _, copies = copies_of(weight)
    copies.wait()
    weight.add_(1.0)

    with pytest.raises(CopyTorn):
        copies.prove()


@pytest.mark.parametrize("changed", [0, 1])
def test_a_sharded_tensor_and_its_local_one_are_both_watched(changed):
    """A DTensor counts its own changes, not those that are made to its local tensor alone."""
    both = torch.rand(COUNT), torch.rand(3)
    copies = copy_to_host([torch.zeros(COUNT)], [both[0]], [both[1]])
    copies.wait()
    both[changed].add_(1.0)

    with pytest.raises(CopyTorn):
        copies.prove()


def test_a_change_behind_the_hold_or_behind_the_proof_is_none():
    weight = torch.rand(COUNT)
    for ends in ("hold", "prove"):
        _, copies = copies_of(weight)
        copies.wait()
        getattr(copies, ends)()
        weight.add_(1.0)
        copies.hold()
        copies.wait()
        copies.prove()


def test_what_keeps_the_thread_from_copying_is_told_to_who_waits_and_holds_nobody_up(gate):
    gate.error = OSError(28, "No space left on device")
    _, copies = copies_of(torch.rand(COUNT))
    gate.open()
    copies.hold()

    with pytest.raises(OSError, match="No space left"):
        copies.wait()


# ---- in a save


def state(weight):
    return State({"model.w": weight}, steady=frozenset({"model.w"}))


@pytest.fixture
def place(tmp_path):
    return sharded.place(ALONE, tmp_path / "run", overlap_copy=True)


@pytest.fixture
def saver(place):
    found = Saver(place, ALONE)
    yield found
    found.close()


def saved_steps(place):
    return [one.step for one in find.candidates(place.run) if one.problem is None]


def test_what_training_waited_before_the_update_is_part_of_the_stall(gate, saver):
    weight = torch.rand(COUNT)
    stall_s = saver.begin(state(weight), sharded.manifest(ALONE, 1))
    assert saver.is_copying
    threading.Timer(0.3, gate.open).start()
    saver.before_update()

    outcome = saver.land()
    assert not saver.is_copying
    assert outcome.saved.stall_s >= stall_s + 0.2
    assert outcome.saved.stall_s <= outcome.saved.seconds


def test_a_torn_copy_fails_its_save_and_later_ones_are_made_at_once(gate, place, saver):
    weight = torch.rand(COUNT)
    saver.begin(state(weight), sharded.manifest(ALONE, 1))
    through_data(weight)
    gate.open()
    outcome = saver.land()
    assert "outside of the optimizer's step" in str(outcome.error)

    saver.begin(state(weight), sharded.manifest(ALONE, 2))
    assert not saver.is_copying
    through_data(weight)
    assert saver.land().saved.step == 2
    assert saved_steps(place) == [2]


def test_a_change_that_is_counted_while_the_shard_is_written_fails_the_save(
    monkeypatch, place, saver
):
    weight, write = torch.rand(COUNT), saver._writer.wait
    monkeypatch.setattr(saver._writer, "wait", lambda s: (weight.add_(1.0), write(s))[1])
    saver.begin(state(weight), sharded.manifest(ALONE, 1))

    assert "outside of the optimizer's step" in str(saver.land().error)
    assert saved_steps(place) == []


def test_a_save_that_is_given_up_while_it_is_copied_writes_nothing(gate, place, saver):
    saver.begin(state(torch.rand(COUNT)), sharded.manifest(ALONE, 1))
    assert gate.reached.wait(60)
    threading.Timer(0.2, gate.open).start()
    outcome = saver.abandon()

    assert "abandoned" in str(outcome.error)
    assert saved_steps(place) == []
    assert not find.staged(place.run)


def test_a_thread_that_fails_costs_its_save_alone(gate, place, saver):
    gate.error = OSError(12, "Cannot allocate memory")
    saver.begin(state(torch.rand(COUNT)), sharded.manifest(ALONE, 1))
    gate.open()
    saver.before_update()
    assert isinstance(saver.land().error, CheckpointError)

    gate.error = None
    saver.begin(state(torch.rand(COUNT)), sharded.manifest(ALONE, 2))
    assert saver.is_copying
    assert saver.land().saved.step == 2
    assert saved_steps(place) == [2]


def test_tensors_that_count_no_changes_are_copied_at_once(saver):
    with torch.inference_mode():
        weight = torch.rand(COUNT)
    saver.begin(state(weight), sharded.manifest(ALONE, 1))

    assert not saver.is_copying
    assert saver.land().saved.step == 1


def test_probes_cost_little_and_reach_both_ends():
    array = np.zeros(10 * device_copy.PROBE_BYTES, np.uint32)
    array[0], array[-1] = 1, 2
    words = device_copy._probes([array])
    assert len(words) == 41
    assert {int(words[0]), int(words[-1])} == {1, 2}
