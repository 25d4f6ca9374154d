"""What a run's ledger, and those of earlier runs, say for the choice of its next job's shape.

Step times by number of nodes, what a restart costs, how often the run was preempted, and how long
its jobs waited. Pure: what is read is handed in. tests/unit/shapes/test_evidence.py holds the
promises.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.core.base.records import EndReason
from hpctrain.core.base.text import count
from hpctrain.ledger.history.attempts import allocations_of
from hpctrain.ledger.history.goodput import TimeClass, goodput
from hpctrain.ledger.history.progress import progress
from hpctrain.ledger.shapes.candidates import JobShape
from hpctrain.ledger.shapes.forecast import MEASURED_SIGMA, RunFacts, StepPoint
from hpctrain.ledger.shapes.waits import WaitRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord

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

    Args:
        history: A run's.
        source: How its run is named, e.g. "this run".
    """
    points = (_pace(attempt, source) for attempt in reversed(history.attempts))
    return [point for point in points if point is not None]


def _pace(attempt: AttemptRecord, source: str) -> StepPoint | None:
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
