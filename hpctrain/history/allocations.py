"""The allocations of a run on one line of time: when it waited, and when it held nodes. Pure.

The scheduler's own times count where accounting told them, else those of the processes that ran.
Clocks differ from node to node, and an old job may die slowly beside its successor: here everything
is put in order, so that no moment counts twice. tests/unit/history/test_goodput.py holds the
promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from hpctrain.base.records import Next

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpctrain.base.records import JobStart, JobState
    from hpctrain.history.timeline import AttemptTimeline, RunTimeline, Submission

SLACK_S = 60.0
"""So far may the clocks of a node and of accounting be apart."""
_COMES_AGAIN = frozenset({Next.REQUEUE, Next.LEAVE})


@dataclass(frozen=True)
class Allocation:
    """One start of a job with the wait before it, or a wait that no start followed.

    Attributes:
        job_id: Whose.
        attempts: What ran in it, in order; none where no agent came so far.
        nodes: How many it held.
        state: What accounting says of it; None where it says nothing.
        asked: When the wait began; None where nothing is known of a wait.
        begin: When it got its nodes; where it never did, the end of the wait.
        end: When it lost them; None while it holds them.
        started: Whether it ever got nodes.
        goes_on: Whether no end of it is known, and nothing followed.
    """

    job_id: str
    attempts: tuple[AttemptTimeline, ...] = ()
    nodes: int = 1
    state: JobState | None = None
    asked: float | None = None
    begin: float = math.inf
    end: float | None = None
    started: bool = True
    goes_on: bool = False

    @property
    def queued_s(self) -> float | None:
        """How long it waited, where that is known."""
        return None if self.asked is None else self.begin - self.asked


def allocations_of(
    timeline: RunTimeline, starts: Sequence[JobStart] = (), *, now: float | None = None
) -> list[Allocation]:
    """All of them in order of time; none begins before the one before it has ended.

    Args:
        timeline: The run's ledger.
        starts: What accounting knows of the starts of its jobs.
        now: Nothing is later than this; without it, what still waits is left out.
    """
    usable = [row for row in starts if row.end is None or math.isfinite(row.end)]
    allocations = _held(timeline, usable)
    _add_waits(allocations, timeline, usable, math.inf if now is None else now)
    return list(_in_line(allocations, timeline, now))


# What held nodes.


def _held(timeline: RunTimeline, starts: Sequence[JobStart]) -> list[Allocation]:
    """Every start of a job, at its writers' times; those that only accounting knows among them."""
    rows: dict[str, dict[int, JobStart]] = {}
    for row in starts:
        if row.start is not None and math.isfinite(row.start):
            rows.setdefault(row.job_id, {})[row.index] = row
    groups = _groups(timeline.attempts)
    allocations = []
    for position, group in enumerate(groups):
        of_job = rows.get(group[0].job_id, {})
        row_of_group = _row_of(group, of_job)
        if row_of_group is not None:
            del of_job[row_of_group.index]
        may_run = position == len(groups) - 1 and not timeline.gone
        allocations.append(_allocation(group, row_of_group, may_run=may_run))
    newest_job = _newest_job(timeline)
    for row in (one for left in rows.values() for one in left.values()):
        bare = _bare(row, goes_on=row.end is None and row.job_id == newest_job)
        if bare.goes_on or (bare.end or 0.0) > bare.begin:
            _insert(allocations, bare)
    return allocations


def _groups(attempts: Sequence[AttemptTimeline]) -> list[list[AttemptTimeline]]:
    """The attempts of each start of a job together."""
    groups: list[list[AttemptTimeline]] = []
    for attempt in attempts:
        last = groups[-1][-1] if groups else None
        same = last is not None and (
            (attempt.job_id, attempt.restarts) == (last.job_id, last.restarts)
            if attempt.started is not None
            else last.next is Next.RESTART  # its beginning is torn
        )
        if same:
            groups[-1].append(attempt)
        else:
            groups.append([attempt])
    return groups


def _row_of(group: Sequence[AttemptTimeline], rows: Mapping[int, JobStart]) -> JobStart | None:
    """What accounting says of this start: the row of its number, or the nearest one in time."""
    first = group[0].started or group[0].first_t
    counted = rows.get(group[0].restarts)
    if counted is not None and _fits(counted, first):
        return counted
    # Rows are counted as they come, and a requeue before the job began leaves none.
    near = [row for row in rows.values() if _fits(row, first)]
    return min(near, key=lambda row: abs((row.start or 0.0) - first), default=counted)


def _fits(row: JobStart, t: float) -> bool:
    """Whether something that ran at `t` may have run in this start."""
    return (row.start or 0.0) - SLACK_S <= t <= (row.end or math.inf) + SLACK_S


def _allocation(
    group: Sequence[AttemptTimeline], row: JobStart | None, *, may_run: bool
) -> Allocation:
    """One start of a job; what accounting says of its times counts before everything else."""
    first, last = group[0], group[-1]
    begin = first.begun if first.begun is not None else first.started
    begin = first.first_t if begin is None else begin
    end = max(last.last_t, last.last_t if last.heard is None else last.heard)
    end = end if last.ended_at is None else last.ended_at
    end_is_known = row is not None and row.end is not None
    if row is not None:
        begin = begin if row.start is None else row.start
        end = end if row.end is None else row.end
    return Allocation(
        first.job_id,
        tuple(group),
        max(one.nodes for one in group),
        None if row is None else row.state,
        begin=begin,
        end=end,
        goes_on=may_run and not last.is_over and not end_is_known,
    )


def _bare(row: JobStart, *, goes_on: bool) -> Allocation:
    """A start in which no agent came so far that it could say so."""
    nodes = max(1, len([name for name in row.nodes.split(",") if name]))
    begin = row.start or 0.0
    end = begin if row.end is None else row.end
    return Allocation(row.job_id, (), nodes, row.state, begin=begin, end=end, goes_on=goes_on)


def _insert(allocations: list[Allocation], allocation: Allocation) -> None:
    """Put it before the first that began later; the ledger's order stays as it is."""
    at = next(
        (i for i, other in enumerate(allocations) if other.begin > allocation.begin),
        len(allocations),
    )
    allocations.insert(at, allocation)


def _newest_job(timeline: RunTimeline) -> str:
    asked = [one.job_id for one in timeline.submissions if one.job_id]
    ran = [one.job_id for one in timeline.attempts if one.job_id]
    return (asked or ran or [""])[-1]


# What waited.


def _add_waits(
    allocations: list[Allocation], timeline: RunTimeline, starts: Sequence[JobStart], now: float
) -> None:
    """Waits that no start followed: what still waits, and what was cancelled while it did."""
    pending = {row.job_id: row for row in starts if row.start is None}
    jobs = {allocation.job_id for allocation in allocations}
    newest = timeline.submissions[-1] if timeline.submissions else None
    for submission in timeline.submissions:
        if (
            submission.refused
            or (submission.job_id and submission.job_id in jobs)
            or _ran_unseen(submission, allocations, timeline)
        ):
            continue
        until = _until(submission, pending.get(submission.job_id), None)
        if until is None and submission is newest:
            until = now
        if until is not None and math.isfinite(until):
            _insert(
                allocations,
                _wait(submission.job_id, submission.asked, max(submission.asked, until)),
            )
    _add_wait_after(allocations, timeline, pending, now)


def _ran_unseen(
    submission: Submission, allocations: Sequence[Allocation], timeline: RunTimeline
) -> bool:
    """Whether its job ran though its number was never written down."""
    if submission.job_id:
        return False
    taken = {other.job_id for other in timeline.submissions if other.job_id}
    return any(
        allocation.job_id not in taken and allocation.begin >= submission.asked - SLACK_S
        for allocation in allocations
    )


def _add_wait_after(
    allocations: list[Allocation], timeline: RunTimeline, pending: dict[str, JobStart], now: float
) -> None:
    """The wait of a job that was put back into the queue and has not begun again."""
    last = next((allocation for allocation in reversed(allocations) if allocation.started), None)
    for allocation, following in pairwise([*allocations, None]):
        if (
            allocation is None
            or not allocation.started
            or not allocation.attempts
            or allocation.end is None
        ):
            continue
        row, final = pending.get(allocation.job_id), allocation.attempts[-1]
        again = following is not None and following.job_id == allocation.job_id
        if again or not (final.next in _COMES_AGAIN or row is not None):
            continue
        asked = next((s for s in timeline.submissions if s.job_id == allocation.job_id), None)
        until = _until(asked, row, allocation.end)
        if until is None and allocation is last and following is None:
            until = now
        if until is not None and math.isfinite(until):
            wait = _wait(allocation.job_id, allocation.end, max(allocation.end, until))
            allocations.insert(allocations.index(allocation) + 1, wait)


def _until(asked: Submission | None, row: JobStart | None, after: float | None) -> float | None:
    """When a wait ended that no start followed; None where it goes on, or nobody knows."""
    if row is not None and row.end is not None:
        return row.end
    cancelled = asked.cancelled if asked is not None else None
    return cancelled if cancelled is not None and cancelled >= (after or cancelled) else None


def _wait(job_id: str, asked: float, until: float) -> Allocation:
    return Allocation(job_id, asked=asked, begin=until, end=until, started=False)


# In line.


def _in_line(
    allocations: Sequence[Allocation], timeline: RunTimeline, now: float | None
) -> Iterator[Allocation]:
    """Their times in order: none before the end of the one before, none after `now`."""
    latest = math.inf if now is None else now
    cursor, before = -math.inf, None
    for allocation, following in pairwise([*allocations, None]):
        if allocation is None:
            continue
        asked = _asked(allocation, before, timeline)
        if asked is not None:
            cursor = min(max(asked, cursor), latest)
            asked = cursor
        # A node's clock may say that the job began before anybody had asked for it.
        begin = min(max(allocation.begin, cursor), latest)
        goes_on = allocation.goes_on and following is None
        end = max(begin, min(begin if allocation.end is None else allocation.end, latest))
        if following is not None and following.started and begin < following.begin < end:
            end = following.begin  # the old one dies slowly: its nodes count as the new one's
        line = replace(allocation, asked=asked, begin=begin, end=None if goes_on else end)
        yield replace(line, goes_on=goes_on)
        cursor, before = end, allocation


def _asked(
    allocation: Allocation, before: Allocation | None, timeline: RunTimeline
) -> float | None:
    """When its wait began."""
    if allocation.asked is not None:
        return allocation.asked
    if before is not None and before.job_id == allocation.job_id:
        return -math.inf  # the moment at which it lost its nodes
    moments = [one.asked for one in timeline.submissions if one.job_id == allocation.job_id]
    open_ones = [
        one.asked
        for one in timeline.submissions
        if not one.job_id and not one.refused and one.asked <= allocation.begin + SLACK_S
    ]
    return next(iter(moments or open_ones[-1:]), None)
