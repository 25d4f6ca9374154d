"""Tracked state travels as tensors and JSON, and comes back as it was."""

from __future__ import annotations

import json

import pytest
import torch
from torch.optim import lr_scheduler as lr

from hpctrain.checkpoint.tensors.value_reading import decode, placeholders
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.core.world import World
from hpctrain.errors import UsageError
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


def test_data_without_a_state_is_refused_as_it_is_named():
    """At the first save there was an AttributeError."""
    found = program.Program(ALONE)
    plain = torch.utils.data.DataLoader([1, 2])

    with pytest.raises(UsageError, match=r"data=.*a DataLoader has no state_dict.*run\.loader"):
        found.track({}, plain)
    assert found.data is None
