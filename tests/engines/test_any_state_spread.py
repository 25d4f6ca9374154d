"""The conformance suite under DDP and FSDP2: a sample of optimizers, schedulers and models.

At the same number of ranks each rank's part of the state must be as in the undisturbed run, to the
bit; at another number the weights within rounding.
"""

from __future__ import annotations

import random

import pytest
import torch

from hpctrain.train.engines.engine import Microbatch
from hpctrain.train.joining_ranks import join_world
from tests.support import state_zoo as zoo
from tests.support.gloo import launch
from tests.support.resumes import Training, differences, start, stopped_and_whole

STEPS, SAMPLES = 6, 12
SAMPLE = {
    "ddp": [
        ("AdamW fused amsgrad", "in sequence", "norms"), ("SGD nesterov", "chained", "weight norm"),
        ("Adagrad", "plateau", "spectral norm"), ("NAdam foreach", "one cycle", "tied"),
        ("Lion", "cosine", "pruned"), ("Prodigy", "warm restarts", "untied"),
        ("AdamWScheduleFree", "constant", "dropout"), ("Adafactor", "milestones", "attention"),
        ("RMSprop centered", "own function", "untied"), ("ASGD", "cyclic", "double"),
    ],
    "fsdp2": [
        ("AdamW foreach", "in sequence", "untied"), ("SGD nesterov", "chained", "dropout"),
        ("Adagrad", "plateau", "attention"), ("NAdam", "one cycle", "untied"),
        ("Lion", "cosine", "untied"), ("Adamax", "average", "attention"),
    ],
}  # fmt: skip
"""Optimizer, scheduler and model. Under FSDP2 ranks have batch norms of their own, and a checkpoint
holds rank 0's: tests/engines/test_buffers.py."""
RESHARDED = [
    ("AdamW foreach", "in sequence", "untied"), ("SGD nesterov", "chained", "double"),
    ("NAdam", "one cycle", "untied"), ("Lion", "milestones", "untied"),
]  # fmt: skip
"""Models whose steps do not depend on how samples are cut into batches."""


def make_of(optimizer, schedule, model):
    """What makes one training under the run's engine."""

    def make(run):
        built = zoo.MODELS[model]()
        engine = run.parallelize(built, zoo.OPTIMIZERS[optimizer])
        scheduler = zoo.SCHEDULERS[schedule](engine.optimizer)
        if hasattr(engine.optimizer, "train"):
            engine.optimizer.train()

        def step(number):
            place = torch.Generator().manual_seed(number)
            every = torch.randn(SAMPLES, 2, generator=place)
            count = SAMPLES // run.world.world_size
            mine = every[run.world.rank * count :][:count]
            torch.rand(1)
            engine.forward_backward(
                [Microbatch(mine, None)], lambda out, _: out.square().sum() / SAMPLES
            )
            engine.step()
            more = (float(number % 3),) if schedule == "plateau" else ()
            scheduler.step(*more)

        return Training(engine.model, engine.optimizer, step, {"schedule": scheduler})

    return make


def same_ranks(kind, folder):
    """What differs on this rank, for each of the sample."""
    world, found = join_world(), {}
    for case in SAMPLE[kind]:
        stop = random.Random(str(case)).randrange(1, STEPS)
        name = f"{', '.join(case)}, stopped at {stop}"
        where = folder / "".join(filter(str.isalnum, name))
        pair = stopped_and_whole(
            make_of(*case), where, steps=STEPS, stops=(stop,), world=world, kind=kind
        )
        if different := differences(*pair):
            found[name] = different
    return found


@pytest.mark.parametrize("kind", SAMPLE)
def test_each_rank_resumes_to_the_bit(tmp_path, kind):
    assert launch(same_ranks, 2, kind=kind, folder=tmp_path) == [{}, {}]


def weights(kind, folder, total):
    """The whole weights after some steps, for each case."""
    world, found = join_world(), {}
    for case in RESHARDED:
        where = folder / "".join(filter(str.isalnum, "".join(case))) if folder else None
        made = []

        def make(run, case=case, made=made):
            made.append(make_of(*case)(run))
            return made[0]

        start(make, where, total, world=world, kind=kind)
        found[case] = {
            name: getattr(one, "full_tensor", lambda one=one: one)().detach().clone()
            for name, one in made[0].model.named_parameters()
        }
    return found


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 3), ("fsdp2", 1)])
def test_another_number_of_ranks_resumes_within_rounding(tmp_path, kind, ranks):
    whole = launch(weights, 2, kind=kind, folder=None, total=STEPS)[0]
    launch(weights, 2, kind=kind, folder=tmp_path, total=3)
    resumed = launch(weights, ranks, kind=kind, folder=tmp_path, total=STEPS)[0]

    for case, right in whole.items():
        mine = {name.removeprefix("module."): one for name, one in resumed[case].items()}
        for name, one in right.items():
            torch.testing.assert_close(
                mine[name.removeprefix("module.")], one, rtol=1e-4, atol=1e-5, msg=f"{case} {name}"
            )
