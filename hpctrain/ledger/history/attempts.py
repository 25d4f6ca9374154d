"""Return the attempts of a run, and its allocations on one time line. Pure.

Clocks differ between nodes; `allocations_of` sorts the times so that no second counts twice.
tests/unit/history/test_attempts.py and test_goodput.py hold the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.records import EndReason, Next
from hpctrain.ledger.history.run_records import AttemptRecord
from hpctrain.ledger.history.run_state import cause_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpctrain.core.base.records import JobStart, JobState, Skipped
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import Failure, Submission
    from hpctrain.ledger.history.run_state import EndCause
    from hpctrain.ledger.run.event_types import (
        HangFound,
        HangSuspected,
        RanksAwaited,
        StragglerFound,
    )


@dataclass(frozen=True)
class AttemptView:
    """One attempt, as far as the ledger knows it; fields without a line are as in `AttemptRecord`.

    Attributes:
        ended: Seconds since the epoch; for one that died without a word, when it was last heard
            of.
        reason: None while it runs.
        first_step: The step it restored, 0 for none; None if it never came so far.
        last_step: The last step it is known to have done.
        steps_lost: Steps it did that had to be done again; None while it runs or where unknown.
        cause: What ended it, as a person would say it; None while it runs.
        allocated: When its allocation began, by the scheduler where it told; also for a restart
            inside it.
        queued_s: How long its job waited before; None for a restart inside the allocation, and
            where unknown.
        ready_s: From the beginning of its allocation (of itself, for a restart inside one) to
            the end of its first step; None where it never came so far.
        heard: When it was last heard of.
        released: When the scheduler took its nodes back, as far as known; None while they are
            held.
    """

    number: int
    job_id: str = ""
    nodes: tuple[str, ...] = ()
    world_size: int = 0
    by: str = ""
    started: float = 0.0
    ended: float | None = None
    reason: EndReason | None = None
    next: Next | None = None
    detail: str = ""
    stop_cause: str | None = None
    from_checkpoint: str | None = None
    read_from: str = ""
    first_step: int | None = None
    last_step: int | None = None
    last_saved_step: int | None = None
    steps_lost: int | None = None
    skipped: tuple[Skipped, ...] = ()
    failure: Failure | None = None
    cause: EndCause | None = None
    allocated: float | None = None
    queued_s: float | None = None
    ready_s: float | None = None
    heard: float | None = None
    released: float | None = None
    awaited: RanksAwaited | None = None
    restart_pause_s: float | None = None
    hang: HangSuspected | HangFound | None = None
    straggler: StragglerFound | None = None


_OF_RECORD = sorted(
    {f.name for f in fields(AttemptRecord)} & {f.name for f in fields(AttemptView)}
    - {"started", "first_step", "heard"}
)  # fmt: skip
"""What a view has from its record as it is."""


def attempts(
    history: RunHistory, starts: Sequence[JobStart] = (), *, gone: bool = False
) -> list[AttemptView]:
    """Every attempt in order, with what it cost; `starts` and `gone` are as of `allocations_of`."""
    records = sorted(history.attempts, key=lambda attempt: attempt.number)
    held = allocations_of(history, starts, gone=gone)
    where = {attempt.number: allocation for allocation in held for attempt in allocation.attempts}
    lost = _losses(records)
    return [
        _view(record, where.get(record.number), steps_lost, is_newest=record is records[-1])
        for record, steps_lost in zip(records, lost, strict=True)
    ]


def committed_steps(records: Sequence[AttemptRecord]) -> list[int | None]:
    """The newest step that was committed by the end of each attempt; None where nobody knows."""
    committed: list[int | None] = []
    newest: int | None = 0
    has_saved = False
    for record in records:
        saved, first = record.last_saved_step, record.restored_step
        has_saved = has_saved or saved is not None
        if record.own_loop and not has_saved:
            newest = None
        else:
            newest = saved if saved is not None else first if first is not None else newest
        committed.append(newest)
    return committed


def _losses(records: Sequence[AttemptRecord]) -> list[int | None]:
    """The steps that each attempt did in vain; 0 where it came to its end.

    The last step it did, less what the next attempt restored; less the newest checkpoint where no
    attempt came so far, or where a person went back on purpose. Where a program saves for itself
    and has told of no checkpoint, only the next attempt shows what it kept.
    """
    committed = committed_steps(records)
    lost: list[int | None] = []
    restored: int | None = None
    is_reported = True
    for record, kept in zip(reversed(records), reversed(committed), strict=True):
        is_over = record.ended is not None or record is not records[-1]
        went_on_from = restored if restored is not None and not record.went_back else kept
        last = record.last_step
        if record.reason is EndReason.COMPLETED and (restored is None or record.went_back):
            went_on_from = last  # its steps count, also where nobody tells of a checkpoint
        is_known = is_over and last is not None and went_on_from is not None and is_reported
        lost.append(max(0, (last or 0) - (went_on_from or 0)) if is_known else None)
        restored = restored if record.restored_step is None else record.restored_step
        # A sealed checkpoint may be of a step that nobody has told.
        is_reported = record.restored_step is not None or record.resumed is None
    return lost[::-1]


def _view(
    record: AttemptRecord, allocation: Allocation | None, lost: int | None, *, is_newest: bool
) -> AttemptView:
    """The view, with when its nodes were asked for, came and went, and what ended it."""
    of_record: dict[str, Any] = {name: getattr(record, name) for name in _OF_RECORD}
    if record.ended is None and not is_newest:
        of_record["ended"] = record.last_t
    view = AttemptView(
        **of_record, started=record.began, first_step=record.restored_step, steps_lost=lost
    )
    state = None
    if allocation is not None:
        opened = record is allocation.attempts[0]
        since = allocation.begin if opened else record.began
        first = record.first_step
        view = replace(
            view,
            allocated=allocation.begin,
            queued_s=allocation.queued_s if opened else None,
            ready_s=None if first is None else max(0.0, first - since),
            heard=record.last_heard,
            released=allocation.end,
        )
        state = allocation.state if record is allocation.attempts[-1] else None
    return view if view.ended is None else replace(view, cause=cause_of(record, state=state))


SLACK_S = 60.0
"""So far may the clocks of a node and of accounting be apart."""
_COMES_AGAIN = frozenset({Next.REQUEUE, Next.LEAVE})


@dataclass(frozen=True)
class Allocation:
    """One start of a job with the wait before it, or a wait that no start followed.

    Attributes:
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
    attempts: tuple[AttemptRecord, ...] = ()
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
    history: RunHistory,
    starts: Sequence[JobStart] = (),
    *,
    gone: bool = False,
    now: float | None = None,
) -> list[Allocation]:
    """All of them in order of time; none begins before the one before it has ended.

    `starts` are the starts of its jobs by accounting. With `gone` the scheduler says that nothing
    of the run is there: an attempt without an end ended when it was last heard of. Nothing is later
    than `now`; without it, what still waits is left out.
    """
    usable = [row for row in starts if row.end is None or math.isfinite(row.end)]
    allocations = _held(history, usable, gone=gone)
    _add_waits(allocations, history, usable, math.inf if now is None else now)
    return list(_in_line(allocations, history, now))


# What held nodes.


def _held(history: RunHistory, starts: Sequence[JobStart], *, gone: bool) -> list[Allocation]:
    """Every start of a job, at its writers' times; those that only accounting knows among them."""
    rows: dict[str, dict[int, JobStart]] = {}
    for row in starts:
        if row.start is not None and math.isfinite(row.start):
            rows.setdefault(row.job_id, {})[row.index] = row
    groups = _groups(history.attempts)
    allocations = []
    for position, group in enumerate(groups):
        of_job = rows.get(group[0].ran_in, {})
        row_of_group = _row_of(group, of_job)
        if row_of_group is not None:
            del of_job[row_of_group.index]
        may_run = position == len(groups) - 1 and not gone
        allocations.append(_allocation(group, row_of_group, may_run=may_run))
    newest_job = _newest_job(history)
    for row in (one for left in rows.values() for one in left.values()):
        bare = _bare(row, goes_on=row.end is None and row.job_id == newest_job)
        if bare.goes_on or (bare.end or 0.0) > bare.begin:
            _insert(allocations, bare)
    return allocations


def _groups(attempts: Sequence[AttemptRecord]) -> list[list[AttemptRecord]]:
    groups: list[list[AttemptRecord]] = []
    for attempt in attempts:
        last = groups[-1][-1] if groups else None
        same = last is not None and (
            (attempt.ran_in, attempt.restarts) == (last.ran_in, last.restarts)
            if attempt.started is not None
            else last.next is Next.RESTART  # its beginning is torn
        )
        if same:
            groups[-1].append(attempt)
        else:
            groups.append([attempt])
    return groups


def _row_of(group: Sequence[AttemptRecord], rows: Mapping[int, JobStart]) -> JobStart | None:
    """The accounting row of this start: the one of its number, or the nearest one in time."""
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
    group: Sequence[AttemptRecord], row: JobStart | None, *, may_run: bool
) -> Allocation:
    """One start of a job; what accounting says of its times counts before everything else."""
    first, last = group[0], group[-1]
    begin = first.began if first.begun is None else first.begun
    end = last.last_heard if last.ended_at is None else last.ended_at
    end_is_known = row is not None and row.end is not None
    if row is not None:
        begin = begin if row.start is None else row.start
        end = end if row.end is None else row.end
    return Allocation(
        first.ran_in,
        tuple(group),
        max(1, *(len(attempt.nodes) for attempt in group)),
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


def _newest_job(history: RunHistory) -> str:
    asked = [one.job_id for one in history.submissions if one.job_id]
    ran = [one.ran_in for one in history.attempts if one.ran_in]
    return (asked or ran or [""])[-1]


# What waited.


def _add_waits(
    allocations: list[Allocation], history: RunHistory, starts: Sequence[JobStart], now: float
) -> None:
    """Waits that no start followed: what still waits, and what was cancelled while it did."""
    pending = {row.job_id: row for row in starts if row.start is None}
    jobs = {allocation.job_id for allocation in allocations}
    newest = history.submissions[-1] if history.submissions else None
    for submission in history.submissions:
        if (
            submission.refused
            or (submission.job_id and submission.job_id in jobs)
            or _ran_unseen(submission, allocations, history)
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
    _add_wait_after(allocations, history, pending, now)


def _ran_unseen(
    submission: Submission, allocations: Sequence[Allocation], history: RunHistory
) -> bool:
    """Whether its job ran though its number was never written down."""
    if submission.job_id:
        return False
    taken = {other.job_id for other in history.submissions if other.job_id}
    return any(
        allocation.job_id not in taken and allocation.begin >= submission.asked - SLACK_S
        for allocation in allocations
    )


def _add_wait_after(
    allocations: list[Allocation], history: RunHistory, pending: dict[str, JobStart], now: float
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
        asked = next((s for s in history.submissions if s.job_id == allocation.job_id), None)
        until = _until(asked, row, allocation.end)
        if until is None and allocation is last and following is None:
            until = now
        if until is not None and math.isfinite(until):
            wait = _wait(allocation.job_id, allocation.end, max(allocation.end, until))
            allocations.insert(allocations.index(allocation) + 1, wait)


def _until(asked: Submission | None, row: JobStart | None, after: float | None) -> float | None:
    """When a wait ended that no start followed; None where it continues, or nobody knows."""
    if row is not None and row.end is not None:
        return row.end
    cancelled = asked.cancelled if asked is not None else None
    return cancelled if cancelled is not None and cancelled >= (after or cancelled) else None


def _wait(job_id: str, asked: float, until: float) -> Allocation:
    return Allocation(job_id, asked=asked, begin=until, end=until, started=False)


# In line.


def _in_line(
    allocations: Sequence[Allocation], history: RunHistory, now: float | None
) -> Iterator[Allocation]:
    """Their times in order: none before the end of the one before, none after `now`."""
    latest = math.inf if now is None else now
    cursor, before = -math.inf, None
    for allocation, following in pairwise([*allocations, None]):
        if allocation is None:
            continue
        asked = _asked(allocation, before, history)
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


def _asked(allocation: Allocation, before: Allocation | None, history: RunHistory) -> float | None:
    if allocation.asked is not None:
        return allocation.asked
    if before is not None and before.job_id == allocation.job_id:
        return -math.inf  # the moment at which it lost its nodes
    moments = [one.asked for one in history.submissions if one.job_id == allocation.job_id]
    open_ones = [
        one.asked
        for one in history.submissions
        if not one.job_id and not one.refused and one.asked <= allocation.begin + SLACK_S
    ]
    return next(iter(moments or open_ones[-1:]), None)
