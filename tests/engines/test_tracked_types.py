"""What a program tracks comes back with its types, tried on situations of public bug reports.

Each case trains a tiny model, is stopped twice, and goes on with fresh objects. All that influences
the next step must be as in the undisturbed run, to the bit.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.support.resumes import Training, differences, stopped_and_whole
from tests.support.value_trees import facts


def small():
    """A model and its optimizer."""
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model, optimizer, after=lambda: None, scale=lambda: 1.0, **tracked):
    """A training with the usual step."""

    def step(_):
        optimizer.zero_grad()
        (model(torch.randn(4, 2)).square().sum() * scale()).backward()
        optimizer.step()
        after()

    return Training(model, optimizer, step, tracked)


class Tracked:
    """Anything as tracked state."""

    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


# ---- schedulers


def warm_up_then_milestones(_):
    """pytorch#153842: a Counter of milestones, in a scheduler inside a scheduler."""
    model, optimizer = small()
    parts = [lr.LinearLR(optimizer, 0.1, total_iters=5), lr.MultiStepLR(optimizer, [1, 3])]
    scheduler = lr.SequentialLR(optimizer, parts, milestones=[5])
    return trained(model, optimizer, scheduler.step, scheduler=scheduler)


def chained_milestones(_):
    model, optimizer = small()
    parts = [lr.MultiStepLR(optimizer, [2, 2, 7], 0.5), lr.ExponentialLR(optimizer, 0.9)]
    scheduler = lr.ChainedScheduler(parts)
    return trained(model, optimizer, scheduler.step, scheduler=scheduler)


def plateau_of_numpy_numbers(_):
    """Its best is infinity at first, and what it is fed is a numpy scalar."""
    model, optimizer = small()
    scheduler = lr.ReduceLROnPlateau(optimizer, patience=1, threshold=0.0)

    def after():
        scheduler.step(np.float32(5.0 + scheduler.last_epoch))

    return trained(model, optimizer, after, scheduler=scheduler)


def rate_in_a_tensor(_):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    scheduler = lr.CosineAnnealingWarmRestarts(optimizer, 3)
    return trained(model, optimizer, scheduler.step, scheduler=scheduler)


# ---- generators


def numpy_global(_):
    """transformers#11582: noise of numpy's global generator, in the training process."""
    model, optimizer = small()
    return trained(model, optimizer, scale=lambda: float(np.random.randn()))  # noqa: NPY002


def tracked_generators(_):
    model, optimizer = small()
    of_numpy, old = np.random.default_rng(5), np.random.RandomState(3)
    of_python, of_torch = random.Random(4), torch.Generator().manual_seed(1)

    def scale():
        child = of_numpy.spawn(1)[0]
        drawn = child.random() + of_numpy.integers(9, dtype=np.int32) + old.standard_normal()
        return float(drawn + of_python.gauss(0, 1) + torch.rand(1, generator=of_torch).item())

    return trained(model, optimizer, scale=scale, a=of_numpy, b=old, c=of_python, d=of_torch)


def generator_of_a_sampler(_):
    """A DataLoader's order comes of its sampler's generator."""
    model, optimizer = small()
    generator = torch.Generator().manual_seed(7)
    sampler = torch.utils.data.RandomSampler(range(9), generator=generator)
    return trained(
        model, optimizer, scale=lambda: float(next(iter(sampler)) + 1), sampler=generator
    )


# ---- types


class Phase(enum.Enum):
    WARM = "warm"
    COLD = "cold"


@dataclasses.dataclass
class Ema:
    decay: float
    shadow: list[torch.Tensor]
    phase: Phase = Phase.WARM
    updates: int = 0


class Sample(NamedTuple):
    state: Any
    reward: float


def average_in_a_dataclass(_):
    model, optimizer = small()
    kept = Tracked(ema=Ema(0.1 + 0.2, [p.detach().clone() for p in model.parameters()]))

    def after():
        ema = kept.values["ema"]
        ema.updates += 1
        if ema.phase is Phase.WARM and ema.updates > 4:
            ema.phase = Phase.COLD
        for mine, its in zip(ema.shadow, model.parameters(), strict=True):
            mine.lerp_(its.detach(), 1 - ema.decay if ema.phase is Phase.COLD else 0.5)

    return trained(model, optimizer, after, kept=kept)


def replay_buffer(_):
    """rl#1594 and its like: numpy records, a deque with an end, tuples with names."""
    model, optimizer = small()
    kept = Tracked(
        samples=deque(maxlen=3),
        rows=np.zeros(5, [("when", "M8[s]"), ("reward", "f4", (2,))]),
        words=np.array(["a", "längst"]),
        scalar=np.float32(0.1),
    )

    def after():
        count = len(kept.values["samples"]) + 1
        reward = kept.values["scalar"] = np.float32(kept.values["scalar"] * np.float32(1.1))
        kept.values["samples"].append(Sample(torch.ones(2) * count, float(reward)))
        row = kept.values["rows"][count]
        row["when"], row["reward"] = np.datetime64(count, "s"), reward
        kept.values["words"] = np.append(kept.values["words"], str(count))

    return trained(model, optimizer, after, kept=kept)


def keys_of_all_kinds(_):
    """The key 1 and the key "1" are two; JSON has one."""
    model, optimizer = small()
    kept = Tracked(seen={1: "n", "1": "s", (1, 2): "t", None: 0, 2.5: 0, Phase.WARM: 0, b"x": 0})

    def after():
        for key in list(kept.values["seen"]):
            kept.values["seen"][key, "again"] = type(key).__name__

    return trained(model, optimizer, after, kept=kept)


def collections_of_python(_):
    model, optimizer = small()
    kept = Tracked(
        losses=defaultdict(list), counts=Counter(), order=OrderedDict(b=1, a=2), seen=set()
    )

    def after():
        values = kept.values
        values["losses"]["train"].append(len(values["losses"]["train"]) / 3)
        values["counts"].update(["a", "b", "a"])
        values["order"].move_to_end(next(iter(values["order"])))
        values["seen"].add(frozenset([len(values["seen"])]))

    return trained(model, optimizer, after, kept=kept)


def numbers_and_times(_):
    model, optimizer = small()
    kept = Tracked(
        best=float("inf"), worst=float("nan"), zero=-0.0, third=1 / 3, huge=3**200, turn=1 + 2j,
        money=Decimal("1.10"), folder=Path("out"), begun=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        took=dt.timedelta(seconds=1), shape=torch.Size([2]), dtype=torch.bfloat16, raw=b"\0\xff",
    )  # fmt: skip

    def after():
        values = kept.values
        values["third"] *= 1.1
        values["huge"] += 1
        values["turn"] *= 1j
        values["begun"] += values["took"]
        values["folder"] /= "x"
        values["raw"] += b"\1"

    return trained(model, optimizer, after, kept=kept)


def every_dtype(_):
    model, optimizer = small()
    some = (torch.complex128, torch.uint64, torch.float8_e4m3fnuz, torch.int4, torch.uint3)
    content = torch.arange(32, dtype=torch.uint8)
    kept = Tracked(tensors={dtype: content.clone().view(dtype) for dtype in some})

    def after():
        for tensor in kept.values["tensors"].values():
            tensor.view(torch.uint8).add_(1)

    return trained(model, optimizer, after, kept=kept)


def one_object_in_two_places(_):
    """A shared tensor and a shared list must not come apart."""
    model, optimizer = small()
    shared, log = torch.zeros(2), []
    kept = Tracked(first={"t": shared, "log": log}, other=[shared, log])

    def after():
        kept.values["first"]["t"].add_(1)
        kept.values["other"][1].append(kept.values["other"][0].sum().item())

    return trained(model, optimizer, after, kept=kept)


def complex_buffer(_):
    """safetensors#489: rotary tables in complex128."""
    model, optimizer = small()
    table = torch.polar(torch.ones(4).double(), torch.arange(4.0).double())
    model.register_buffer("freqs", table)
    model.register_buffer("narrow", torch.arange(8, dtype=torch.uint8).view(torch.complex32))
    model.register_buffer("packed", torch.arange(4, dtype=torch.uint8).view(torch.int4))

    def after():
        model.freqs.mul_(1j)

    return trained(model, optimizer, after)


# ---- parts of torch


def loss_scaler(_):
    """accelerate#4289: the scale over a resume."""
    model, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step(_):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return Training(model, optimizer, step, {"scaler": scaler})


def averaged_weights(_):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=5)

    def after():
        average.update_parameters(model)
        scheduler.step()

    return trained(model, optimizer, after, average=average, scheduler=scheduler)


def second_optimizer(_):
    """A GAN's other half: lists, None and Python numbers in the state of LBFGS."""
    model, optimizer = small()
    other = nn.Linear(2, 1)
    lbfgs = torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=3, history_size=2)

    def closure():
        lbfgs.zero_grad()
        loss = other(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    return trained(
        model, optimizer, lambda: lbfgs.step(closure), other=other, other_optimizer=lbfgs
    )


def stopped_at_an_epochs_end(run):
    """data#1437: stopped at the end of an epoch and again inside one."""
    model, optimizer = small()
    loader = run.loader(list(range(10)), global_batch=3)
    return trained(model, optimizer, scale=lambda: float(next(loader).sum()))


CASES = {
    make.__name__.replace("_", " "): make
    for make in (
        warm_up_then_milestones, chained_milestones, plateau_of_numpy_numbers, rate_in_a_tensor,
        numpy_global, tracked_generators, generator_of_a_sampler, average_in_a_dataclass,
        replay_buffer, keys_of_all_kinds, collections_of_python, numbers_and_times, every_dtype,
        one_object_in_two_places, complex_buffer, loss_scaler, averaged_weights, second_optimizer,
        stopped_at_an_epochs_end,
    )
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_stopped_run_ends_as_the_undisturbed_one(tmp_path, make):
    assert differences(*stopped_and_whole(make, tmp_path, steps=9, stops=(2, 4, 6))) == {}


def test_the_facts_that_are_compared_tell_types_and_bits_apart():
    """A comparison that calls two things the same would let all cases pass."""
    one = {"a": [1, 2.0, torch.ones(2)], "b": Counter("ab")}
    pairs = [
        ([1], (1,)), (1, True), (0.0, -0.0), ({1: 0}, {"1": 0}), (Counter("a"), {"a": 1}),
        (np.float64(1), 1.0), (torch.ones(1), torch.ones(1).double()), ({"a", "b"}, ["a", "b"]),
        (deque([1], 2), deque([1], 3)), (OrderedDict(a=1), {"a": 1}), (None, "None"),
        (defaultdict(list), defaultdict(int)), (torch.ones(1), nn.Parameter(torch.ones(1))),
        (Path("a"), "a"), (Phase.WARM, "warm"),
    ]  # fmt: skip

    assert facts(one) == facts(copy.deepcopy(one))
    assert [pair for pair in pairs if facts(pair[0]) == facts(pair[1])] == []
