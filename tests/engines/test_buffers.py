"""What ranks may hold differently (batch norm's buffers, counts that are tracked): rank 0's counts.

Torch's DDP goes on with rank 0's at the next pass.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain
from hpctrain.train.engines.engine import Microbatch
from hpctrain.train.joining_ranks import join_world
from tests.support import lm_training as lmt
from tests.support import zero
from tests.support.gloo import launch
from tests.support.recipe import full_state, make_run

pytestmark = pytest.mark.quick

RANKS, STEPS = 3, 3
EACH = {"train__steps": STEPS, "checkpoint__interval_steps": 1, "checkpoint__keep_last": STEPS}
NAMES = ("running_mean", "running_var", "num_batches_tracked")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def batch(step, rank, part):
    """Of each rank and pass another one; the last rank's count differs from the others'."""
    made = torch.Generator().manual_seed(100 * step + 10 * rank + part)
    return torch.randn(6, 4, generator=made)


def buffers_of(model):
    return {
        f"model.{name.removeprefix('module.')}": buffer.clone()
        for name, buffer in model.named_buffers()
    }


def by_engine():
    """The buffers of this rank after each step."""
    run = hpctrain.init()
    model = make_model()
    engine = run.parallelize(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    seen = []
    for step in run.steps(total=STEPS):
        parts = [Microbatch(batch(step, run.world.rank, part), None) for part in range(2)]
        engine.forward_backward(parts, lambda out, _: out.square().sum())
        engine.step()
        seen.append(buffers_of(engine.model))
    return seen


class Seen:
    """What a program counts on each rank by itself."""

    def __init__(self, rank):
        self.values = torch.full((3000,), float(rank))

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def by_own_loop():
    """The same in a loop of the program's own, with torch's DDP."""
    run = hpctrain.init()
    run.track(seen=Seen(run.world.rank))
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    seen = []
    for step in run.steps(total=STEPS):
        for part in range(2):
            model(batch(step, run.world.rank, part)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(buffers_of(model))
    return seen


@pytest.mark.parametrize("kind", ["own loop", "ddp", "fsdp2", "zero2"])
def test_a_checkpoint_holds_rank_0s_buffers_and_no_mixture(tmp_path, monkeypatch, kind):
    zero.preload()
    chosen = {} if kind == "own loop" else {"engine__kind": kind}
    run = make_run(tmp_path / "run", **EACH, **chosen)
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
    ranks = launch(by_own_loop if kind == "own loop" else by_engine, RANKS)

    for step in range(1, STEPS + 1):
        saved = full_state(run, step)
        right = ranks[0][step - 1]
        assert {name.rpartition(".")[2] for name in right} == set(NAMES)
        for name, value in right.items():
            assert torch.equal(torch.as_tensor(saved[name]), value), (name, step)
        if kind == "own loop":
            assert not torch.as_tensor(saved["tracked.seen.values"]).any()


def both_ways(twice):
    """Buffers after each step under our DDP and under torch's; and how often ours were sent."""
    world = join_world()
    engine = lmt.engine_of(world, make_model(), kind="ddp")
    others = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    sent = []
    real = engine.model._sync_buffers
    engine.model._sync_buffers = lambda: (sent.append(1), real())
    ours, theirs = [], []
    for step in range(STEPS):
        with torch.no_grad():
            for its, weight in zip(others.parameters(), engine.model.parameters(), strict=True):
                its.copy_(weight)
        parts = [batch(step, world.rank, part) for part in range(2 if twice else 1)]
        engine.forward_backward([Microbatch(x, None) for x in parts], lambda out, _: out.sum())
        engine.step()
        ours.append(buffers_of(engine.model))
        for x in parts[:-1]:
            with others.no_sync():
                others(x).sum().backward()
        others(parts[-1]).sum().backward()
        theirs.append(buffers_of(others))
    return ours, theirs, len(sent)


@pytest.mark.parametrize("twice", [False, True])
def test_under_ddp_all_ranks_end_a_step_with_those_that_torch_would_go_on_with(twice):
    """Ranks have one state between steps. They travel at the end, and not before a pass as well."""
    found = launch(both_ways, RANKS, twice=twice)

    first_of_torch = found[0][1]
    for ours, _, sent in found:
        assert sent == 1 + STEPS  # and before the first pass
        for mine, right in zip(ours, first_of_torch, strict=True):
            assert all(torch.equal(mine[name], value) for name, value in right.items())
    other_of_torch = found[1][1][-1]["model.1.running_mean"]
    assert not other_of_torch.equal(first_of_torch[-1]["model.1.running_mean"])
