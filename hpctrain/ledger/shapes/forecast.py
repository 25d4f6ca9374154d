"""When a run will be done with jobs of a shape, what that costs, and how sure that is.

Expected finish = wait + remaining steps x step time at that size + what each restart costs. Where
the remaining steps or their time are not known, there is no finish. Shapes are then compared by
`speed`: the work done per second of waiting and running, as long as the run goes on.

Pure. tests/unit/shapes/test_forecast.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.core.base.text import percent
from hpctrain.ledger.shapes.candidates import MOST_RESTART_SHARE
from hpctrain.ledger.shapes.waits import SOON_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.shapes.candidates import JobShape
    from hpctrain.ledger.shapes.waits import QueueWait

DOUBLING = 1.8
"""Speed on twice as many nodes, where only one size was measured: an assumption."""
SCALED = f"assumed {DOUBLING} times as fast on twice the nodes"
MEASURED_SIGMA = 0.05
"""Spread of a measured step time from job to job: other nodes, other neighbours."""
DOUBLING_SIGMA = 0.15
"""What each doubling away from the nearest measured size adds to the spread."""
UNMEASURED_RESTART_S = 180.0
"""Of a start, from the allocation to the first step, and of the save at the end, before the run has
shown its own: imports from a shared disk and a restore of some GB. An assumption."""
REQUEUE_S = 121.0
"""SLURM's default time before a requeued job may start again."""
MOST_SPARE = 0.25
"""Part of the expected time that the limit of a job for all the work has to spare, at most. Where
the step time is hardly known, a second short job costs less than a wait for a very long one."""
TOGETHER = 0.5
"""Correlation between two waits of one run: a full queue stays full for a while."""
Z_80 = 1.2816
"""An 80 % interval of a normal distribution ends so many standard deviations from its middle."""


@dataclass(frozen=True)
class StepPoint:
    """A step time that somebody knows.

    Attributes:
        nodes: Where it was measured, or for how many it was calculated.
        seconds: Of one step with the whole global batch.
        source: Where it comes from, e.g. "attempt 3 of this run".
        sigma: Relative spread.
    """

    nodes: int
    seconds: float
    source: str
    sigma: float = MEASURED_SIGMA


def step_at(points: Sequence[StepPoint], nodes: int) -> StepPoint | None:
    """Return the step time on so many nodes; None without any point.

    Args:
        points: Known step times of one global batch, the most trusted first. Of several at one
            size the first counts.
        nodes: The size asked about.
    """
    by_size: dict[int, StepPoint] = {}
    for point in points:
        by_size.setdefault(point.nodes, point)
    if nodes in by_size:
        return by_size[nodes]
    if not by_size:
        return None
    near = min(by_size.values(), key=lambda point: abs(math.log2(nodes / point.nodes)))
    others = [point for point in by_size.values() if point.nodes != near.nodes]
    exponent, how = math.log2(DOUBLING), SCALED
    if others:
        second = min(others, key=lambda point: abs(math.log2(nodes / point.nodes)))
        slope = math.log(second.seconds / near.seconds) / math.log(near.nodes / second.nodes)
        exponent = min(1.0, max(0.0, slope))
        how = "scaled as between {} and {} nodes".format(*sorted((near.nodes, second.nodes)))
    apart = abs(math.log2(nodes / near.nodes))
    return StepPoint(
        nodes,
        near.seconds * (near.nodes / nodes) ** exponent,
        f"{near.source} on {near.nodes}, {how}",
        near.sigma + DOUBLING_SIGMA * apart,
    )


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before its next job.

    Attributes:
        points: Its step times, the most trusted first; see `step_at`.
        remaining_steps: None where nobody knows how many there will be.
        restart_s: What each start of a job costs, its last save with it.
        restart_source: Where that comes from.
        preemptions_per_hour: Of running, as seen so far.
        lost_s: Work lost at each of them.
        ended_early: How many there were, with failures.
        requeue_s: Time before a requeued job may start.
        spent_node_hours: What the run has used so far.
    """

    points: Sequence[StepPoint] = ()
    remaining_steps: int | None = None
    restart_s: float = UNMEASURED_RESTART_S
    restart_source: str = f"assumed {UNMEASURED_RESTART_S:.0f} s"
    preemptions_per_hour: float = 0.0
    lost_s: float = 0.0
    ended_early: int = 0
    requeue_s: float = REQUEUE_S
    spent_node_hours: float = 0.0

    def work_s(self, nodes: int) -> float | None:
        """Seconds of steps that remain on so many nodes; None where that is not known."""
        step = step_at(self.points, nodes)
        if step is None or self.remaining_steps is None:
            return None
        return self.remaining_steps * step.seconds

    def whole_s(self, nodes: int) -> float | None:
        """Seconds of one job that does all of them; None where that is not known."""
        work = self.work_s(nodes)
        if work is None:
            return None
        step = step_at(self.points, nodes)
        spare = min(MOST_SPARE, 2 * (step.sigma if step else 0.0))
        return work * (1 + spare) + self.restart_s


@dataclass(frozen=True)
class ShapeForecast:
    """What is to be expected of jobs of one shape. Seconds count from now.

    Attributes:
        shape: Theirs.
        start_s: Median wait for the first of them; None where nobody knows.
        wait_source: Where that comes from.
        speed: Work per second of waiting and running, relative to one node that never waits.
        cost: Node-seconds per unit of work, relative to one node that never restarts.
        restart_share: Part of each job that its restart takes.
        step_source: Where the step time comes from.
        refused: Why it is not to be chosen; "" where it may be.
        too_dear: Whether that is the user's ceiling on node-hours.
        jobs: How many starts it takes; None where the remaining work is not known.
        node_hours: Of all its jobs; None where not known.
        mean_s: Until the run is done, as compared with other shapes; None where not known.
        low_s: The same, below which 10 % of all cases lie.
        median_s: The same for half of them.
        high_s: The same for 90 %.
    """

    shape: JobShape
    start_s: float | None
    wait_source: str
    speed: float
    cost: float
    restart_share: float
    step_source: str
    refused: str = ""
    too_dear: bool = False
    jobs: float | None = None
    node_hours: float | None = None
    mean_s: float | None = None
    low_s: float | None = None
    median_s: float | None = None
    high_s: float | None = None


def forecast(
    shape: JobShape, facts: RunFacts, wait: QueueWait | None, later: QueueWait | None = None
) -> ShapeForecast:
    """Return what is to be expected of jobs of this shape.

    Args:
        shape: Theirs.
        facts: Of the run.
        wait: For the first job; None where nobody knows, and the shape is refused.
        later: For each job after it; as the first where None.
    """
    share = facts.restart_s / shape.limit_s
    useful = max(1.0, shape.limit_s - facts.restart_s)
    step, pace = step_at(facts.points, shape.nodes), _pace(facts.points, shape.nodes)
    again = later or wait
    first_s = wait.mean_s if wait is not None else 0.0
    later_s = facts.requeue_s + (again.mean_s if again is not None else 0.0)
    bare = ShapeForecast(
        shape,
        start_s=wait.median_s if wait else None,
        wait_source=wait.source if wait else "not known",
        speed=pace * useful / (shape.limit_s + (first_s + later_s) / 2),
        cost=shape.nodes * shape.limit_s / (pace * useful),
        restart_share=share,
        step_source=step.source if step else f"not known, {SCALED}",
        refused=_refusal(share, wait),
    )
    work = facts.work_s(shape.nodes)
    if work is None or step is None:
        return bare
    jobs = max(1, math.ceil(work / useful - 1e-9))
    running = work + jobs * facts.restart_s
    preempted = facts.preemptions_per_hour * running / 3600
    running += preempted * (facts.restart_s + facts.lost_s)
    starts = jobs + preempted
    costed = replace(bare, jobs=starts, node_hours=shape.nodes * running / 3600)
    if wait is None or again is None:
        return costed
    waiting = first_s + (starts - 1) * later_s
    low, median, high = _spread(waiting, _variance([(wait, 1.0), (again, starts - 1)]))
    early, late = _off(work, step.sigma)
    return replace(
        costed,
        mean_s=running + waiting,
        low_s=running + median - math.hypot(early, median - low),
        median_s=running + median,
        high_s=running + median + math.hypot(late, high - median),
    )


def done_in(
    facts: RunFacts,
    shape: JobShape,
    *,
    left_s: float | None,
    first: QueueWait | None,
    later: QueueWait | None,
) -> tuple[float, float, float] | None:
    """Return in how many seconds a run will be done, as 10 %, 50 % and 90 % of all cases have it.

    None where the work is not known, or it takes a start whose wait is not.

    Args:
        facts: Of the run.
        shape: Of the job that it has, and of those after it.
        left_s: Seconds until the running job ends; None where it waits.
        first: For its start; None for a running job.
        later: For each start after that.
    """
    work, step = facts.work_s(shape.nodes), step_at(facts.points, shape.nodes)
    if work is None or step is None:
        return None
    useful = max(1.0, shape.limit_s - facts.restart_s)
    in_job = 0.0 if left_s is None else max(0.0, left_s)
    starts = float(math.ceil(max(0.0, work - in_job) / useful - 1e-9))
    running = work + starts * facts.restart_s
    preempted = facts.preemptions_per_hour * running / 3600
    running += preempted * (facts.restart_s + facts.lost_s)
    waits: list[tuple[QueueWait, float]] = []
    again = starts + preempted
    if left_s is None:
        if first is None:
            return None
        again = max(0.0, again - 1)
        waits.append((first, 1.0))
    if again > 0 and later is None:
        return None
    if later is not None:
        waits.append((later, again))
    waiting = sum(times * wait.mean_s for wait, times in waits) + again * facts.requeue_s
    low, median, high = _spread(waiting, _variance(waits))
    early, late = _off(work, step.sigma)
    return (
        running + median - math.hypot(early, median - low),
        running + median,
        running + median + math.hypot(late, high - median),
    )


def _off(seconds: float, sigma: float) -> tuple[float, float]:
    """How far below and above so many seconds 80 % of all cases end; sigma is of the logarithm."""
    return seconds * -math.expm1(-Z_80 * sigma), seconds * math.expm1(Z_80 * sigma)


def _spread(mean: float, variance: float) -> tuple[float, float, float]:
    """10 %, 50 % and 90 % of the log-normal with this mean and variance."""
    if mean <= 0:
        return 0.0, 0.0, 0.0
    sigma = math.sqrt(math.log1p(variance / mean**2))
    median = mean / math.exp(sigma**2 / 2)
    return median * math.exp(-Z_80 * sigma), median, median * math.exp(Z_80 * sigma)


def _pace(points: Sequence[StepPoint], nodes: int) -> float:
    """Speed relative to one node: as measured, else as assumed."""
    step, single = step_at(points, nodes), step_at(points, 1)
    if step is None or single is None:
        return float(nodes ** math.log2(DOUBLING))
    return single.seconds / step.seconds


def _variance(waits: Sequence[tuple[QueueWait, float]]) -> float:
    """Of the sum of so many waits each, which are correlated."""
    parts = []
    for wait, times in waits:
        parts.append(((wait.mean_s + SOON_S) * math.sqrt(math.expm1(wait.sigma**2)), times))
    alone = sum(times * sd**2 for sd, times in parts)
    together = sum(times * sd for sd, times in parts) ** 2
    return (1 - TOGETHER) * alone + TOGETHER * together


def _refusal(share: float, wait: QueueWait | None) -> str:
    if share > MOST_RESTART_SHARE:
        most = percent(MOST_RESTART_SHARE)
        return f"its restart would take {percent(share)} of each job (at most {most})"
    return "" if wait is not None else "its wait is not known"
