"""When a run will be done, by its queue waits, restarts and preemptions so far. Pure."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base.text import duration, step_time
from hpctrain.ledger.history.attempts import allocations_of
from hpctrain.ledger.shapes.choose import RunFacts, done_in, run_facts, step_at
from hpctrain.ledger.shapes.queue import DAY_S, JobShape, QueueWait, expected_wait, own_wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.core.base.records import JobInfo
    from hpctrain.ledger.history.run_history import RunHistory

ENDLESS_S = 10 * 365 * 86400
"""Stands for the limit of a job that has none."""


@dataclass(frozen=True)
class Finish:
    """When a run will be done, in seconds since the epoch; None where that is not known.

    Attributes:
        low: In 10 % of all cases it is done before.
        median: In half of them.
        high: In 90 %.
        assumes: What that rests on, in words.
        not_known: Why nothing is known; "" where something is.
    """

    low: float | None = None
    median: float | None = None
    high: float | None = None
    assumes: tuple[str, ...] = ()
    not_known: str = ""

    def text(self, now: float) -> str:
        """`done about Thu 14:00 (between Wed 22:00 and Sat 09:00)`."""
        if self.low is None or self.median is None or self.high is None:
            return f"when it will be done is not known: {self.not_known}"
        low, middle, high = (moment(t, now) for t in (self.low, self.median, self.high))
        return f"done about {middle} (between {low} and {high})"


def moment(t: float, now: float) -> str:
    """A local time to the minute: `14:05` today, `Thu 14:05` this week, else with its date."""
    here, today = time.localtime(t), time.localtime(now)
    if here[:3] == today[:3]:
        return time.strftime("%H:%M", here)
    if abs(t - now) < 6 * DAY_S:
        return time.strftime("%a %H:%M", here)
    return time.strftime("%Y-%m-%d", here)


def finish(
    history: RunHistory,
    job: JobInfo | None,
    *,
    running: bool,
    now: float,
    total_steps: int | None = None,
) -> Finish:
    """Return when a run that waits or runs will be done."""
    facts = run_facts(history, now=now, total_steps=total_steps)
    if facts.remaining_steps is None:
        return Finish(not_known="its program does not report how many steps there will be")
    if not facts.points:
        return Finish(not_known="no step of it was timed so far")
    shape = _job_shape(history, job)
    if shape is None:
        return Finish(not_known="the time limit of its jobs is not known")
    started = (one for one in allocations_of(history, now=now) if one.started)
    later = own_wait([one.queued_s for one in started if one.queued_s is not None])
    left_s = (job.end_time or math.inf) - now if running and job else None
    first = None if running else _first_wait(job, shape, later, now)
    if running and left_s is None:
        return Finish(not_known="the scheduler gave no answer about its job")
    ends = done_in(facts, shape, left_s=left_s, first=first, later=later)
    if ends is None:
        return Finish(not_known="it takes another start, and how long that waits is not known")
    low, median, high = (now + seconds for seconds in ends)
    return Finish(low, median, high, tuple(_assumes(facts, shape, first, later)))


def _job_shape(history: RunHistory, job: JobInfo | None) -> JobShape | None:
    """The shape of the run's job: as it was chosen, else as its newest start had it."""
    chosen = [fact for _, fact in history.shapes if not fact.failed]
    newest = history.newest
    begun = newest.begun if newest is not None else None
    nodes = len(newest.nodes) - len(newest.spares) if newest is not None else 0
    if chosen and chosen[-1].nodes and chosen[-1].limit_s:
        return JobShape(chosen[-1].nodes, round(chosen[-1].limit_s))
    if job is None or begun is None or nodes < 1:
        return None
    if not job.end_time:
        return JobShape(nodes, ENDLESS_S)
    if job.end_time <= begun:
        return None
    return JobShape(nodes, round(job.end_time - begun))


def _first_wait(
    job: JobInfo | None, shape: JobShape, later: QueueWait | None, now: float
) -> QueueWait | None:
    """The rest of a job's wait: by the scheduler's plan, else as earlier ones were."""
    if job is not None and job.start_time is not None and job.start_time > now:
        return expected_wait(shape, job.start_time - now)
    return later


def _assumes(
    facts: RunFacts, shape: JobShape, first: QueueWait | None, later: QueueWait | None
) -> Sequence[str]:
    step = step_at(facts.points, shape.nodes)
    waits = dict.fromkeys(wait for wait in (first, later) if wait is not None)
    return [
        *([f"{step_time(step.seconds)} a step ({step.source})"] if step else []),
        "no time limit" if shape.limit_s == ENDLESS_S else f"jobs of {shape.text}",
        *(f"waits of about {duration(wait.median_s)} ({wait.source})" for wait in waits),
        f"{duration(facts.restart_s)} a start ({facts.restart_source})",
        f"preemptions and failures as so far ({facts.ended_early})",
    ]
