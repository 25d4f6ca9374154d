"""DDP trains a model as one process does whichever of its parameters a pass uses."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.world import World
from hpctrain.train.engines.engine import Microbatch
from hpctrain.train.joining_ranks import join_world
from tests.support import lm_training as lmt
from tests.support.gloo import launch

pytestmark = pytest.mark.quick

ALONE = World(0, 0, 1, torch.device("cpu"))
BATCH, PASSES, RANKS = 6, 2, 3
USED = {
    "all": [[0, 1, 2]] * BATCH,
    "none of the second": [[0, 2]] * BATCH,
    "the second on one rank": [[0], [0], [0, 1], [0], [0], [0]],
    "all but on one rank": [[0, 2], [0, 2], *[[0, 1, 2]] * 4],
    "the third in first passes": [[0, 2], [0], [0], [0], [0], [0]],
    "the first in no last pass": [[0], [1], [0], [1], [0], [1]],
    "all again": [[2, 1, 0]] * BATCH,
}
"""Of each step and sample: which layers it goes through. Each rank has two samples, and a pass
has one of them."""


class Choosing(nn.Module):
    """Its input says which layers are used; one may never be, one be in an output alone."""

    def __init__(self, *, spare):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        if spare:
            self.never = nn.Parameter(torch.ones(3))
        self.aside = nn.Linear(4, 2) if spare else nn.Identity()

    def forward(self, x):
        values, chosen = x
        for layer in chosen:
            values = torch.tanh(self.layers[layer](values))
        return values, self.aside(values)


def batch_of(engine, used):
    samples = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(6))
    all_samples = [Microbatch((x, used[at]), at) for at, x in enumerate(samples)]
    count = BATCH // engine.data_ranks
    return all_samples[engine.data_rank * count :][:count]


def share(outputs, target):
    return (outputs[0] * (target + 1)).square().sum() / BATCH


def trained(world, *, twice=False, spare=True, **settings):
    """Losses and norms, which parameters had a gradient in each step, weights and moments."""
    engine = lmt.engine_of(world, Choosing(spare=spare), kind="ddp", **settings)
    seen = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(with_gradient(engine)))
    numbers = []
    for used in USED.values():
        times = range(2 if twice else 1)
        numbers += [engine.forward_backward(batch_of(engine, used), share) for _ in times]
        numbers.append(engine.step())
    return numbers, seen, lmt.arrays(engine.state().shared)


def with_gradient(engine):
    named = engine.model.named_parameters()
    return [name.removeprefix("module.") for name, p in named if p.grad is not None]


def both(world=None):
    world = world or join_world()
    return [
        trained(world),
        trained(world, spare=False),
        trained(world, twice=True),
        trained(world, precision="bf16"),
    ]


@functools.cache
def alone():
    return both(ALONE)


def test_what_a_pass_does_not_use_gets_what_one_process_gives_it():
    for rank in launch(both, RANKS):
        for (numbers, seen, state), (expected, its_seen, its_state), near in zip(
            rank, alone(), (1e-5, 1e-5, 1e-5, 2e-2), strict=True
        ):
            assert numbers == pytest.approx(expected, rel=near)
            assert seen == its_seen
            assert state.keys() == its_state.keys()
            for name, value in its_state.items():
                assert state[name] == pytest.approx(value, abs=near), name
    assert {len(names) for names in alone()[0][1]} == {4, 6}


def memory_of_gradients():
    """Bytes that gradients keep and that they need, of three steps; and what DDP does besides."""
    engine = lmt.engine_of(join_world(), lmt.lm(), kind="ddp")
    memory = []
    for step in range(3):
        engine.forward_backward(lmt.microbatches(engine, step), lmt.share)
        gradients = [parameter.grad for parameter in engine.model.parameters()]
        storages = [gradient.untyped_storage() for gradient in gradients]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        memory.append((sum(held.values()), sum(gradient.nbytes for gradient in gradients)))
        engine.step()
    return memory, engine.model.find_unused_parameters, len(held) < len(gradients)


def test_gradients_lie_in_the_buckets_that_travel_and_the_graph_is_not_searched():
    for memory, searches, together in launch(memory_of_gradients, 2):
        assert not searches
        assert together
        assert len(memory) == 3
        for held, needed in memory:
            assert needed <= held < 1.1 * needed


def buckets():
    """Which parameters each bucket has, in the order in which they travel, by a hook of torch's."""
    world = join_world()
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(12)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    engine = lmt.engine_of(world, model, kind="ddp")
    seen = []

    def noting(_, bucket):
        seen.append([names[id(parameter)] for parameter in bucket.parameters()])
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    engine.model.register_comm_hook(None, noting)
    steps = []
    for _ in range(3):
        seen.clear()
        engine.forward_backward([Microbatch(torch.ones(1, 300), 0)], lambda out, _: out.sum())
        engine.step()
        steps.append(list(seen))
    return steps


def test_buckets_are_the_same_from_the_first_step_on_and_the_last_parameters_travel_first():
    for steps in launch(buckets, 2):
        assert steps[0] == steps[1] == steps[2]
        assert len(steps[0]) > 1
        assert [name for bucket in steps[0] for name in bucket] == [
            f"{number}.weight" for number in reversed(range(12))
        ]


def test_torch_alone_fills_them_anew():
    """So the test above can see it."""
    assert launch(of_torch, 2) == [True, True]


def of_torch():
    join_world()
    model = DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return model._has_rebuilt_buckets
