"""Whatever state a program has, it resumes exactly: optimizers, schedulers and models, each tried.

Each case trains a tiny model in this process, is stopped at a step that its name decides, and goes
on with fresh objects from a real checkpoint. All that influences the next step must be as in the
undisturbed run, to the bit. What cannot work is refused with a message that docs/checkpoints.md
lists.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from hpctrain.errors import CheckpointError
from tests.support import state_zoo as zoo
from tests.support.resumes import Training, differences, start, stopped_and_whole

STEPS = 8
QUICK = 4
"""Of the schedulers, how many each optimizer meets in a quick run; together they meet all."""


@pytest.fixture
def folder():
    """In memory: a save flushes several files."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own in it
    made = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield made
    shutil.rmtree(made, ignore_errors=True)  # a thread may still write into it


def lost(make, folder, name):
    """What differs at the end from the undisturbed run."""
    stop = random.Random(name).randrange(1, STEPS)
    found = differences(*stopped_and_whole(make, folder, steps=STEPS, stops=(stop,)))
    return {f"{name}, stopped at {stop}": found} if found else {}


def chains(optimizer):
    """Schedulers for one optimizer; the others' turn comes with the next optimizer."""
    names = list(zoo.SCHEDULERS)
    first = list(zoo.OPTIMIZERS).index(optimizer) * QUICK % len(names)
    return (names + names)[first : first + QUICK]


def lost_of(optimizer, schedulers, folder):
    found = {}
    for number, chain in enumerate(schedulers):

        def make(_, chain=chain):
            model = zoo.model_for(optimizer)
            made = zoo.OPTIMIZERS[optimizer](model)
            schedule = None if optimizer in zoo.RATELESS else zoo.SCHEDULERS[chain](made)
            return zoo.training(model, made, schedule)

        found |= lost(make, folder / str(number), f"{optimizer}, {chain}")
    return found


@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
def test_an_optimizer_with_schedulers_resumes_to_the_bit(folder, optimizer):
    assert lost_of(optimizer, chains(optimizer), folder) == {}


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
def test_an_optimizer_with_every_scheduler_resumes_to_the_bit(folder, optimizer):
    assert lost_of(optimizer, zoo.SCHEDULERS, folder) == {}


def test_the_quick_run_meets_every_scheduler_several_times():
    met = [chain for optimizer in zoo.OPTIMIZERS for chain in chains(optimizer)]
    assert all(met.count(chain) >= QUICK for chain in zoo.SCHEDULERS)


@pytest.mark.parametrize("model", zoo.MODELS)
def test_a_model_resumes_to_the_bit(folder, model):
    found = {}
    for number, optimizer in enumerate(("AdamW", "SGD", "NAdam foreach")):

        def make(_, optimizer=optimizer):
            made = zoo.MODELS[model]()
            return zoo.training(made, zoo.OPTIMIZERS[optimizer](made))

        found |= lost(make, folder / str(number), f"{model}, {optimizer}")
    assert found == {}


@pytest.mark.parametrize("stop", [zoo.GROWS_AT - 1, zoo.GROWS_AT, zoo.GROWS_AT + 2])
def test_parameters_that_are_added_in_the_loop_resume_to_the_bit(folder, stop):
    pair = stopped_and_whole(lambda _: zoo.grown(), folder, steps=STEPS, stops=(stop,))
    assert differences(*pair) == {}


# ---- what cannot work


class Low(torch.optim.Optimizer):
    """As torchao's low-bit optimizers: its moments are of a tensor class of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        from torchao.optim.subclass_8bit import OptimState8bit

        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = OptimState8bit.zeros((16,), block_size=16)


def sparse_buffer(model):
    model.register_buffer("mask", torch.eye(2).to_sparse())


REFUSED = {
    "low-bit optimizer": (
        lambda model: Low(model.parameters()),
        "is a OptimState8bit, a tensor class of a library, which is not saved; use one that keeps",
    ),
    "sparse buffer": (
        sparse_buffer,
        r"model\.mask is a tensor of torch\.float32, torch\.sparse_coo, which is not saved; keep a",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_saved_is_refused_in_one_line(folder, change, message):
    def make(_):
        model = torch.nn.Linear(2, 2)
        return zoo.training(model, change(model) or torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(CheckpointError, match=message) as caught:
        start(make, folder, 1)
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_that_no_checkpoint_can_hold_is_refused_before_the_first_step(folder):
    begun = []

    def make(_):
        model = torch.nn.Linear(2, 2)
        sparse_buffer(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Training(model, optimizer, begun.append)

    with pytest.raises(CheckpointError, match="is not saved"):
        start(make, folder, 1)
    assert begun == []
