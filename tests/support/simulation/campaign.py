"""Random jobs by their seeds: what a job is made of, and what is done to it.

A failure is played again by its seed:

    .venv/bin/python -m tests.support.simulation.campaign staying SEED
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.node.agent.in_place import RoundSize
from hpctrain.node.hangs.standing import HangLimits
from tests.support.memory import folder_in_memory
from tests.support.simulation.checks import Overlap
from tests.support.simulation.contract import wrong_with
from tests.support.simulation.generations import RecordedJob
from tests.support.simulation.job import KILL_WAIT_S, Job, Setup
from tests.support.simulation.kernel import EPOCH_S, Stuck
from tests.support.simulation.ranks import Program

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

FIXED = 20_261_127
"""The first of the seeds that are tried each time."""
BOUND_S = 1300.0
SEED = "HPCTRAIN_SIMULATION_SEED"
"""The environment's word for a campaign's further seeds: CI gives the commit."""


class Broken(AssertionError):
    """A simulated job has broken its contract."""


def seeds(count: int, fixed: int | None = None) -> list[int]:
    """Those of a campaign: the same ones each time, and as many others as the environment's say.

    Args:
        count: In all.
        fixed: So many of them are the same each time; half by itself.
    """
    own = os.environ.get(SEED, "")
    same = count if not own else count // 2 if fixed is None else fixed
    others = int.from_bytes(hashlib.sha256(own.encode()).digest()[:6])
    return [*range(FIXED, FIXED + same), *range(others, others + count - same)]


def play(name: str, seed: int) -> Job:
    """One job of a campaign.

    Raises:
        Broken: what is wrong with it, and how to play it again.
    """
    with folder_in_memory() if name in RECORDED else nullcontext(NO_FOLDER) as folder:
        job = RECORDED[name](seed, folder) if name in RECORDED else CAMPAIGNS[name](seed)
        return _play(job, name, seed)


def _play(job: Job, name: str, seed: int) -> Job:
    overlap = Overlap(job)
    wrong: list[str] = []
    try:
        job.run(BOUND_S)
    except Stuck as stuck:
        wrong = [str(stuck)]
    except Exception as error:  # noqa: BLE001 - told with the seed
        wrong = [f"{type(error).__name__}: {error}"]
    wrong = wrong or wrong_with(job, overlap)
    if wrong:
        lines = "\n  ".join(wrong)
        again = f".venv/bin/python -m {__spec__.name} {name} {seed}"
        tail = "\n".join(job.simulation.trace[-40:])
        raise Broken(f"{lines}\nplay it again: {again}\n{tail}")
    return job


LOSSES = ["power", "dies", "freezes", "cut"]


def _job(seed: int, *, stays: bool | None, nodes: int | None = None) -> Job:
    """A job of random make."""
    rng = Job(seed, Setup()).simulation.random
    job = Job(seed, _setup(rng, stays=stays, nodes=nodes), _program(rng))
    for node in job.nodes:
        node.machine.slowness_s = job.simulation.random.choice([0.0, 0.0, 0.05, 0.3])
    return job


def _setup(rng: random.Random, *, stays: bool | None, nodes: int | None) -> Setup:
    nodes = nodes or rng.randint(2, 6)
    most = rng.randint(1, nodes)
    least = rng.randint(1, most)
    has_size = rng.random() < 0.5 if stays is None else stays
    return Setup(
        nodes=nodes,
        ranks=rng.choice([1, 1, 2]),
        size=RoundSize(most, least) if has_size else None,
        lease_s=rng.choice([1.0, 2.0, 10.0]),
        restarts=rng.choice([0, 1, 3]),
        listens=rng.random() < 0.8,
        come_s=rng.choice([0.1, 3.0]),
    )


def _program(rng: random.Random) -> Program:
    return Program(
        steps=rng.choice([2, 8, 16]),
        step_s=rng.choice([0.1, 0.5]),
        start_s=rng.choice([0.2, 3.0]),
        peers_raise=rng.random() < 0.7,
    )


def _hurt(job: Job, kinds: Sequence[str], *, most: int = 4, first: int = 1) -> None:
    """Something happens to nodes, from `first` on; ranks of node 0 may die, too."""
    rng = job.simulation.random
    for _ in range(rng.randint(0, most)):
        kind = rng.choice(kinds)
        node = rng.randrange(0 if kind in {"rank", "raises"} else first, job.setup.nodes)
        node = 0 if kind == "store" else node  # which alone has one
        for_s = rng.choice([0.5, job.setup.lease_s * rng.uniform(0.5, 3.0), 30.0])
        at_s = rng.expovariate(1 / 4.0)
        job.simulation.after(at_s, partial(job.fault, kind, node, for_s=for_s))


def staying(seed: int) -> Job:
    """A job that outlives its nodes, whose first node lives."""
    job = _job(seed, stays=True)
    job.saves_copies = job.simulation.random.random() < 0.3
    _hurt(job, [*LOSSES, "rank", "raises", "control", "controls_end", "liveness", "store"])
    return job


def together(seed: int) -> Job:
    """A job in which every node has to come, and one that is lost ends it."""
    job = _job(seed, stays=False)
    job.program.peers_raise = True
    _hurt(job, ["power", "dies", "rank", "raises", "rank", "controls_end"], most=3)
    job.simulation.after(800.0, partial(job.fault, "over", 0))  # where nobody is told of a death
    return job


def headless(seed: int) -> Job:
    """The first node is lost, or seems to be."""
    job = _job(seed, stays=True)
    rng = job.simulation.random
    kind = rng.choice(["power", "dies", "freezes", "cut", "liveness"])
    for_s = rng.choice([0.5, job.setup.lease_s * rng.uniform(0.5, 3.0), 30.0])
    job.simulation.after(rng.expovariate(1 / 4.0), partial(job.fault, kind, 0, for_s=for_s))
    _hurt(job, ["power", "dies", "freezes", "rank", "liveness"], most=2)
    return job


def hanging(seed: int) -> Job:
    """Ranks hang, or only seem to."""
    job = _job(seed, stays=None)
    rng = job.simulation.random
    limit_s = rng.choice([2.0, 5.0])
    job.setup.limits = HangLimits(
        limit_s,
        first_step_s=60.0,
        ends_round=rng.random() < 0.8,
        watches=rng.random() < 0.95,
        desync=rng.choice(["off", "tell", "restart"]),
    )
    job.program.steps = 60
    for node in job.nodes:
        node.lacks_board = rng.random() < 0.03
    _hurt(job, ["hangs", "computes", "stopped", "rank"], most=2, first=0)
    if rng.random() < 0.3:
        job.simulation.after(rng.expovariate(1 / 5.0), partial(job.ask_for_stacks, "a"))
        job.simulation.after(rng.expovariate(1 / 15.0), partial(job.ask_for_stacks, "b"))
    job.simulation.after(400.0, partial(job.fault, "over", 0))  # the scheduler's time limit
    return job


def out_of_step(seed: int) -> Job:
    """A rank leaves out a collective, for ever."""
    job = _job(seed, stays=None)
    rng = job.simulation.random
    desync = rng.choice(["off", "tell", "restart"])
    job.setup.limits = HangLimits(60.0, desync=desync, watches=rng.random() < 0.5)
    job.program.steps, job.program.step_s = 80, 0.5
    if rng.random() < 0.8:
        members = job.setup.size.most if job.setup.size else job.setup.nodes
        job.odd_counts[rng.randrange(members * job.setup.ranks)] = rng.randint(10, 40)
    return job


def stopped(seed: int) -> Job:
    """The scheduler, or a user, asks for a stop."""
    job = _job(seed, stays=None)
    rng = job.simulation.random
    job.program.steps = rng.choice([20, 2000])
    job.program.save_s = rng.choice([0.1, 5.0])
    job.program.heeds_stop = rng.random() < 0.8
    at_s = rng.uniform(0.0, 15.0)
    job.reads_s = rng.choice([0.0, 0.0, 5.0])
    how = rng.choice(["preempted", "grace", "limit", "cancelled", "user", "silent", "both"])
    job.simulation.after(at_s, partial(stop, job, how))
    _hurt(job, ["rank", "raises"], most=1)
    return job


def stop(job: Job, how: str) -> None:
    """The scheduler stops a job, as SLURM does."""
    facts, end_s = job.scheduler, KILL_WAIT_S
    if how == "user":
        job.is_stop_asked = True
        job.signalled.append((job.simulation.now_s, how))
        job.simulation.after(120.0, partial(job.fault, "over", 0))
        return
    if how == "silent":
        job.is_scheduler_silent = True
    if how in {"preempted", "silent"}:
        job.scheduler = replace(facts, state="COMPLETING", restarts=1)
    if how in {"grace", "both"}:
        end_s = 40.0
        at_s = EPOCH_S + job.simulation.now_s
        job.scheduler = replace(facts, preempt_time=at_s, end_time=at_s + end_s)
    if how == "cancelled":
        job.scheduler = replace(facts, state="COMPLETING")
    if how == "limit":
        job.scheduler = replace(facts, state="COMPLETING", reason="TimeLimit")
    job.stop_how = how
    if how == "both":
        job.signal(signal.SIGUSR2)
        job.simulation.after(10.0, partial(job.signal, signal.SIGTERM))
    else:
        job.signal(signal.SIGTERM)
    job.simulation.after(end_s + 1.0, partial(job.fault, "over", 0))


def lingering(seed: int) -> Job:
    """Ranks stay behind when others have returned."""
    job = _job(seed, stays=None)
    rng = job.simulation.random
    job.setup.end_wait_s = rng.choice([4.0, 20.0])
    job.program.works_s = rng.choice([3.0, 30.0])
    job.program.steps = 3
    members = job.setup.size.most if job.setup.size else job.setup.nodes
    ranks = members * job.setup.ranks
    for rank in rng.sample(range(ranks), rng.randint(0, ranks)):
        job.program.lingers[rank] = rng.choice(["stays", "hangs", "works"])
    job.simulation.after(400.0, partial(job.fault, "over", 0))  # where all hang
    return job


def changing(seed: int) -> Job:
    """Nodes that guards have named are left out."""
    job = _job(seed, stays=True)
    rng = job.simulation.random
    job.program.steps, job.program.step_s = rng.choice([20, 100]), 0.5
    _hurt(job, ["rank", "rank", "dies", "raises"], most=3)
    if rng.random() < 0.6:
        name = f"n{rng.randrange(job.setup.nodes + 1)}"
        job.simulation.after(rng.uniform(0.0, 10.0), partial(job.name_bad, name))
    return job


CAMPAIGNS: dict[str, Callable[[int], Job]] = {
    made.__name__: made
    for made in (
        staying,
        together,
        headless,
        hanging,
        out_of_step,
        stopped,
        lingering,
        changing,
    )
}


def _recorded(seed: int, folder: Path) -> RecordedJob:
    rng = Job(seed, Setup()).simulation.random
    job = RecordedJob(seed, _setup(rng, stays=True, nodes=None), folder, _program(rng))
    for node in job.nodes:
        node.machine.slowness_s = job.simulation.random.choice([0.0, 0.0, 0.05, 0.3])
    return job


def recording(seed: int, folder: Path) -> RecordedJob:
    """Nodes are lost and ranks die, and the first node lives; real records are written."""
    job = _recorded(seed, folder)
    rng = job.simulation.random
    _hurt(job, ["power", "dies", "freezes", "cut", "rank", "rank", "raises", "liveness"])
    if rng.random() < 0.4:
        job.program.steps = 2000
        how = rng.choice(["preempted", "grace", "limit", "cancelled", "silent", "both"])
        job.simulation.after(rng.uniform(0.0, 15.0), partial(stop, job, how))
    job.simulation.after(1200.0, partial(job.fault, "over", 0))
    return job


def succeeding(seed: int, folder: Path) -> RecordedJob:
    """The first node is lost, with others before, meanwhile or after; real records are written."""
    job = _recorded(seed, folder)
    rng = job.simulation.random
    job.program.steps = rng.choice([8, 40])
    kinds = ["power", "dies", "freezes", "cut", "liveness"]
    for_s = rng.choice([0.5, job.setup.lease_s * rng.uniform(0.5, 3.0), 30.0, 60.0])
    at_s = rng.expovariate(1 / 4.0)
    job.simulation.after(at_s, partial(job.fault, rng.choice(kinds), 0, for_s=for_s))
    for _ in range(rng.choice([0, 0, 1, 2])):
        for_s = rng.choice([0.5, job.setup.lease_s * rng.uniform(0.5, 3.0), 30.0, 60.0])
        later_s = at_s + rng.choice([0.0, 1.0, 10.0, 25.0]) * rng.random()
        node = rng.randrange(1, job.setup.nodes)
        kind = rng.choice([*kinds, "rank", "raises"])
        job.simulation.after(later_s, partial(job.fault, kind, node, for_s=for_s))
    job.simulation.after(1200.0, partial(job.fault, "over", 0))
    return job


RECORDED: dict[str, Callable[[int, Path], RecordedJob]] = {
    made.__name__: made for made in (recording, succeeding)
}
NO_FOLDER = Path(os.devnull)


def main(name: str, *numbers: str) -> None:
    """Play seeds again, and show what happens."""
    for number in numbers:
        job = play(name, int(number))
        print("\n".join(job.simulation.trace))
        print(f"{name} {number}: nothing is wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
