"""When the run waited, and when it held nodes: the starts of its jobs on one line of time.

Pure. The scheduler's own times count where accounting told them, else those of the processes that
ran. Clocks differ from node to node, and an old job may die slowly beside its successor: here
everything is put in order, so that no moment counts twice. tests/unit/test_goodput.py holds the
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

    from hpctrain.base.records import JobStart
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
        state: What accounting says of it; "" where it says nothing.
        asked: When the wait began; None where nothing is known of a wait.
        begin: When it got its nodes; where it never did, the end of the wait.
        end: When it lost them; None while it holds them.
        started: Whether it ever got nodes.
        goes_on: Whether no end of it is known, and nothing followed.
    """

    job_id: str
    attempts: tuple[AttemptTimeline, ...] = ()
    nodes: int = 1
    state: str = ""
    asked: float | None = None
    begin: float = math.inf
    end: float | None = None
    started: bool = True
    goes_on: bool = False

    @property
    def queued_s(self) -> float | None:
        """How long it waited, where that is known."""
        return None if self.asked is None else self.begin - self.asked


def stays(
    past: RunTimeline, starts: Sequence[JobStart] = (), *, now: float | None = None
) -> list[Allocation]:
    """All of them in order of time; none begins before the one before it has ended.

    Args:
        past: The run's ledger.
        starts: What accounting knows of the starts of its jobs.
        now: Nothing is later than this; without it, what still waits is left out.
    """
    known = [one for one in starts if one.end is None or math.isfinite(one.end)]
    found = _held(past, known)
    _add_waits(found, past, known, math.inf if now is None else now)
    return list(_in_line(found, past, now))


# What held nodes.


def _held(past: RunTimeline, starts: Sequence[JobStart]) -> list[Allocation]:
    """Every start of a job, at its writers' times; those that only accounting knows among them."""
    rows: dict[str, dict[int, JobStart]] = {}
    for row in starts:
        if row.start is not None and math.isfinite(row.start):
            rows.setdefault(row.job_id, {})[row.index] = row
    groups = _groups(past.attempts)
    found = []
    for position, group in enumerate(groups):
        of_job = rows.get(group[0].job_id, {})
        mine = _row_of(group, of_job)
        if mine is not None:
            del of_job[mine.index]
        may_run = position == len(groups) - 1 and not past.gone
        found.append(_stay(group, mine, may_run=may_run))
    newest_job = _newest_job(past)
    for row in (one for left in rows.values() for one in left.values()):
        bare = _bare(row, goes_on=row.end is None and row.job_id == newest_job)
        if bare.goes_on or (bare.end or 0.0) > bare.begin:
            _insert(found, bare)
    return found


def _groups(attempts: Sequence[AttemptTimeline]) -> list[list[AttemptTimeline]]:
    """The attempts of each start of a job together."""
    groups: list[list[AttemptTimeline]] = []
    for one in attempts:
        last = groups[-1][-1] if groups else None
        same = last is not None and (
            (one.job_id, one.restarts) == (last.job_id, last.restarts)
            if one.started is not None
            else last.next is Next.RESTART  # its beginning is torn
        )
        if same:
            groups[-1].append(one)
        else:
            groups.append([one])
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


def _stay(group: Sequence[AttemptTimeline], row: JobStart | None, *, may_run: bool) -> Allocation:
    """One start of a job; what accounting says of its times counts before everything else."""
    first, last = group[0], group[-1]
    begin = first.begun if first.begun is not None else first.started
    begin = first.first_t if begin is None else begin
    end = max(last.last_t, last.last_t if last.heard is None else last.heard)
    end = end if last.ended_at is None else last.ended_at
    told = row is not None and row.end is not None
    if row is not None:
        begin = begin if row.start is None else row.start
        end = end if row.end is None else row.end
    return Allocation(
        first.job_id,
        tuple(group),
        max(one.nodes for one in group),
        "" if row is None else row.state,
        begin=begin,
        end=end,
        goes_on=may_run and not last.is_over and not told,
    )


def _bare(row: JobStart, *, goes_on: bool) -> Allocation:
    """A start in which no agent came so far that it could say so."""
    nodes = max(1, len([name for name in row.nodes.split(",") if name]))
    begin = row.start or 0.0
    end = begin if row.end is None else row.end
    return Allocation(row.job_id, (), nodes, row.state, begin=begin, end=end, goes_on=goes_on)


def _insert(found: list[Allocation], one: Allocation) -> None:
    """Put it before the first that began later; the ledger's order stays as it is."""
    at = next((i for i, other in enumerate(found) if other.begin > one.begin), len(found))
    found.insert(at, one)


def _newest_job(past: RunTimeline) -> str:
    asked = [one.job_id for one in past.submissions if one.job_id]
    ran = [one.job_id for one in past.attempts if one.job_id]
    return (asked or ran or [""])[-1]


# What waited.


def _add_waits(
    found: list[Allocation], past: RunTimeline, starts: Sequence[JobStart], now: float
) -> None:
    """Waits that no start followed: what still waits, and what was cancelled while it did."""
    pending = {row.job_id: row for row in starts if row.start is None}
    jobs = {one.job_id for one in found}
    newest = past.submissions[-1] if past.submissions else None
    for one in past.submissions:
        if one.refused or (one.job_id and one.job_id in jobs) or _ran_unseen(one, found, past):
            continue
        until = _until(one, pending.get(one.job_id), None)
        if until is None and one is newest:
            until = now
        if until is not None and math.isfinite(until):
            _insert(found, _wait(one.job_id, one.asked, max(one.asked, until)))
    _add_wait_after(found, past, pending, now)


def _ran_unseen(one: Submission, found: Sequence[Allocation], past: RunTimeline) -> bool:
    """Whether its job ran though its number was never written down."""
    if one.job_id:
        return False
    taken = {other.job_id for other in past.submissions if other.job_id}
    return any(stay.job_id not in taken and stay.begin >= one.asked - SLACK_S for stay in found)


def _add_wait_after(
    found: list[Allocation], past: RunTimeline, pending: dict[str, JobStart], now: float
) -> None:
    """The wait of a job that was put back into the queue and has not begun again."""
    last = next((stay for stay in reversed(found) if stay.started), None)
    for stay, following in pairwise([*found, None]):
        if stay is None or not stay.started or not stay.attempts or stay.end is None:
            continue
        row, final = pending.get(stay.job_id), stay.attempts[-1]
        again = following is not None and following.job_id == stay.job_id
        if again or not (final.next in _COMES_AGAIN or row is not None):
            continue
        asked = next((s for s in past.submissions if s.job_id == stay.job_id), None)
        until = _until(asked, row, stay.end)
        if until is None and stay is last and following is None:
            until = now
        if until is not None and math.isfinite(until):
            wait = _wait(stay.job_id, stay.end, max(stay.end, until))
            found.insert(found.index(stay) + 1, wait)


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
    found: Sequence[Allocation], past: RunTimeline, now: float | None
) -> Iterator[Allocation]:
    """Their times in order: none before the end of the one before, none after `now`."""
    latest = math.inf if now is None else now
    cursor, before = -math.inf, None
    for stay, following in pairwise([*found, None]):
        if stay is None:
            continue
        asked = _asked(stay, before, past)
        if asked is not None:
            cursor = min(max(asked, cursor), latest)
            asked = cursor
        # A node's clock may say that the job began before anybody had asked for it.
        begin = min(max(stay.begin, cursor), latest)
        goes_on = stay.goes_on and following is None
        end = max(begin, min(begin if stay.end is None else stay.end, latest))
        if following is not None and following.started and begin < following.begin < end:
            end = following.begin  # the old one dies slowly: its nodes count as the new one's
        line = replace(stay, asked=asked, begin=begin, end=None if goes_on else end)
        yield replace(line, goes_on=goes_on)
        cursor, before = end, stay


def _asked(stay: Allocation, before: Allocation | None, past: RunTimeline) -> float | None:
    """When its wait began."""
    if stay.asked is not None:
        return stay.asked
    if before is not None and before.job_id == stay.job_id:
        return -math.inf  # the moment at which it lost its nodes
    known = [one.asked for one in past.submissions if one.job_id == stay.job_id]
    open_ones = [
        one.asked
        for one in past.submissions
        if not one.job_id and not one.refused and one.asked <= stay.begin + SLACK_S
    ]
    return next(iter(known or open_ones[-1:]), None)
