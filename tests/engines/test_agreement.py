"""All ranks stop at the same step, whoever heard of it first: by gloo groups, and by leases."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.support.gloo import launch

STEPS = 400
TREES = pytest.mark.parametrize("tree", [0, 1, 2], ids=["gloo", "a node", "two nodes"])


def _rounds(count: int, signum: int, step_s: float, seed: int = 7) -> list[int]:
    """`count` times one rank is signalled at a random moment; the steps at which this one stops."""
    from hpctrain.train.joining_ranks import join_world
    from hpctrain.train.runtime.agreement import STOP_TERM, StopRequest, agreement_of
    from hpctrain.train.runtime.stops import RankSignals

    rank_signals = RankSignals()
    rank_signals.start()
    world = join_world()
    rng = random.Random(world.rank)
    plan = random.Random(seed)
    stopped = []
    for _ in range(count):
        agreement = agreement_of(world)
        rank_signals.term = rank_signals.warned = False
        victim, at = plan.randrange(world.world_size), plan.randrange(3, 9)
        for step in range(1000):
            if world.rank == victim and step == at:
                os.kill(os.getpid(), signum)
            time.sleep(rng.random() * step_s)
            heard = rank_signals.term or rank_signals.warned
            if agreement.tick(StopRequest(STOP_TERM if heard else 0)).cause is not None:
                stopped.append(step)
                break
    return stopped


@pytest.mark.parametrize("step_s", [0.002, 0.12], ids=["behind the steps", "at once"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_one_signalled_rank_stops_all_at_the_same_step(step_s, signum):
    count = 50 if step_s < 0.01 else 5

    ranks = launch(_rounds, 4, count=count, signum=signum, step_s=step_s)

    assert len(ranks[0]) == count
    assert all(steps == ranks[0] for steps in ranks)
    assert all(step >= 3 for step in ranks[0])


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("step_s", [0.002, 0.12], ids=["short steps", "long ones"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_one_signalled_rank_stops_all_ranks_of_all_nodes_at_the_same_step(step_s, signum, nodes):
    """By a lease a rank stops once: each round has ranks of its own."""
    for seed in range(3):
        ranks = launch(
            _rounds, 4, tree=nodes, count=1, signum=signum, step_s=step_s, seed=seed + signum
        )

        assert all(steps == ranks[0] for steps in ranks)
        assert all(step >= 3 for step in ranks[0])


def _saves(save_from: int) -> list[int]:
    from hpctrain.train.joining_ranks import join_world
    from hpctrain.train.runtime.agreement import StopRequest, agreement_of

    world = join_world()
    agreement = agreement_of(world)
    saved = []
    for step in range(STEPS):
        time.sleep(0.001 * (world.rank + 1))
        if agreement.tick(StopRequest(0, world.rank == 0 and step >= save_from)).save:
            saved.append(step)
    return saved


@TREES
def test_a_save_that_rank_0_finds_due_is_done_by_all_at_the_same_step(tree):
    ranks = launch(_saves, 4, tree=tree, save_from=10)

    assert ranks[0]
    assert all(saved == ranks[0] for saved in ranks)
    assert min(ranks[0]) >= 10


def _wishes(name: str) -> list[int]:
    """The ticks at which all agreed, where rank 0 wishes until then and never again."""
    from hpctrain.train.joining_ranks import join_world
    from hpctrain.train.runtime.agreement import StopRequest, agreement_of

    world = join_world()
    agreement = agreement_of(world)
    agreed: list[int] = []
    for step in range(STEPS):
        time.sleep(0.001)
        wishes = world.rank == 0 and step >= 10 and not agreed
        if getattr(agreement.tick(StopRequest(**{name: wishes})), name):
            agreed.append(step)
    return agreed


@TREES
@pytest.mark.parametrize("name", ["save", "tell", "profile"])
def test_what_was_agreed_is_done_once_although_short_steps_exchange_behind_them(name, tree):
    ranks = launch(_wishes, 2, tree=tree, name=name)

    assert len(ranks[0]) == 1
    assert ranks[0] == ranks[1]
