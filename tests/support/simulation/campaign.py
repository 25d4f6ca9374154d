"""Random jobs by their seeds: what a job is made of, and what is done to it.

A failure is played again by its seed:

    .venv/bin/python -m tests.support.simulation.campaign rounds SEED
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING

from hpctrain.agent.members import RoundSize
from tests.support.simulation.checks import Overlap, wrong_with
from tests.support.simulation.job import Job, Setup
from tests.support.simulation.kernel import Stuck
from tests.support.simulation.ranks import Program

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

FIXED = 20_261_127
"""The first of the seeds that are tried each time."""
BOUND_S = 900.0
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
    job, bound_s = CAMPAIGNS[name](seed)
    overlap = Overlap(job)
    wrong: list[str] = []
    try:
        job.run(bound_s)
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


def _setup(rng: random.Random, *, stays: bool) -> Setup:
    nodes = rng.randint(2, 6)
    most = rng.randint(1, nodes)
    least = rng.randint(1, most)
    return Setup(
        nodes=nodes,
        ranks=rng.choice([1, 1, 2]),
        size=RoundSize(most, least) if stays else None,
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


def _faults(job: Job, rng: random.Random, kinds: list[str], most: int) -> None:
    for _ in range(rng.randint(0, most)):
        kind, node = rng.choice(kinds), rng.randrange(job.setup.nodes)
        if kind == "agent":
            kind = "dies"
        for_s = rng.choice([0.5, job.setup.lease_s * rng.uniform(0.5, 3.0), 30.0])
        at_s = rng.expovariate(1 / 4.0)
        job.simulation.after(at_s, lambda k=kind, n=node, s=for_s: job.fault(k, n, for_s=s))


def staying(seed: int) -> tuple[Job, float]:
    """A job that outlives its nodes, whose first node lives."""
    job = Job(seed, Setup())
    rng = job.simulation.random
    job = Job(seed, _setup(rng, stays=True), _program(rng))
    rng = job.simulation.random
    for node in job.nodes:
        node.machine.slowness_s = rng.choice([0.0, 0.0, 0.05, 0.3])
    kinds = ["power", "dies", "freezes", "cut", "rank", "raises"]
    _faults_of_others(job, rng, kinds)
    return job, BOUND_S


def _faults_of_others(job: Job, rng: random.Random, kinds: list[str]) -> None:
    for _ in range(rng.randint(0, 4)):
        kind = rng.choice(kinds)
        first = 0 if kind in {"rank", "raises"} else 1
        node = rng.randrange(first, job.setup.nodes)
        for_s = rng.choice([0.5, job.setup.lease_s * rng.uniform(0.5, 3.0), 30.0])
        at_s = rng.expovariate(1 / 4.0)
        job.simulation.after(at_s, lambda k=kind, n=node, s=for_s: job.fault(k, n, for_s=s))


CAMPAIGNS: dict[str, Callable[[int], tuple[Job, float]]] = {"staying": staying}


def main(name: str, *numbers: str) -> None:
    """Play seeds again, and show what happens."""
    for number in numbers:
        job = play(name, int(number))
        print("\n".join(job.simulation.trace))  # noqa: T201 - what was asked for
        print(f"{name} {number}: nothing is wrong")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
