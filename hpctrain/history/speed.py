"""The speed of the newest attempt, from its newest step marks. Pure.

tests/unit/history/test_speed.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.history.rank_samples import peak_flops
from hpctrain.run.event_fields import finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.history.run_history import RunHistory, StepMark

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


def speed(history: RunHistory) -> Speed | None:
    """How fast the newest attempt is; None until its first mark after the newest restore."""
    told = [attempt for attempt in history.attempts if attempt.resume >= 0]
    if not told:
        return None
    since = max(told[-1].marks_before, len(told[-1].marks) - LOOKED_AT)
    marks = [mark for mark in told[-1].marks[since:] if mark.steps and mark.fact.seconds]
    if not marks:
        return None
    window = _window(marks)
    before = marks[len(marks) - len(window) - 1] if len(marks) > len(window) else None
    flops_per_s = _rate(window, lambda mark: finite(mark.fact.flops))
    device, ranks = told[-1].device, told[-1].world_size
    peak = peak_flops(device)
    mfu = flops_per_s / (peak * ranks) if flops_per_s and peak and ranks else None
    norms = (finite(mark.fact.grad_norm) for mark in reversed(window))
    slow = next((mark.fact for mark in reversed(window) if mark.fact.slow_rank is not None), None)
    return Speed(
        step_p50_s=_typical(window, lambda mark: mark.fact.p50_s or _seconds(mark) / mark.steps),
        step_p95_s=_typical(window, lambda mark: mark.fact.p95_s),
        steps_per_s=_rate(window, lambda mark: float(mark.steps)),
        samples_per_s=_rate(window, _samples),
        tokens_per_s=_rate(window, lambda mark: finite(mark.fact.tokens)),
        flops_per_s=flops_per_s,
        mfu=mfu,
        data_share=_data_share(window, before),
        slow_rank=slow.slow_rank if slow else None,
        slow_by=slow.slow_by if slow else None,
        loss=finite(window[-1].fact.loss),
        grad_norm=next((norm for norm in norms if norm is not None), None),
        skipped=sum(mark.fact.skipped or 0 for mark in window),
        window_s=sum(_seconds(mark) for mark in window),
    )


def _seconds(mark: StepMark) -> float:
    return mark.fact.seconds or 0.0


def _window(marks: Sequence[StepMark]) -> Sequence[StepMark]:
    """The newest marks: those of the last ten minutes, 20 at most, one at least."""
    newest = marks[-1].t
    return [m for m in marks[-MARKS:] if newest - m.t < WINDOW_S or m is marks[-1]]


def _typical(window: Sequence[StepMark], value: Callable[[StepMark], float | None]) -> float | None:
    """Median of the marks' values, each weighted by its steps."""
    found = sorted((v, mark.steps) for mark in window if (v := value(mark)) is not None)
    half, seen = sum(steps for _, steps in found) / 2, 0
    for middle, steps in found:
        seen += steps
        if seen >= half:
            return middle
    return None


def _rate(window: Sequence[StepMark], value: Callable[[StepMark], float | None]) -> float | None:
    """Sum over seconds, of the marks that tell the value."""
    told = [(found, _seconds(mark)) for mark in window if (found := value(mark)) is not None]
    return sum(v for v, _ in told) / sum(s for _, s in told) if told else None


def _samples(mark: StepMark) -> float | None:
    first, last = mark.fact.sample_first, mark.fact.sample_last
    return None if first is None or last is None or last < first else last - first


def _data_share(window: Sequence[StepMark], before: StepMark | None) -> float | None:
    """`data_s` counts from the attempt's first step, so it takes two marks, or the first one."""
    base = before or (window[0] if len(window) > 1 else None)
    last = window[-1].fact.data_s
    if last is None:
        return None
    if base is None:
        return _share(last, _seconds(window[-1]))
    first = base.fact.data_s
    return None if first is None else _share(last - first, window[-1].t - base.t)


def _share(part: float, of: float) -> float | None:
    return min(1.0, max(0.0, part / of)) if of > 0 else None
