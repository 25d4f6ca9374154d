"""The product's choice of shapes (`hpctrain.shapes`) in the simulated queue, and fixed habits.

What the product reads from SLURM, it is given from the simulation: for each candidate the earlier
of backfill's plan and `sbatch --test-only`. What it reads from ledgers, it is given from this run's
jobs and the user's earlier ones: step times with their noise, and waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.shapes.candidates import JobShape, enumerate_shapes
from hpctrain.shapes.choose import Wish, choose_shape
from hpctrain.shapes.forecast import RunFacts, StepPoint
from hpctrain.shapes.waits import WaitRecord
from tests.support.queue_sim.training import HOUR_S, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.shapes.choose import Prefer
    from hpctrain.shapes.forecast import ShapeForecast
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
        shapes = enumerate_shapes(
            self.sizes,
            lambda _nodes: round(self.max_time_s),
            restart_s=facts.restart_s,
            whole_s=facts.whole_s,
            also=[had] if had else [],
        )
        estimates = {shape: estimate(situation, shape) for shape in shapes}
        choice = choose_shape(
            shapes,
            facts,
            estimates,
            records=[*self.records, *self.waits(parts)],
            wish=Wish(self.prefer),
            now_has=had,
        )
        if choice.row is None:
            raise RuntimeError(choice.why[0])
        self.forecasts.append((situation.controller.now_s, choice.row))
        self.estimates.append(estimates[choice.row.shape])
        return Shape(choice.row.shape.nodes, choice.row.shape.limit_s)

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


def estimate(situation: Situation, shape: JobShape) -> float:
    """Return how long a job would wait: the earlier of backfill's plan and `--test-only`."""
    queue = situation.controller
    planned_s = queue.planned_start(shape.nodes, shape.limit_s)
    said_s = queue.start_estimate(shape.nodes, shape.limit_s)
    return max(0.0, min(planned_s, said_s) - queue.now_s)
