"""Stretches of an attempt in which nothing moved: hangs, ends that did not come, suspensions. Pure.

They are told with how long ranks had stood by then, and are over where the ranks go on, or the
attempt is. A suspicion that is cleared was slow work, and is none, where whoever was waited for may
have worked. tests/unit/history/test_stillness.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpctrain.history.run_records import StillStretch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.history.run_records import AttemptRecord
    from hpctrain.run import event_types as facts

MAY_WORK = frozenset({"behind", "unknown"})
"""Kinds of suspicion under which the one who was waited for may have computed all the time."""


def stands(attempt: AttemptRecord, t: float, fact: facts.HangSuspected | facts.HangFound) -> None:
    """The attempt's ranks were found to stand, or to hang."""
    if not attempt.still or attempt.still[-1].end is not None:
        attempt.still.append(StillStretch(t - (fact.stood_s or 0.0)))


def goes_on(attempt: AttemptRecord, t: float) -> None:
    """Something of the attempt moves again."""
    if not attempt.still or attempt.still[-1].end is not None:
        return
    start, fact = attempt.still.pop().start, attempt.hang
    if fact is not None and (fact.kind == "hang" or fact.kind_of not in MAY_WORK):
        attempt.still.append(StillStretch(start, t))


def awaited_in_vain(attempt: AttemptRecord, t: float, fact: facts.RanksAwaited) -> None:
    """Ranks that did nothing any more were ended, so that the attempt could end."""
    if fact.ended and fact.quiet_s:
        goes_on(attempt, t)
        attempt.still.append(StillStretch(t - fact.quiet_s, t))


def suspended(attempt: AttemptRecord, t: float, fact: facts.JobSuspended) -> None:
    """The attempt's job goes on after its scheduler had suspended it."""
    if fact.seconds:
        attempt.suspended.append(StillStretch(t - fact.seconds, t))


class StoodStill(NamedTuple):
    """A stretch in which nothing moved, with both of its ends.

    Attributes:
        start: Seconds since the epoch.
        end: The same.
        suspended: The scheduler had suspended the job; else ranks hung, or did not end.
    """

    start: float
    end: float
    suspended: bool


def within(attempt: AttemptRecord, start: float, end: float) -> list[StoodStill]:
    """The attempt's stretches between two moments, in order and apart; some last to the end.

    A suspension comes first: ranks that stood in it were found to stand, and that was no hang.
    """
    suspended = _apart(attempt.suspended, start, end)
    out = [StoodStill(*stretch, suspended=True) for stretch in suspended]
    for stretch in _apart(attempt.still, start, end):
        out += [StoodStill(*rest, suspended=False) for rest in _outside(stretch, suspended)]
    return sorted(out)


def _apart(
    stretches: Sequence[StillStretch], start: float, end: float
) -> list[tuple[float, float]]:
    """Those between two moments, in order, none within another."""
    apart: list[tuple[float, float]] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        first = max(stretch.start, apart[-1][1] if apart else start)
        last = end if stretch.end is None else min(stretch.end, end)
        if first < last:
            apart.append((first, last))
    return apart


def _outside(
    stretch: tuple[float, float], others: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """What of a stretch lies in none of the others."""
    begin, end = stretch
    for first, last in others:
        if begin < min(first, end):
            yield begin, min(first, end)
        begin = max(begin, last)
    if begin < end:
        yield begin, end


def moved_by(t: float, still: Sequence[tuple[float, float]]) -> float:
    """A moment by a clock that stands while nothing moves."""
    return t - sum(min(end, t) - start for start, end in still if start < t)


def spread(
    start: float, end: float, still: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """A stretch by that clock as real ones: all of it that lies between those of `still`."""
    stood_s, real, bound = 0.0, start, end
    for first, last in still:
        bound = first
        if end <= first - stood_s:
            break
        if real < first:
            yield real, first
        stood_s += last - first
        real, bound = max(last, start + stood_s), end + stood_s
    if real < (real_end := min(end + stood_s, bound)):
        yield real, real_end
