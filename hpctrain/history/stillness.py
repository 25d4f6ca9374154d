"""Stretches of an attempt in which nothing moved: hangs, and ends that did not come. Pure.

They are told with how long ranks had stood by then, and are over where the ranks go on, or the
attempt is. A suspicion that is cleared was slow work, and is none, where whoever was waited for may
have worked. tests/unit/history/test_stillness.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def within(attempt: AttemptRecord, start: float, end: float) -> list[tuple[float, float]]:
    """The attempt's stretches between two moments, in order and apart; some last to the end."""
    stretches: list[tuple[float, float]] = []
    for stretch in sorted(attempt.still, key=lambda stretch: stretch.start):
        first = max(stretch.start, stretches[-1][1] if stretches else start)
        last = end if stretch.end is None else min(stretch.end, end)
        if first < last:
            stretches.append((first, last))
    return stretches


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
