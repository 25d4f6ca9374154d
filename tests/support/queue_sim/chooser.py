"""The product's choice of shapes (`hpctrain.shapes`) in the simulated queue, and fixed habits.

What the product reads from SLURM, it is given from the simulation: for each candidate the earlier
of backfill's plan and `sbatch --test-only`. What it reads from ledgers, it is given from this run's
jobs and the user's earlier ones: step times with their noise, and waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.launch.shape import MOST_HOLES
from hpctrain.ledger.shapes.choose import RunFacts, StepPoint, choose_shape
from hpctrain.ledger.shapes.queue import MOST_RESTART_SHARE, JobShape, WaitRecord, enumerate_shapes
from tests.support.queue_sim.training import HOUR_S, REQUEUE_S, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.ledger.shapes.choose import Prefer, ShapeForecast
    from tests.support.queue_sim.controller import Controller
    from tests.support.queue_sim.profile import Profile
    from tests.support.queue_sim.training import Part, Situation

STEPS_PER_NODE_HOUR = 1000
HABITS = {
    "1 day x 4 nodes": Shape(4, 24 * HOUR_S),
    "2 days x 16 nodes": Shape(16, 48 * HOUR_S),
    "4 h x 2 nodes": Shape(2, 4 * HOUR_S),
}
"""What users type and never change; the second is the longest and largest that is allowed."""


def always(shape: Shape) -> Callable[[Situation], Shape]:
    """Return a chooser that has one answer."""
    return lambda _situation: shape


@dataclass
class Product:
    """The product's choice, with all that it forecast.

    Attributes:
        prefer: The user's.
        sizes: The numbers of nodes that the run can train on.
        max_time_s: The partition's.
        known_nodes: On so many an earlier run measured its steps.
        records: Waits of the user's earlier jobs, oldest first.
        forecasts: The chosen row of each choice, and when it was made.
    """

    prefer: Prefer
    sizes: Sequence[int]
    max_time_s: float
    known_nodes: int = 4
    records: Sequence[WaitRecord] = ()
    forecasts: list[tuple[float, ShapeForecast]] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)

    def __call__(self, situation: Situation) -> Shape:
        """Choose the next job's shape.

        Raises:
            RuntimeError: The product refuses every candidate.
        """
        facts = self.facts(situation)
        parts = situation.parts
        had = JobShape(parts[-1].shape.nodes, round(parts[-1].shape.limit_s)) if parts else None
        plan = situation.controller.plan()
        holes = self.holes(plan, situation.controller.now_s)
        least_s = facts.restart_s / MOST_RESTART_SHARE
        shapes = enumerate_shapes(
            self.sizes,
            lambda _nodes: round(self.max_time_s),
            restart_s=facts.restart_s,
            whole_s=facts.whole_s,
            also=([had] if had else []) + [s for s in holes if s.limit_s >= least_s][:MOST_HOLES],
        )
        estimates = {shape: estimate(situation.controller, plan, shape) for shape in shapes}
        choice = choose_shape(
            shapes,
            facts,
            estimates,
            records=[*self.records, *self.waits(parts)],
            longest_s=self.max_time_s,
            prefer=self.prefer,
            now_has=had,
        )
        if choice.row is None:
            raise RuntimeError(choice.why[0])
        self.forecasts.append((situation.controller.now_s, choice.row))
        self.estimates.append(estimates[choice.row.shape])
        return Shape(choice.row.shape.nodes, choice.row.shape.limit_s)

    def holes(self, plan: Profile, now_s: float) -> list[JobShape]:
        """The largest shapes that fit into what is free now, the longest first."""
        shapes: dict[int, JobShape] = {}
        for free, until_s in plan.holes():
            size = max((nodes for nodes in self.sizes if nodes <= free), default=0)
            if size and until_s < math.inf:
                limit_s = int(min(until_s - now_s - REQUEUE_S, self.max_time_s) // 60 * 60)
                shapes.setdefault(size, JobShape(size, limit_s))
        return [shape for shape in shapes.values() if shape.limit_s > 0]

    def facts(self, situation: Situation) -> RunFacts:
        """What ledgers say: this run's own step times first, then an earlier run's."""
        training = situation.training
        points = [
            StepPoint(part.shape.nodes, part.step_s / STEPS_PER_NODE_HOUR, "this run")
            for part in reversed(situation.parts)
        ]
        earlier_s = HOUR_S / training.speed(self.known_nodes) / STEPS_PER_NODE_HOUR
        points.append(StepPoint(self.known_nodes, earlier_s, "an earlier run"))
        remaining = max(1, round(situation.remaining_node_hours * STEPS_PER_NODE_HOUR))
        return RunFacts(tuple(points), remaining, training.restart_s)

    def waits(self, parts: Sequence[Part]) -> list[WaitRecord]:
        """What a run's jobs waited, with what had been estimated for them."""
        return [
            WaitRecord(JobShape(part.shape.nodes, round(part.shape.limit_s)), "", part.wait_s, said)
            for part, said in zip(parts, self.estimates, strict=False)
        ]


def estimate(queue: Controller, plan: Profile, shape: JobShape) -> float:
    """Return how long a job would wait: the earlier of backfill's plan and `--test-only`."""
    planned_s = plan.earliest(shape.nodes, shape.limit_s)
    said_s = queue.start_estimate(shape.nodes, shape.limit_s)
    return max(0.0, min(planned_s, said_s) - queue.now_s)
