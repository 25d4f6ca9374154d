"""The attempts as bars over time: what each moment was spent on. Pure.

Waits for data and saves inside a stretch of steps are known as sums only, so a stretch is one bar
that says how it was shared. Where attempts are many, neighbours share a line, and what is shorter
than a pixel goes to what fills most of its pixel. tests/unit/test_report.py holds the promises.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.history.goodput import Spent
from hpctrain.report.curves import groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.history.goodput import Slice

MOST_LINES = 60
PIXELS = 900
TRAINING = frozenset({Spent.STEP, Spent.DATA, Spent.SAVE})


@dataclass
class Bar:
    """A stretch of one line.

    Attributes:
        line: Counted from 0.
        start: Seconds since the epoch.
        end: The same.
        kind: What it was spent on; STEP also stands for the data waits and saves in it.
        attempts: The first and the last attempt in it; None for the time before the first.
        shares: Seconds of each kind in it.
    """

    line: int
    start: float
    end: float
    kind: Spent
    attempts: tuple[int, int] | None
    shares: dict[Spent, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """Bars, and the attempts of each line: first and last."""

    bars: list[Bar]
    lines: list[tuple[int, int]]


def timeline(slices: Sequence[Slice]) -> Timeline:
    """Lines of bars, the first attempt first; the queue before an attempt stands in its line."""
    told = [one for one in slices if one.end > one.start]
    numbers = sorted({one.attempt for one in told if one.attempt is not None})
    if not numbers:
        numbers = [0] if told else []
    lines = [(numbers[g.start], numbers[g.stop - 1]) for g in groups(len(numbers), MOST_LINES)]
    where = {
        number: line
        for line, group in enumerate(groups(len(numbers), MOST_LINES))
        for number in numbers[group.start : group.stop]
    }
    by_line: dict[int, list[Bar]] = defaultdict(list)
    for one, number in zip(told, _owners(told, numbers), strict=True):
        line = where[number]
        kind = Spent.STEP if one.kind in TRAINING else one.kind
        _add(by_line[line], Bar(line, one.start, one.end, kind, (number, number)), one.kind)
    pixel = (max((b.end for b in told), default=0) - min((b.start for b in told), default=0)) / (
        PIXELS
    )
    crowded = len(numbers) > MOST_LINES
    drawn = [_coarse(bars, pixel) if crowded else bars for bars in by_line.values()]
    return Timeline([bar for bars in drawn for bar in bars], lines)


def _owners(slices: Sequence[Slice], numbers: Sequence[int]) -> Iterable[int]:
    """The attempt of each slice; time without one leads to the next attempt."""
    following = numbers[-1] if numbers else 0
    owners: list[int] = []
    for one in reversed(slices):
        following = one.attempt if one.attempt is not None else following
        owners.append(following)
    return reversed(owners)


def _add(bars: list[Bar], bar: Bar, kind: Spent) -> None:
    """Put a bar behind the others, or lengthen the last where both show the same."""
    last = bars[-1] if bars else None
    joins = (
        last is not None
        and (last.kind, last.attempts) == (bar.kind, bar.attempts)
        and (bar.start - last.end) <= 1.0
    )
    target = last if last is not None and joins else bar
    if target is bar:
        bars.append(bar)
    target.end = max(target.end, bar.end)
    target.shares[kind] = target.shares.get(kind, 0.0) + bar.end - bar.start


def _coarse(bars: Sequence[Bar], pixel: float) -> list[Bar]:
    """The bars with those shorter than a pixel put together, under what fills most of them."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if last is None or (last.end - last.start >= pixel and bar.end - bar.start >= pixel):
            found.append(bar)
            continue
        if last.end - last.start >= pixel and last.kind is not bar.kind:
            found.append(bar)
            continue
        for kind, seconds in bar.shares.items():
            last.shares[kind] = last.shares.get(kind, 0.0) + seconds
        last.end = max(last.end, bar.end)
        last.attempts = _both(last.attempts, bar.attempts)
        most = max(last.shares, key=lambda kind: last.shares[kind])
        last.kind = Spent.STEP if most in TRAINING else most
    return found


def _both(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    known = [pair for pair in (one, other) if pair is not None]
    return (min(p[0] for p in known), max(p[1] for p in known)) if known else None
