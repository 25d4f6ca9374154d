"""The attempts of a run: where, when, from which step to which, why they ended, what they cost.

Pure. An old attempt may go on writing beside a newer one (seen for 35 s after a node failure): what
it says after the newer one began counts for nothing, but for its end.
tests/unit/history/test_attempts.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.base.records import EndReason, Next, Skipped
from hpctrain.history.allocations import allocations_of
from hpctrain.history.causes import cause_of
from hpctrain.history.run_state import condensed
from hpctrain.history.timeline import timeline_of
from hpctrain.run.event_fields import finite, listed, member, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpctrain.base.records import JobStart
    from hpctrain.history.allocations import Allocation
    from hpctrain.history.causes import EndCause
    from hpctrain.history.timeline import AttemptTimeline, RunTimeline
    from hpctrain.run.events import Event


@dataclass(frozen=True)
class Failure:
    """The first causal failure of an attempt."""

    attempt: int
    rank: int | None
    node: str
    kind: str
    summary: str
    traceback: str = ""
    others: tuple[int, ...] = ()


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


@dataclass
class _Draft:
    """An attempt while its events are being read."""

    number: int
    seen: float
    fields: dict[str, Any]
    """Of its view, as far as they are known."""
    went_back: bool = False
    """A person resumed from an older step on purpose: what follows costs, but nothing was lost."""


def attempts(
    events: Iterable[Event], starts: Sequence[JobStart] = (), *, timeline: RunTimeline | None = None
) -> list[AttemptView]:
    """Every attempt in order, with what it cost.

    Args:
        events: The run's ledger.
        starts: What accounting knows of the starts of its jobs; none is fine.
        timeline: `timeline_of(events)`, where it is at hand.
    """
    counted = list(condensed(events))
    drafts: dict[int, _Draft] = {}
    newest: _Draft | None = None
    for event in counted:
        if event.kind == "submitted" and event.data.get("from_step") is not None and newest:
            newest.went_back = True
        if event.attempt is None:
            continue
        draft = drafts.get(event.attempt)
        if draft is None:
            draft = newest = _Draft(event.attempt, event.t, {"started": event.t})
            drafts[event.attempt] = draft
        handler = _CHANGES.get(event.kind)
        if handler is not None:
            draft.fields |= handler(draft, event)
        if event.kind != "attempt_ended":
            draft.seen = event.t
    _add_losses([drafts[number] for number in sorted(drafts)])
    held = allocations_of(timeline_of(counted) if timeline is None else timeline, starts)
    where = {one.number: (allocation, one) for allocation in held for one in allocation.attempts}
    return [_view(drafts[number], where.get(number)) for number in sorted(drafts)]


def _add_losses(drafts: Sequence[_Draft]) -> None:
    """Add the steps that each attempt did in vain.

    The last step it did, less what the next attempt restored; less the newest checkpoint where no
    attempt came so far, or where a person went back on purpose.
    """
    committed, newest = [], 0
    for draft in drafts:
        saved, first = draft.fields.get("last_saved_step"), draft.fields.get("first_step")
        newest = saved if saved is not None else first if first is not None else newest
        committed.append(newest)
    restored: int | None = None
    for draft, saved in zip(reversed(drafts), reversed(committed), strict=True):
        fields = draft.fields
        if fields.get("ended") is None and draft is not drafts[-1]:
            fields["ended"] = draft.seen
        went_on_from = restored if restored is not None and not draft.went_back else saved
        last = fields.get("last_step")
        if fields.get("ended") is not None and last is not None:
            fields["steps_lost"] = max(0, last - went_on_from)
        restored = fields.get("first_step", restored)


def _view(draft: _Draft, where: tuple[Allocation, AttemptTimeline] | None) -> AttemptView:
    """The view, with when its nodes were asked for, came and went, and what ended it."""
    placed = {} if where is None else _placed(*where, draft.fields["started"])
    view = AttemptView(draft.number, **draft.fields, **placed)
    if view.ended is None:
        return view
    state = where[0].state if where is not None and where[1] is where[0].attempts[-1] else None
    return replace(view, cause=cause_of(view, state=state))


def _placed(allocation: Allocation, attempt: AttemptTimeline, started: float) -> dict[str, Any]:
    opened = attempt is allocation.attempts[0]
    since = allocation.begin if opened else started
    return {
        "allocated": allocation.begin,
        "queued_s": allocation.queued_s if opened else None,
        "ready_s": None if attempt.first_step is None else max(0.0, attempt.first_step - since),
        "heard": attempt.last_t if attempt.heard is None else max(attempt.last_t, attempt.heard),
        "released": allocation.end,
    }


# What each kind of event changes in the view of its attempt.


def _started(draft: _Draft, event: Event) -> dict[str, Any]:
    del draft
    data = event.data
    return {
        "job_id": text(data.get("job_id")),
        "nodes": tuple(text(node) for node in listed(data.get("nodes"))),
        "world_size": whole(data.get("world_size")) or 0,
        "by": text(data.get("by")),
        "started": event.t,
    }


def _restored(draft: _Draft, event: Event) -> dict[str, Any]:
    del draft
    step = whole(event.data.get("step")) or 0
    skipped = [one for one in listed(event.data.get("skipped")) if isinstance(one, dict)]
    name = event.data.get("checkpoint")
    return {
        "first_step": step,
        "last_step": step,
        "from_checkpoint": None if name is None else text(name),
        "skipped": tuple(
            Skipped(whole(one.get("step")) or 0, text(one.get("name")), text(one.get("reason")))
            for one in skipped
        ),
    }


def _moved(draft: _Draft, event: Event) -> dict[str, Any]:
    step = whole(event.data.get("last" if event.kind == "steps" else "step"))
    if step is None:
        return {}
    changes = {"last_step": max(step, draft.fields.get("last_step") or 0)}
    return changes | {"last_saved_step": step} if event.kind == "saved" else changes


def _stop_requested(draft: _Draft, event: Event) -> dict[str, Any]:
    del draft
    return {"stop_cause": text(event.data.get("cause"))}


def _failed(draft: _Draft, event: Event) -> dict[str, Any]:
    data = event.data
    others = (whole(rank) for rank in listed(data.get("others")))
    failure = Failure(
        attempt=draft.number,
        rank=whole(data.get("rank")),
        node=text(data.get("node")),
        kind=text(data.get("kind_of")),
        summary=text(data.get("summary")),
        traceback=text(data.get("traceback")),
        others=tuple(rank for rank in others if rank is not None),
    )
    return {"failure": failure}


def _ended(draft: _Draft, event: Event) -> dict[str, Any]:
    """The last word on an end counts: the batch side may know more than the agent did."""
    data, fields = event.data, draft.fields
    # A successor writes long after the end; the attempt itself was last heard of before.
    heard = max(draft.seen, finite(data.get("heard")) or draft.seen)
    ended = heard if data.get("by") == "successor" else event.t
    step, last = whole(data.get("step")), fields.get("last_step")
    return {
        "ended": fields.get("ended", ended),
        "reason": member(EndReason, data.get("reason")) or EndReason.UNKNOWN,
        "next": member(Next, data.get("next")),
        "detail": text(data.get("detail")),
        "last_step": last if step is None else max(step, last or 0),
    }


_CHANGES: dict[str, Callable[[_Draft, Event], dict[str, Any]]] = {
    "attempt_started": _started,
    "restored": _restored,
    "steps": _moved,
    "saved": _moved,
    "save_failed": _moved,
    "save_skipped": _moved,
    "stopped": _moved,
    "done": _moved,
    "stop_requested": _stop_requested,
    "failure": _failed,
    "attempt_ended": _ended,
}
