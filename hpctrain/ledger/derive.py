"""What follows from the facts: attempts, steps lost, progress; state and lineage beside them.

Pure functions of events; nothing here reads a file or asks a scheduler. An old attempt may go on
writing beside a newer one (seen for 35 s after a node failure): what it says after the newer one
began counts for nothing, but for its end. tests/unit/test_derive.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.ledger.lineage import Lineage, Piece, coverage, lineage
from hpctrain.ledger.standing import OVER, RunState, Standing, live, run_state, standing
from hpctrain.ledger.values import member, number, text, whole
from hpctrain.records import EndReason, Next, Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hpctrain.ledger.events import Event

__all__ = [
    "OVER",
    "AttemptView",
    "Failure",
    "Lineage",
    "Piece",
    "Progress",
    "RunState",
    "Standing",
    "attempts",
    "coverage",
    "lineage",
    "live",
    "progress",
    "run_state",
    "standing",
]


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


@dataclass(frozen=True)
class Progress:
    """How far the run is.

    Attributes:
        step: Updates that the newest state has.
        total: How many there will be, where that is known.
        loss: Of the last step mark.
        step_s: Seconds per step, by the last step mark.
        seen: When a step, a save (also one that failed or was skipped) or a restore was last heard
            of.
        saved_step: The newest checkpoint that was committed and not gone back behind.
        saved_t: When.
        saved_bytes: Its size.
    """

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    step_s: float | None = None
    seen: float | None = None
    saved_step: int | None = None
    saved_t: float | None = None
    saved_bytes: int | None = None


def _condensed(events: Iterable[Event]) -> Iterator[Event]:
    """The events that count; of step marks in a row the last, which is most of a long ledger."""
    mark: Event | None = None
    for event in live(events):
        if mark is not None and not (event.kind == "steps" and event.attempt == mark.attempt):
            yield mark
        mark = event if event.kind == "steps" else None
        if mark is None:
            yield event
    if mark is not None:
        yield mark


@dataclass
class _Draft:
    """An attempt while its events are being read."""

    view: AttemptView
    seen: float
    went_back: bool = False
    """A person resumed from an older step on purpose: what follows costs, but nothing was lost."""


def attempts(events: Iterable[Event]) -> list[AttemptView]:
    """Every attempt in order, with what it cost."""
    drafts: dict[int, _Draft] = {}
    newest: _Draft | None = None
    for event in _condensed(events):
        if event.kind == "submitted" and event.data.get("from_step") is not None and newest:
            newest.went_back = True
        if event.attempt is None:
            continue
        draft = drafts.get(event.attempt)
        if draft is None:
            draft = newest = _Draft(AttemptView(event.attempt, started=event.t), event.t)
            drafts[event.attempt] = draft
        handler = _CHANGES.get(event.kind)
        if handler is not None:
            draft.view = replace(draft.view, **handler(draft, event))
        if event.kind != "attempt_ended":
            draft.seen = event.t
    return _with_losses([drafts[number] for number in sorted(drafts)])


def progress(events: Iterable[Event]) -> Progress:
    """How far the run is; a restore of an older step takes it back."""
    now = Progress()
    for event in _condensed(events):
        data = event.data
        if event.kind == "submitted" and data.get("total_steps") is not None:
            now = replace(now, total=whole(data["total_steps"]))
        elif event.kind == "restored":
            step = whole(data.get("step")) or 0
            now = replace(now, step=step, seen=event.t)
            if now.saved_step is not None and step < now.saved_step:
                now = replace(now, saved_step=step or None, saved_t=None, saved_bytes=None)
        elif event.kind == "saved":
            saved, size = whole(data.get("step")), whole(data.get("bytes"))
            now = replace(now, saved_step=saved, saved_t=event.t, saved_bytes=size, seen=event.t)
        elif event.kind in {"save_failed", "save_skipped"}:
            now = replace(now, seen=event.t)
        elif event.kind == "steps":
            now = _marked(now, event)
    return now


def _marked(now: Progress, event: Event) -> Progress:
    first, last = whole(event.data.get("first")), whole(event.data.get("last"))
    if first is None or last is None:
        return now
    seconds, loss = number(event.data.get("seconds")), number(event.data.get("loss"))
    step_s = seconds / (last - first + 1) if seconds and last >= first else now.step_s
    return replace(now, step=last, loss=loss, step_s=step_s, seen=event.t)


def _with_losses(drafts: Sequence[_Draft]) -> list[AttemptView]:
    """Add the steps that each attempt did in vain.

    The last step it did, less what the next attempt restored; less the newest checkpoint where no
    attempt came so far, or where a person went back on purpose.
    """
    committed, newest = [], 0
    for draft in drafts:
        saved, first = draft.view.last_saved_step, draft.view.first_step
        newest = saved if saved is not None else first if first is not None else newest
        committed.append(newest)
    found: list[AttemptView] = []
    restored: int | None = None
    for position in range(len(drafts) - 1, -1, -1):
        draft, view = drafts[position], drafts[position].view
        known = restored if restored is not None and not draft.went_back else committed[position]
        if view.ended is None and found:
            view = replace(view, ended=draft.seen)
        if view.ended is not None and view.last_step is not None:
            view = replace(view, steps_lost=max(0, view.last_step - known))
        if view.first_step is not None:
            restored = view.first_step
        found.append(view)
    return found[::-1]


# What each kind of event changes in the view of its attempt.


def _started(draft: _Draft, event: Event) -> dict[str, Any]:
    del draft
    data = event.data
    return {
        "job_id": text(data.get("job_id")),
        "nodes": tuple(text(node) for node in data.get("nodes") or ()),
        "world_size": whole(data.get("world_size")) or 0,
        "by": text(data.get("by")),
        "started": event.t,
    }


def _restored(draft: _Draft, event: Event) -> dict[str, Any]:
    del draft
    step = whole(event.data.get("step")) or 0
    raw = event.data.get("skipped")
    skipped = [one for one in raw if isinstance(one, dict)] if isinstance(raw, list) else []
    return {
        "first_step": step,
        "last_step": step,
        "from_checkpoint": event.data.get("checkpoint"),
        "skipped": tuple(
            Skipped(whole(one.get("step")) or 0, text(one.get("name")), text(one.get("reason")))
            for one in skipped
        ),
    }


def _moved(draft: _Draft, event: Event) -> dict[str, Any]:
    step = whole(event.data.get("last" if event.kind == "steps" else "step"))
    if step is None:
        return {}
    changes = {"last_step": max(step, draft.view.last_step or 0)}
    return changes | {"last_saved_step": step} if event.kind == "saved" else changes


def _stop_requested(draft: _Draft, event: Event) -> dict[str, Any]:
    del draft
    return {"stop_cause": text(event.data.get("cause"))}


def _failed(draft: _Draft, event: Event) -> dict[str, Any]:
    data = event.data
    failure = Failure(
        attempt=draft.view.number,
        rank=whole(data.get("rank")),
        node=text(data.get("node")),
        kind=text(data.get("kind_of")),
        summary=text(data.get("summary")),
        traceback=text(data.get("traceback")),
        others=tuple(data.get("others") or ()),
    )
    return {"failure": failure}


def _ended(draft: _Draft, event: Event) -> dict[str, Any]:
    """The last word on an end counts: the batch side may know more than the agent did."""
    data, view = event.data, draft.view
    # A successor writes long after the end; the attempt itself was last heard of before.
    ended = draft.seen if data.get("by") == "successor" else event.t
    step = whole(data.get("step"))
    return {
        "ended": ended if view.ended is None else view.ended,
        "reason": member(EndReason, data.get("reason")) or EndReason.UNKNOWN,
        "next": member(Next, data.get("next")),
        "detail": text(data.get("detail")),
        "last_step": view.last_step if step is None else max(step, view.last_step or 0),
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
