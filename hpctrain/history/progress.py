"""How far a run is. Pure. tests/unit/test_derive.py holds the promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.history.run_state import condensed
from hpctrain.run.values import number, whole

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpctrain.run.events import Event


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


def progress(events: Iterable[Event]) -> Progress:
    """How far the run is; a restore of an older step takes it back."""
    now = Progress()
    for event in condensed(events):
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
