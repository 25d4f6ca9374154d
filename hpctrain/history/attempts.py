"""The attempts of a run: where, when, from which step to which, why they ended, what they cost.

Pure. tests/unit/history/test_attempts.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hpctrain.base.records import EndReason
from hpctrain.history.allocations import allocations_of
from hpctrain.history.causes import cause_of
from hpctrain.history.run_records import AttemptRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.base.records import JobStart, Next, Skipped
    from hpctrain.history.allocations import Allocation
    from hpctrain.history.causes import EndCause
    from hpctrain.history.run_history import RunHistory
    from hpctrain.history.run_records import Failure
    from hpctrain.run.event_types import HangFound, HangSuspected, RanksAwaited, StragglerFound


@dataclass(frozen=True)
class AttemptView:
    """One attempt, as far as the ledger knows it.

    Attributes:
        number: Counted from 1.
        job_id: Whose job it ran in.
        nodes: Host names.
        world_size: Ranks; 0 where no agent came so far.
        by: "start", "restart" inside the allocation, or "batch".
        started: Seconds since the epoch.
        ended: The same; for one that died without a word, when it was last heard of.
        reason: Why it ended; None while it runs.
        next: What followed.
        detail: One line more about the end.
        stop_cause: What asked for the stop, where something did.
        from_checkpoint: Name of what it restored; None if it began at the beginning.
        first_step: The step it restored, 0 for none; None if it never came so far.
        last_step: The last step it is known to have done.
        last_saved_step: The newest checkpoint it committed.
        steps_lost: Steps it did that had to be done again; None while it runs or where unknown.
        read_from: Where its state came from, "memory", "buddy" (another node's) or "disk"; ""
            where it restored nothing.
        skipped: Checkpoints it looked at and did not take.
        failure: What made it fail.
        cause: What ended it, as a person would say it; None while it runs.
        allocated: When its allocation began, by the scheduler where it told; also for a restart
            inside the allocation.
        queued_s: How long its job waited in the queue before; None for a restart inside the
            allocation, and where unknown.
        ready_s: From the beginning of its allocation (of itself, for a restart inside one) to the
            end of its first step; None where it never came so far.
        heard: When it was last heard of.
        released: When the scheduler took its nodes back, as far as the ledger or accounting can
            tell; also for a restart inside the allocation. None while they are held.
        awaited: Which ranks were waited for last, where others had returned.
        restart_pause_s: How long the ranks of the next one in its allocation wait after its end.
        hang: Who holds up the others where its ranks stand still; None where they go on.
        straggler: Who is slower than the others; None where nobody is.
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
    """Every attempt in order, with what it cost.

    Args:
        history: The run's.
        starts: What accounting knows of the starts of its jobs; none is fine.
        gone: See `allocations_of`.
    """
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
    """The steps that each attempt did in vain.

    The last step it did, less what the next attempt restored; less the newest checkpoint where no
    attempt came so far, or where a person went back on purpose. Nothing where it came to its end.
    Where a program saves for itself and has told of no checkpoint, only the next attempt shows what
    it kept.
    """
    committed = committed_steps(records)
    lost: list[int | None] = []
    restored: int | None = None
    is_told = True
    for record, kept in zip(reversed(records), reversed(committed), strict=True):
        is_over = record.ended is not None or record is not records[-1]
        went_on_from = restored if restored is not None and not record.went_back else kept
        last = record.last_step
        if record.reason is EndReason.COMPLETED and (restored is None or record.went_back):
            went_on_from = last  # its steps count, also where nobody tells of a checkpoint
        is_known = is_over and last is not None and went_on_from is not None and is_told
        lost.append(max(0, (last or 0) - (went_on_from or 0)) if is_known else None)
        restored = restored if record.restored_step is None else record.restored_step
        # A sealed checkpoint may be of a step that nobody has told.
        is_told = record.restored_step is not None or record.resumed is None
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
