"""The speed of the newest attempt, from its newest step marks. Pure.

tests/unit/history/test_speed.py holds the promises.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.history.rank_samples import peak_flops
from hpctrain.history.run_state import live
from hpctrain.run.event_fields import finite, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpctrain.run.events import Event

WINDOW_S = 600.0
MARKS = 20
LOOKED_AT = 2 * MARKS
"""Marks that nothing can be counted with leave enough others."""


@dataclass(frozen=True)
class Speed:
    """Speed over the newest marks, ten minutes or 20 of them; None where the marks do not say.

    Attributes:
        step_p50_s: Median of the marks' medians, each weighted by its steps.
        step_p95_s: The same of the marks' 95th percentiles: that of a typical stretch. One stretch
            with a hiccup does not move it.
        steps_per_s: Over wall time, so saves and waits count.
        samples_per_s: The same, of all ranks.
        tokens_per_s: The same, where the program tells tokens.
        flops_per_s: The same, where it tells model flops.
        mfu: Share of what the devices could do at best, where that is known.
        data_share: Share of wall time in which rank 0 waited for data.
        slow_rank: The slowest rank by its own work.
        slow_by: By how much it is above the ranks' median, e.g. 0.04.
        loss: Last told.
        grad_norm: Last told.
        skipped: Steps within the window whose update was skipped.
        window_s: Seconds that the marks tell about.
    """

    step_p50_s: float | None = None
    step_p95_s: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    data_share: float | None = None
    slow_rank: int | None = None
    slow_by: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    skipped: int = 0
    window_s: float = 0.0


class _Mark(NamedTuple):
    """A step mark whose steps and seconds can be counted with."""

    event: Event
    steps: int
    seconds: float

    def get(self, name: str) -> float | None:
        """A finite number of the mark's, else None."""
        return finite(self.event.data.get(name))


def speed(events: Iterable[Event]) -> Speed | None:
    """How fast the newest attempt is; None until its first mark."""
    device, ranks, marks = _newest_attempt(events)
    if not marks:
        return None
    window = _window(marks)
    before = marks[len(marks) - len(window) - 1] if len(marks) > len(window) else None
    flops_per_s = _rate(window, lambda mark: mark.get("flops"))
    peak = peak_flops(device)
    mfu = flops_per_s / (peak * ranks) if flops_per_s and peak and ranks else None
    slow = next((m for m in reversed(window) if m.get("slow_rank") is not None), None)
    return Speed(
        step_p50_s=_typical(window, lambda mark: mark.get("p50_s") or mark.seconds / mark.steps),
        step_p95_s=_typical(window, lambda mark: mark.get("p95_s")),
        steps_per_s=_rate(window, lambda mark: float(mark.steps)),
        samples_per_s=_rate(window, _samples),
        tokens_per_s=_rate(window, lambda mark: mark.get("tokens")),
        flops_per_s=flops_per_s,
        mfu=mfu,
        data_share=_data_share(window, before),
        slow_rank=whole(slow.event.data.get("slow_rank")) if slow else None,
        slow_by=slow.get("slow_by") if slow else None,
        loss=window[-1].get("loss"),
        grad_norm=_last(window, "grad_norm"),
        skipped=sum(whole(mark.event.data.get("skipped")) or 0 for mark in window),
        window_s=sum(mark.seconds for mark in window),
    )


def _newest_attempt(events: Iterable[Event]) -> tuple[str, int, list[_Mark]]:
    """Its device, its ranks and its newest marks, in order."""
    device, ranks = "", 0
    marks: deque[Event] = deque(maxlen=LOOKED_AT)
    attempt: int | None = None
    for event in live(events):
        if event.attempt is None or event.kind == "attempt_ended":
            continue
        if event.attempt != attempt:
            attempt, device, ranks = event.attempt, "", 0
            marks.clear()
        if event.kind == "attempt_started":
            ranks = whole(event.data.get("world_size")) or 0
        elif event.kind == "phase":
            device = text(event.data.get("device")) or device
        elif event.kind == "restored":  # what was done before it may be done anew
            marks.clear()
        elif event.kind == "steps":
            marks.append(event)
    return device, ranks, [mark for event in marks if (mark := _mark(event)) is not None]


def _mark(event: Event) -> _Mark | None:
    first, last = whole(event.data.get("first")), whole(event.data.get("last"))
    seconds = finite(event.data.get("seconds"))
    if first is None or last is None or last < first or not seconds or seconds < 0:
        return None
    return _Mark(event, last - first + 1, seconds)


def _window(marks: Sequence[_Mark]) -> Sequence[_Mark]:
    """The newest marks: those of the last ten minutes, 20 at most, one at least."""
    newest = marks[-1].event.t
    return [m for m in marks[-MARKS:] if newest - m.event.t < WINDOW_S or m is marks[-1]]


def _typical(window: Sequence[_Mark], value: Callable[[_Mark], float | None]) -> float | None:
    """Median of the marks' values, each weighted by its steps."""
    found = sorted((v, mark.steps) for mark in window if (v := value(mark)) is not None)
    half, seen = sum(steps for _, steps in found) / 2, 0
    for middle, steps in found:
        seen += steps
        if seen >= half:
            return middle
    return None


def _rate(window: Sequence[_Mark], value: Callable[[_Mark], float | None]) -> float | None:
    """Sum over seconds, of the marks that tell the value."""
    told = [(found, mark.seconds) for mark in window if (found := value(mark)) is not None]
    return sum(v for v, _ in told) / sum(s for _, s in told) if told else None


def _samples(mark: _Mark) -> float | None:
    first, last = mark.get("sample_first"), mark.get("sample_last")
    return None if first is None or last is None or last < first else last - first


def _data_share(window: Sequence[_Mark], before: _Mark | None) -> float | None:
    """`data_s` counts from the attempt's first step, so it takes two marks, or the first one."""
    base = before or (window[0] if len(window) > 1 else None)
    last = window[-1].get("data_s")
    if last is None:
        return None
    if base is None:
        return _share(last, window[-1].seconds)
    first = base.get("data_s")
    return None if first is None else _share(last - first, window[-1].event.t - base.event.t)


def _share(part: float, of: float) -> float | None:
    return min(1.0, max(0.0, part / of)) if of > 0 else None


def _last(window: Sequence[_Mark], name: str) -> float | None:
    return next((v for mark in reversed(window) if (v := mark.get(name)) is not None), None)
