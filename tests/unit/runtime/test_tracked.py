"""Tracked state travels as tensors and JSON, and comes back as it was."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler as lr

from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.checkpoint.tensors.value_reading import decode, placeholders
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.core.world import World
from hpctrain.train.runtime import program

ALONE = World(0, 0, 1, torch.device("cpu"))

SCHEDULERS = {
    "constant": lambda o: lr.ConstantLR(o, total_iters=4),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 20),
    "exponential": lambda o: lr.ExponentialLR(o, 0.9),
    "milestones": lambda o: lr.MultiStepLR(o, [3, 8]),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=20),
    "own function": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one after the other": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o), lr.CosineAnnealingLR(o, 9)], [3]
    ),
}


def through_json(name, state):
    """The state as a checkpoint holds it."""
    extra, tensors = encode(state, name)
    extra = json.loads(json.dumps(extra))
    loaded = placeholders(extra)
    for tensor, value in loaded.items():
        value.copy_(tensors[tensor])
    return decode(extra, loaded)


def rates(optimizer, scheduler, steps):
    """What each of the next steps is done with."""
    found = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        found.append((group["lr"], group["betas"]))
        optimizer.step()
        scheduler.step()
    return found


def fresh(make):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.01)
    return optimizer, make(optimizer)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_restored_scheduler_goes_on_with_the_rates_of_one_that_was_never_stopped(make):
    whole = rates(*fresh(make), 12)
    first, stopped = fresh(make)
    begun = rates(first, stopped, 5)

    second, resumed = fresh(make)
    program.restore(resumed, through_json("scheduler", program.state_of(stopped)))

    assert begun + rates(second, resumed, 7) == whole


def test_tensors_tuples_and_numbered_dicts_come_back_as_they_were():
    state = {
        "weights": torch.arange(6.0).reshape(2, 3),
        "nested": [{"pair": (1, 2.5), "flag": True, "nothing": None}],
        "by_number": {3: torch.tensor(7), 8: "eight"},
    }

    found = through_json("thing", state)

    assert torch.equal(found.pop("weights"), state.pop("weights"))
    assert torch.equal(found["by_number"].pop(3), state["by_number"].pop(3))
    assert found == state


def _engine(kind):
    """An engine of a model with buffers, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["optim.0.weight.exp_avg"] = torch.zeros(2, 2)
    return SimpleNamespace(
        kind=kind,
        model=model,
        optimizer=optimizer,
        loss_scale=None,
        base=None,
        state=lambda with_optimizer, saved: State(tensors),
    )


def test_what_the_optimizer_alone_changes_is_steady_and_buffers_are_not():
    found = program.Program(ALONE)
    found.use(_engine("fsdp2"))
    assert found.snapshot()[0].steady == frozenset()  # nobody would wait for the update

    found.call_before_update(lambda: None)

    assert sorted(found.snapshot()[0].steady) == [
        "model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight",
        "optim.0.weight.exp_avg",
    ]  # fmt: skip


def test_of_a_programs_own_loop_what_its_tracked_optimizer_updates_is_steady():
    """A second optimizer of it says nothing to anybody."""
    own, trained = program.Program(ALONE), _engine("own")
    own.model, second = trained.model, torch.nn.Linear(2, 2)
    own.model.append(second)
    own.optimizer = trained.optimizer
    own.optimizer.step()
    own.call_before_update(lambda: None)

    steady = own.snapshot()[0].steady
    assert sorted(name for name in steady if name.startswith("model.")) == [
        "model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight",
    ]  # fmt: skip


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer by its class, without what torch's own have."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


@pytest.mark.parametrize("wrap", [Wrapper, lambda inner: SimpleNamespace(step=inner.step)])
def test_nothing_is_steady_where_nobody_hears_of_an_update(wrap):
    found, engine = program.Program(ALONE), _engine("ddp")
    engine.optimizer = wrap(engine.optimizer)
    found.use(engine)
    found.call_before_update(lambda: None)

    assert found.snapshot()[0].steady == frozenset()


def test_all_names_of_a_tied_weight_are_steady():
    found, engine = program.Program(ALONE), _engine("ddp")
    engine.model.append(torch.nn.Linear(2, 2))
    engine.model[2].weight = engine.model[0].weight
    tensors = {f"model.{name}": tensor for name, tensor in engine.model.state_dict().items()}
    engine.state = lambda with_optimizer, saved: State(tensors)
    found.use(engine)
    found.call_before_update(lambda: None)

    assert {"model.0.weight", "model.2.weight"} <= found.snapshot()[0].steady


def test_a_save_hears_of_an_update_before_it_happens():
    found, engine = program.Program(ALONE), _engine("ddp")
    found.use(engine)
    weight, seen = engine.model[0].weight, []
    before = weight.detach().clone()
    found.call_before_update(lambda: seen.append(weight.detach().clone()))

    weight.grad = torch.ones_like(weight)
    engine.optimizer.step()

    assert len(seen) == 1
    assert torch.equal(seen[0], before)
    assert not torch.equal(weight, before)
