"""Many flipped bits in one of four copies, each found and named; many clean steps, and no word."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from hpctrain.core.settings.schema import GuardSettings
from hpctrain.train.engines.step_guard import StepGuard
from hpctrain.train.runtime.guarding import ReplicaWatch
from tests.support import layouts

SLICES = 4
FLOAT_BITS = 32
MOMENT_BITS = range(16, FLOAT_BITS)
"""A lower bit of a moment may be rounded away before any weight has changed by it."""


class Silent:
    """A step's guard that leaves out what is not finite and tells nobody."""

    def samples_of(self, microbatch):
        return []

    def not_finite(self, bad, *, must_stop):
        pass

    def spiked(self, step, spike, *, is_left_out):
        pass


def begin(layout, groups, **settings):
    engine = layouts.build(layout, layers=1, **settings)
    engine.guard = StepGuard(engine, GuardSettings(spike="off"), Silent())
    heard = []
    weights = list(engine.model.parameters())

    def differ(step, _clean, wrong, _were_same):
        heard.append((step, wrong))

    watch = ReplicaWatch(weights, groups, engine.world, count=SLICES, differ=differ)
    return engine, watch, heard


def step_once(engine, step, before_update=None):
    engine.at_step(step)
    engine.forward_backward(layouts.microbatches(engine, step % 50), layouts.share)
    if before_update is not None:
        before_update()
    engine.step()


def tensors_of(engine):
    """Weights and moments, each with its key; the same order on every rank."""
    found = []
    for weight in engine.model.parameters():
        found.append(("weight", weight.detach()))
        state = engine.optimizer.state[weight]
        found += [(key, state[key]) for key in ("exp_avg", "exp_avg_sq")]
    return found


def flip(tensors, draw):
    """Flip a bit of one of them."""
    key, tensor = tensors[draw.randrange(len(tensors))]
    bit = draw.randrange(FLOAT_BITS) if key == "weight" else draw.choice(MOMENT_BITS)
    element = draw.randrange(tensor.numel())
    value = -(1 << 31) if bit == FLOAT_BITS - 1 else 1 << bit
    tensor.view(-1).view(torch.int32)[element] ^= value
    return key


def are_same(engine):
    """Whether all copies hold the same weights, by their very bytes. Collective."""
    own = [weight.detach().numpy().tobytes() for weight in engine.model.parameters()]
    copies = [None] * engine.world.world_size
    dist.all_gather_object(copies, own)
    return all(copy == own for copy in copies)


def flipped(layout, *, count, seed):
    """So many single flips, one after the other; on rank 0 what became of each.

    Returns:
        Of each flip: what was flipped, whether copies differed afterwards, steps until it was
        known, and who was named.
    """
    engine, watch, heard = begin(layout, [list(range(layouts.LAYOUTS[layout][0]))])
    for step in range(SLICES):
        step_once(engine, step)
        watch.look(step + 1)
    clean = [tensor.clone() for _, tensor in tensors_of(engine)]
    draw, told, step = random.Random(seed), [], SLICES
    for _ in range(count):
        victim, late = draw.randrange(engine.world.world_size), draw.randrange(SLICES)
        choice = random.Random(draw.randrange(1 << 30))
        keys = []

        def spoil(victim=victim, choice=choice, keys=keys):
            if engine.world.rank == victim:
                keys.append(flip(tensors_of(engine), choice))

        heard.clear()
        known = None
        for number in range(3 * SLICES):
            step_once(engine, step, spoil if number == late else None)
            step += 1
            watch.look(step)
            if known is None and heard:
                known = heard[0][0] - (step - number + late)
        differ = not are_same(engine)
        watch.close(step)
        named = [each.suspects for _, wrong in heard for each in wrong]
        told.append((victim, differ, known, sorted(set(named))))
        for (_, tensor), before in zip(tensors_of(engine), clean, strict=True):
            tensor.copy_(before)
        assert are_same(engine)
    engine.guard = None
    return told


def watched(layout, *, steps, groups, **settings):
    """So many clean steps; what was heard."""
    engine, watch, heard = begin(layout, groups, **settings)
    for step in range(steps):
        step_once(engine, step)
        watch.look(step + 1)
    watch.close(steps)
    engine.guard = None
    return len(heard)


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setitem(layouts.LAYOUTS, "DDP@4", (4, {"kind": "ddp"}))
    monkeypatch.setattr("tests.support.gloo.TIMEOUT_S", 3000)


@pytest.mark.parametrize("count", [8, pytest.param(1000, marks=pytest.mark.soak)])
def test_each_flip_in_one_of_four_copies_is_found_and_its_rank_named(four, count):
    told = layouts.run("DDP@4", flipped, count=count, seed=7)
    assert len(told) == count
    lasting = [each for each in told if each[1]]
    assert len(lasting) > 0.9 * count  # the others were rounded away: no copy is wrong
    for victim, _, steps, named in lasting:
        assert named == [(victim,)]
        assert 0 <= steps <= 2 * SLICES
    print(f"{len(lasting)} of {count} flips lasted, all named; latest after ", end="")
    print(f"{max(each[2] for each in lasting)} steps, {SLICES} slices")


PAIRS = [[0, 2], [1, 3]]
"""Ranks of `fsdp2` with two copies of two shards."""


@pytest.mark.parametrize(
    ("layout", "groups", "settings"),
    [
        ("DDP@4", [[0, 1, 2, 3]], {}),
        ("DDP@4", [[0, 1, 2, 3]], {"exact": True}),
        ("HSDP@4", PAIRS, {}),
    ],
)
@pytest.mark.parametrize("steps", [pytest.param(10_000, marks=pytest.mark.soak)])
def test_ten_thousand_clean_steps_cry_wolf_never(four, layout, groups, settings, steps):
    assert layouts.run(layout, watched, steps=steps, groups=groups, **settings) == 0
