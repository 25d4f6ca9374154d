"""A rank's will is of the end of a step, or there is none; and keeping it costs next to nothing."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.data.stream_loader import StreamLoader
from hpctrain.engines import state as names
from hpctrain.memory.facts import joined
from hpctrain.memory.rank_line import KeeperLine
from hpctrain.memory.slots import Mark
from hpctrain.memory.will_pages import CellState
from hpctrain.runtime.last_will import LastWill, why_none
from hpctrain.runtime.program import Program
from hpctrain.world import World
from tests.support.keepers import Keepers, ready, until

BLOCK_BYTES = 1 << 16


class Counter:
    """Something tracked."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}


class Trainer:
    """A rank of two that trains, without the other: batch norm's buffers change in each forward."""

    def __init__(self, folder, width=8):
        torch.manual_seed(0)
        self.world = World(0, 0, 2, torch.device("cpu"), ranks_per_node=2)
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.program = Program(self.world)
        self.program.model, self.program.optimizer = self.model, self.optimizer
        self.program.engine = SimpleNamespace(kind="ddp", state=self.state, on_step=None)
        self.position, self.counter = Counter(), Counter()
        self.program.data = self.position
        self.program.tracked = {"counter": self.counter}
        self.will = LastWill(self.world, self.program, folder, 1)
        self.step = 0
        self.width = width

    def state(self):
        return State(dict(names.collect(self.model, self.optimizer)))

    def forward(self):
        self.position.count += 1
        random.random()
        self.model(torch.randn(4, self.width)).square().sum().backward()

    def update(self):
        if self.program.engine.on_step is not None:
            self.program.engine.on_step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self):
        self.step += 1
        self.counter.count += 1
        self.will.at_end_of(self.step)

    def whole_step(self):
        self.forward()
        self.update()
        self.end()

    def warm_up(self):
        self.whole_step()
        manifest = Manifest(
            run_id="id",
            name="run",
            step=self.step,
            world_size=2,
            mesh={"dp_replicate": 2},
            engine="ddp",
            block_bytes=BLOCK_BYTES,
        )
        self.will.warm_up(self.state(), manifest)
        until(lambda: self.will._page is not None, "no memory was given")
        self.will.at_end_of(self.step)

    def now(self):
        """All that a checkpoint would hold."""
        tensors = {name: tensor.clone() for name, tensor in self.state().shared.items()}
        return tensors, self.program.generators.capture(), self.position.count, self.counter.count


@pytest.fixture
def keepers(tmp_path):
    made = Keepers(tmp_path, nodes=1, ranks=2)
    yield made
    made.close()


@pytest.fixture
def trainer(keepers):
    ready(keepers)
    made = Trainer(keepers.folder(0))
    made.warm_up()
    yield made
    made.will._line.leave()


def left(keepers, ranks=2):
    """The node's will: its step, its tensors by name, and its manifest; None for none."""
    wills = keepers.keepers[0]._round.wills
    wills.settle(1, counts=True)
    if wills._whole is None:
        return None
    mark = wills._whole.mark
    line = KeeperLine(keepers.folder(0), 0, 1)
    try:
        facts = line.facts(mark, [0, ranks])
    finally:
        line.close()
    tensors = {}
    for rank in (0, ranks):
        there = keepers.keepers[0]._stock.find(mark, rank)
        low = there.copy.plan.head
        for piece, nbytes in zip(pieces(facts[rank]), there.copy.plan.sizes, strict=True):
            tensors[piece] = bytes(there.view[low : low + nbytes])
            low += nbytes
    manifest, _ = joined({0: facts[0], 1: [*facts[0][:3], {"part": {}}], 2: facts[ranks]})
    return mark.step, tensors, manifest


def pieces(fact):
    return [name.replace("*", "00000") for name in fact[3]["part"]["layout"]["names"]]


def assert_is(will, expected):
    _, tensors, manifest = will
    shared, own, position, count = expected
    for name, tensor in {**shared, **own}.items():
        assert tensors[name] == bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()), name
    assert manifest.data == {"count": position}
    assert manifest.extra == {"counter": {"count": count}}


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_it_is_of_the_last_steps_end_whatever_forward_passes_have_changed(keepers, trainer, passes):
    for _ in range(3):
        trainer.whole_step()
    expected = trainer.now()
    for _ in range(passes):
        trainer.forward()

    trainer.will.write(0.0)

    will = left(keepers)
    assert (will[0], will[2].step) == (4, 4)
    assert_is(will, expected)


def test_in_the_middle_of_an_update_there_is_none(keepers, trainer):
    trainer.whole_step()
    trainer.forward()
    trainer.update()

    trainer.will.write(0.0)

    assert left(keepers) is None


def test_nor_where_moments_have_changed_and_no_weight_yet(keepers, trainer):
    trainer.whole_step()
    trainer.forward()

    def half(*_):
        for moments in trainer.optimizer.state.values():
            moments["exp_avg"].mul_(2)
        trainer.will.write(0.0)

    trainer.optimizer.register_step_pre_hook(half)
    trainer.update()

    assert left(keepers) is None


def test_who_is_asked_in_an_update_answers_at_the_end_of_the_step(keepers, trainer):
    trainer.whole_step()
    trainer.forward()
    trainer.update()
    asked = threading.Thread(target=trainer.will.write, args=(60.0,), daemon=True)
    asked.start()
    until(lambda: trainer.will._came is not None, "nobody waits")
    trainer.end()
    asked.join(20)

    will = left(keepers)
    assert will[0] == 3
    assert_is(will, trainer.now())


def test_what_training_has_gone_on_from_meanwhile_is_not_left_but_what_it_came_to(
    keepers, trainer, monkeypatch
):
    trainer.whole_step()
    copy, turns = trainer.will._copy, []

    def disturbed(memory, kept):
        plan = copy(memory, kept)
        if not turns:
            trainer.whole_step()
        turns.append(kept.step)
        return plan

    monkeypatch.setattr(trainer.will, "_copy", disturbed)
    trainer.will.write(0.0)

    assert turns == [2, 3]
    will = left(keepers)
    assert will[0] == 3
    assert_is(will, trainer.now())


def test_weights_that_change_outside_of_the_optimizer_are_left_by_nobody(keepers, trainer):
    trainer.whole_step()
    with torch.no_grad():
        trainer.model[0].weight.mul_(2)

    trainer.will.write(0.0)

    assert left(keepers) is None


def test_generators_are_kept_ahead_of_the_update_and_at_the_end_of_the_step(keepers, trainer):
    page = trainer.will._page
    trainer.forward()
    trainer.update()
    assert page.state_of(2) == CellState.AHEAD
    trainer.end()
    assert page.state_of(2) == CellState.SAME

    trainer.forward()
    trainer.update()
    torch.rand(1)  # as a loader that begins an epoch does
    trainer.end()
    assert page.state_of(3) == CellState.OTHER

    before = trainer.program.generators.capture()
    trainer.will.write(0.0)
    _, tensors, _ = left(keepers)
    for name, tensor in before.items():
        assert tensors[name] == bytes(tensor.view(torch.uint8).numpy()), name


def test_too_much_that_is_tracked_turns_it_off(keepers, trainer):
    trainer.counter.state_dict = lambda: {"text": "x" * (2 << 20)}

    trainer.whole_step()
    trainer.will.write(0.0)

    assert left(keepers) is None


def test_who_leaves_none(trainer):
    program, world = trainer.program, trainer.world
    assert why_none(program, world) == ""

    assert why_none(program, World(0, 0, 1, torch.device("cpu")))
    assert why_none(program, World(0, 0, 2, torch.device("meta")))
    program.tracked["more"] = StreamLoader.__new__(StreamLoader)
    assert why_none(program, world)
    del program.tracked["more"]
    program.engine.kind = "fsdp2"
    assert why_none(program, world)


def test_a_step_pays_some_microseconds(trainer):
    """A hundred times what was measured on a quiet machine would still be seen."""
    fastest = min(timed(trainer) for _ in range(200))

    assert fastest < 0.005


def timed(trainer):
    began = time.perf_counter()
    trainer.will._ahead_of_update()
    trainer.will._before_update()
    trainer.step += 1
    trainer.will.at_end_of(trainer.step)
    return time.perf_counter() - began


def test_it_counts_as_a_mark_of_its_own():
    assert Mark(1, 7) < Mark(1, 7, 1) < Mark(1, 8) < Mark(2, 3)
