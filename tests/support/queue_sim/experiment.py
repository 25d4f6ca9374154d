"""Training runs that come to a simulated queue, each played once with every policy.

Every policy meets the same run at the same moment of the same queue.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.queue_sim.chooser import HABITS, Product, always
from tests.support.queue_sim.controller import Controller, Partition, Settings
from tests.support.queue_sim.training import HOUR_S, Training, train
from tests.support.queue_sim.workload import DAY_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.shapes.choose import Prefer, ShapeForecast
    from hpctrain.ledger.shapes.queue import WaitRecord
    from tests.support.queue_sim.controller import Request
    from tests.support.queue_sim.training import Outcome

NODES, SIZES, MAX_TIME_S = 128, tuple(range(1, 17)), 48 * HOUR_S
DAYS, FIRST_DAY, LAST_DAY = 60, 8, 32
"""The others' jobs come for so many days; runs come between the other two."""
PREFERENCES: tuple[Prefer, ...] = ("time", "balanced", "cost")
OVERHEADS = (0.005, 0.01, 0.02, 0.04)
NOISE = 0.05
KNOWN_NODES = (1, 2, 4, 8)
RESTART_S = 180
"""The product's own assumption. Measured on four nodes with a small model: 9 s
(docs/development/performance.md)."""
EARLIER_RUNS = 20
"""As in the product, waits of so many earlier runs count."""


@dataclass
class Played:
    """One policy's outcomes, in the order of the runs.

    Attributes:
        outcomes: What each run took.
        intervals: For each run, whether it ended before, in or after the 80 % interval that was
            forecast when it was submitted: -1, 0 or 1.
        later: The same for each requeue.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    intervals: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)

    def add(self, other: Played) -> None:
        """Take in another's."""
        self.outcomes += other.outcomes
        self.intervals += other.intervals
        self.later += other.later


def play(
    workload: Sequence[Request],
    runs: int,
    seed: int,
    policies: Sequence[str] = (*HABITS, *PREFERENCES),
    *,
    nodes: int = NODES,
) -> dict[str, Played]:
    """Return what every policy made of so many runs that come to one workload.

    Args:
        workload: The other users' jobs.
        runs: How many training runs come.
        seed: Of their times, sizes and noise, and of the nodes that die.
        policies: Names of `HABITS`, or preferences of the product.
        nodes: Of the cluster.
    """
    rng, queue = random.Random(seed), Controller(_settings(nodes, seed), workload)
    played = {name: Played() for name in policies}
    waits: dict[str, list[list[tuple[float, WaitRecord]]]] = {name: [] for name in policies}
    for at_s in sorted(rng.uniform(FIRST_DAY, LAST_DAY) * DAY_S for _ in range(runs)):
        queue.run(at_s)
        size, overhead = 40 * 5 ** rng.random(), rng.choice(OVERHEADS)
        training = Training(size, overhead, RESTART_S, noise=NOISE, seed=rng.getrandbits(32))
        known_nodes = rng.choice(KNOWN_NODES)
        for name, seen in played.items():
            if name in HABITS:
                seen.outcomes.append(train(queue.fork(), training, always(HABITS[name])))
                continue
            earlier = [w for run in waits[name][-EARLIER_RUNS:] for when, w in run if when < at_s]
            product = _product(name, known_nodes, earlier)
            outcome = train(queue.fork(), training, product)
            waits[name].append(_records(product, outcome))
            seen.outcomes.append(outcome)
            end_s = at_s + outcome.result_s
            first, *later = [_place(end_s - now_s, row) for now_s, row in product.forecasts]
            seen.intervals.append(first)
            seen.later += later
    return played


def _settings(nodes: int, seed: int) -> Settings:
    return Settings(
        nodes,
        (Partition(max_time_s=10 * DAY_S),),  # of recorded jobs; a run's are at most MAX_TIME_S
        bf_window_s=MAX_TIME_S,
        failures_per_node_day=0.002,
        seed=seed,
    )


def _product(name: str, known_nodes: int, earlier: Sequence[WaitRecord]) -> Product:
    prefer = next(one for one in PREFERENCES if one == name)
    return Product(prefer, SIZES, MAX_TIME_S, known_nodes, earlier)


def _records(product: Product, outcome: Outcome) -> list[tuple[float, WaitRecord]]:
    records = product.waits(outcome.parts)
    starts = [part.started_s for part in outcome.parts]
    return list(zip(starts, records, strict=True))


def _place(took_s: float, row: ShapeForecast) -> int:
    if row.low_s is None or row.high_s is None:
        raise ValueError(f"{row.shape.text}: no finish was forecast")
    return -1 if took_s < row.low_s else 1 if took_s > row.high_s else 0
