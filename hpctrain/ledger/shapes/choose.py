"""When jobs of a shape finish a run, what that costs, and which shape the next job takes.

Expected finish = wait + remaining steps x step time at that size + what each restart costs. If the
remaining steps or their time are not known, shapes are compared by `speed`: the work done per
second of waiting and running.

`prefer` "time" takes the shape that finishes first. "balanced" takes the first to finish of those
that cost little more than the middle of the range, "cost" of those that cost hardly more than the
cheapest. A shape that the run has already is kept unless another one is clearly better.

Pure: what is read is handed in. tests/unit/shapes/test_forecast.py, test_evidence.py and
test_choose.py hold the promises.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.core.base.records import EndReason
from hpctrain.core.base.text import count, duration, percent
from hpctrain.ledger.history.attempts import allocations_of
from hpctrain.ledger.history.goodput import TimeClass, goodput
from hpctrain.ledger.history.progress import progress
from hpctrain.ledger.shapes.queue import (
    DAY_S,
    MOST_RESTART_SHARE,
    SOON_S,
    JobShape,
    QueueWait,
    WaitRecord,
    between,
    expected_wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord

    Measure = Callable[["ShapeForecast"], tuple[float, float]]

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

    `points` are of one global batch, the most trusted first. Of several at one size the first
    counts.
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
        too_expensive: Whether that is the user's ceiling on node-hours.
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
    too_expensive: bool = False
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

    `wait` is for the first job; None where nobody knows, and the shape is refused. `later` is for
    each job after it; as the first where None.
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
    running, preempted = _running(facts, work, jobs)
    starts = jobs + preempted
    costed = replace(bare, jobs=starts, node_hours=shape.nodes * running / 3600)
    if wait is None or again is None:
        return costed
    waiting = first_s + (starts - 1) * later_s
    waits = [(wait, 1.0), (again, starts - 1)]
    low, median, high = _done(running, waiting, waits, _off(work, step.sigma))
    return replace(costed, mean_s=running + waiting, low_s=low, median_s=median, high_s=high)


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
    running, preempted = _running(facts, work, starts)
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
    return _done(running, waiting, waits, _off(work, step.sigma))


def _running(facts: RunFacts, work_s: float, starts: float) -> tuple[float, float]:
    """Seconds of running for so much work, and how many preemptions come on top of the starts."""
    running = work_s + starts * facts.restart_s
    preempted = facts.preemptions_per_hour * running / 3600
    return running + preempted * (facts.restart_s + facts.lost_s), preempted


def _done(
    running: float,
    waiting: float,
    waits: Sequence[tuple[QueueWait, float]],
    off: tuple[float, float],
) -> tuple[float, float, float]:
    """Seconds until the end: 10 %, 50 % and 90 %; `off` is how far the work itself may be off."""
    low, median, high = _spread(waiting, _variance(waits))
    early, late = off
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


RESTART = (TimeClass.STARTUP, TimeClass.RESTORE, TimeClass.WARM_UP, TimeClass.TEARDOWN)
"""Classes of time that each start of a job costs."""
LEAST_STEPS = 5
"""Fewer steps of an attempt say nothing about its pace: the first ones are slow."""
UNSEEN_HOURS = 2.0
"""Hours without a preemption that are added to those seen: one in the first minutes of a run does
not mean one in all minutes."""
ENDED_EARLY = frozenset(
    {EndReason.PREEMPTED, EndReason.REQUEUED, EndReason.NODE_FAILED, EndReason.CRASHED}
)


def step_points(history: RunHistory, source: str) -> list[StepPoint]:
    """Return the step time of each attempt that trained for a while, the newest first.

    `source` is how its run is named, e.g. "this run".
    """
    points = (_pace_of(attempt, source) for attempt in reversed(history.attempts))
    return [point for point in points if point is not None]


def _pace_of(attempt: AttemptRecord, source: str) -> StepPoint | None:
    nodes = len(attempt.nodes) - len(attempt.spares)
    timed = [(m.fact.seconds, m.steps) for m in attempt.marks if m.fact.seconds and m.steps]
    steps = sum(number for _, number in timed)
    if nodes < 1 or steps < LEAST_STEPS:
        return None
    seconds = sum(took for took, _ in timed) / steps
    spread = statistics.pstdev([took / number for took, number in timed]) / seconds
    # Of the mean; how jobs differ from each other is not in it, so it is never less than that.
    sigma = max(MEASURED_SIGMA, min(1.0, spread / math.sqrt(len(timed))))
    return StepPoint(nodes, seconds, f"attempt {attempt.number} of {source}", sigma)


def run_facts(
    history: RunHistory,
    *,
    now: float,
    total_steps: int | None = None,
    step: int | None = None,
    earlier: Sequence[tuple[str, RunHistory]] = (),
) -> RunFacts:
    """Return what is known of a run before its next job.

    Args:
        history: The run's; empty for a new one.
        now: Seconds since the epoch.
        total_steps: How many steps there will be, where its ledger does not say.
        step: The last step that is done, where somebody knows more than its ledger.
        earlier: Names and histories of runs of the same program and settings, the newest first.
    """
    points = step_points(history, "this run")
    for name, other in earlier:
        points += step_points(other, name)
    done = progress(history)
    total = done.total if done.total is not None else total_steps
    remaining = None if total is None else max(0, total - max(done.step or 0, step or 0))
    bare = RunFacts(points=tuple(points), remaining_steps=remaining)
    facts = _with_restarts(bare, "this run", history, now)
    for name, other in earlier:
        if facts is bare:
            like = _with_restarts(bare, name, other, now)
            # What that run has used is not this one's, nor need its preemptions be.
            if like is not bare:
                facts = replace(
                    like, preemptions_per_hour=0.0, lost_s=0.0, ended_early=0, spent_node_hours=0.0
                )
    return facts


def _with_restarts(bare: RunFacts, name: str, history: RunHistory, now: float) -> RunFacts:
    """With what starts of a run's jobs cost; `bare` itself where none has come to train."""
    trained = [attempt for attempt in history.attempts if attempt.first_step is not None]
    starts = {(attempt.ran_in, attempt.restarts) for attempt in trained}
    if not starts:
        return bare
    spent = goodput(history, now=now)
    hours = sum(s for kind, s in spent.seconds.items() if kind is not TimeClass.QUEUE) / 3600
    early = sum(attempt.reason in ENDED_EARLY for attempt in history.attempts)
    return replace(
        bare,
        restart_s=sum(spent.seconds[kind] for kind in RESTART) / len(starts),
        restart_source=f"measured over {count(len(starts), 'start')} of {name}",
        ended_early=early,
        preemptions_per_hour=early / (hours + UNSEEN_HOURS),
        lost_s=spent.seconds[TimeClass.REDONE] / early if early else 0.0,
        spent_node_hours=spent.allocated_s / 3600,
    )


def waits_of(history: RunHistory) -> list[WaitRecord]:
    """Return the waits of a run's jobs whose shapes were chosen, oldest first."""
    records = []
    for allocation in allocations_of(history):
        chosen = [f for t, f in history.shapes if t <= allocation.begin and not f.failed]
        waited = allocation.queued_s
        if not allocation.started or waited is None or not chosen:
            continue
        fact = chosen[-1]
        if fact.nodes and fact.limit_s:
            shape = JobShape(fact.nodes, round(fact.limit_s))
            records.append(WaitRecord(shape, fact.partition, waited, fact.estimate_s))
    return records


Prefer = Literal["time", "cost", "balanced"]
COST_EXTRA = 0.05
"""Node-hours above the cheapest shape's that `cost` pays for an earlier finish: restarts take a few
percent of short jobs, and longer ones wait for days (benchmarks/time_to_result.py)."""
BALANCED_EXTRA = 0.10
"""Node-hours above those of the middle of the range that `balanced` pays for an earlier finish. Of
the cheapest size's it would be too few: one node is the cheapest, and takes weeks."""
CLEARLY = 0.10
"""A run leaves its shape for one that is better by this part at least, so that nothing flaps."""


@dataclass(frozen=True)
class ShapeChoice:
    """The shape of the next job, with all that were looked at.

    Attributes:
        row: The chosen one; None where every candidate is refused.
        why: Two lines.
        kept: Whether it is the shape that the run had before.
    """

    row: ShapeForecast | None
    rows: tuple[ShapeForecast, ...]
    why: tuple[str, str]
    kept: bool = False

    def as_json(self) -> dict[str, Any]:
        """For `--json` and for the ledger."""
        return {
            "chosen": asdict(self.row.shape) if self.row else None,
            "why": list(self.why),
            "kept": self.kept,
            "candidates": [asdict(row.shape) | _numbers(row) for row in self.rows],
        }


def _numbers(row: ShapeForecast) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "shape"}


def choose_shape(
    shapes: Sequence[JobShape],
    facts: RunFacts,
    estimates: Mapping[JobShape, float | None],
    *,
    refused: Mapping[JobShape, str] | None = None,
    records: Sequence[WaitRecord] = (),
    partition: str = "",
    longest_s: float = DAY_S,
    prefer: Prefer = "time",
    most_node_hours: float | None = None,
    now_has: JobShape | None = None,
) -> ShapeChoice:
    """Forecast every candidate and choose one.

    Args:
        shapes: The candidates.
        facts: Of the run.
        estimates: SLURM's estimated wait in seconds of each; None or missing where it gave none.
        refused: Why the scheduler would not take a shape; "" or missing where it would.
        records: Waits of own jobs, oldest first.
        partition: Where the job goes.
        longest_s: The longest time limit there.
        prefer: What counts.
        most_node_hours: What the whole run may take, what it has used so far included; None for
            no limit.
        now_has: The shape of the run's last job; None before the first.
    """
    waits = {s: expected_wait(s, estimates.get(s), records, partition, longest_s) for s in shapes}
    usual = _usual(list(waits.values()))
    rows = [
        _within(forecast(shape, facts, wait, _later(wait, usual)), facts, most_node_hours)
        for shape, wait in waits.items()
    ]
    rows = [replace(row, refused=(refused or {}).get(row.shape) or row.refused) for row in rows]
    return decide(rows, prefer, now_has=now_has)


def decide(
    rows: Sequence[ShapeForecast], prefer: Prefer = "time", *, now_has: JobShape | None = None
) -> ShapeChoice:
    """Choose among candidates that are forecast already."""
    open_rows = [row for row in rows if not row.refused]
    if not open_rows:
        reasons = "; ".join(dict.fromkeys(row.refused for row in rows)) or "there is none"
        return ShapeChoice(None, tuple(rows), (f"no shape can be chosen: {reasons}", ""))
    by_finish = all(row.mean_s is not None for row in open_rows)
    measure = _by_finish if by_finish else _by_work
    best = _best(open_rows, prefer, measure)
    kept = next((row for row in open_rows if row.shape == now_has), None)
    stays = kept is not None and not _is_clearly_better(best, kept, prefer, measure)
    row = kept if stays and kept is not None else best
    return ShapeChoice(row, tuple(rows), _why(row, rows, prefer, by_finish=by_finish), kept=stays)


def _usual(waits: Sequence[QueueWait | None]) -> QueueWait | None:
    """The wait of the middle candidate: what a later job may meet when today's hole is gone."""
    given = sorted((wait for wait in waits if wait is not None), key=lambda wait: wait.median_s)
    return given[len(given) // 2] if given else None


def _later(wait: QueueWait | None, usual: QueueWait | None) -> QueueWait | None:
    """The wait of a later job: the geometric mean of this shape's now and what is usual."""
    return wait if wait is None or usual is None else between(wait, usual)


def _within(row: ShapeForecast, facts: RunFacts, most: float | None) -> ShapeForecast:
    """Refuse what would cost more than the user allows."""
    if most is None or row.node_hours is None or row.refused:
        return row
    total = facts.spent_node_hours + row.node_hours
    if total <= most:
        return row
    why = f"it would take {total:.1f} node-hours (at most {most:g})"
    return replace(row, refused=why, too_expensive=True)


def _by_finish(row: ShapeForecast) -> tuple[float, float]:
    """Seconds until the run is done, and node-hours; of both less is better."""
    return row.mean_s or 0.0, row.node_hours or 0.0


def _by_work(row: ShapeForecast) -> tuple[float, float]:
    """The same for a unit of work, where nobody knows how much there is."""
    return 1 / row.speed, row.cost


def _best(rows: Sequence[ShapeForecast], prefer: Prefer, measure: Measure) -> ShapeForecast:
    def cost(row: ShapeForecast) -> float:
        return measure(row)[1]

    most = {
        "time": math.inf,
        "balanced": min(map(cost, _middle(rows))) * (1 + BALANCED_EXTRA),
        "cost": min(map(cost, rows)) * (1 + COST_EXTRA),
    }[prefer]
    return min((row for row in rows if cost(row) <= most), key=measure)


def _middle(rows: Sequence[ShapeForecast]) -> list[ShapeForecast]:
    sizes = {row.shape.nodes for row in rows}
    middle = math.sqrt(min(sizes) * max(sizes))
    size = min(sizes, key=lambda nodes: (abs(math.log(nodes / middle)), nodes))
    return [row for row in rows if row.shape.nodes == size]


def _is_clearly_better(
    best: ShapeForecast, kept: ShapeForecast, prefer: Prefer, measure: Measure
) -> bool:
    both = zip(measure(best), measure(kept), strict=True)
    time, cost = (now <= (1 - CLEARLY) * before for now, before in both)
    return time or (cost and prefer != "time")


def _why(
    row: ShapeForecast, rows: Sequence[ShapeForecast], prefer: Prefer, *, by_finish: bool
) -> tuple[str, str]:
    """Why this one, in two lines: the comparison, and what it rests on."""
    more = percent(BALANCED_EXTRA)
    reason = {
        "time": "finishes first" if by_finish else "does most work per hour of waiting and running",
        "cost": f"finishes first within {percent(COST_EXTRA)} of the fewest node-hours",
        "balanced": f"finishes first within {more} of the middle size's node-hours",
    }[prefer]
    refused = sum(bool(one.refused) for one in rows)
    among = f"{reason} of {count(len(rows), 'candidate')}"
    among += f" ({refused} refused)" if refused else ""
    wait = "not known when" if row.start_s is None else f"in about {duration(row.start_s)}"
    basis = f"starts {wait} ({row.wait_source}); step time: {row.step_source}"
    return f"{row.shape.text}: {among}", basis
