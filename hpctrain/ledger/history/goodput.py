"""Goodput: every second since the first submission in one of a closed set of time classes. Pure.

Each start of a job (`Allocation`) is cut into slices without a gap; the moments of an attempt are
put in order first, so that a clock that jumps makes a slice shorter and never negative.
docs/development/ledger.md says how each class is measured. tests/unit/history/test_goodput.py holds
the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.core.base.records import EndReason
from hpctrain.ledger.history.attempts import allocations_of, committed_steps
from hpctrain.ledger.history.progress import reported
from hpctrain.ledger.history.run_records import StoodStill, moved_by, spread, within

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from hpctrain.core.base.records import JobStart
    from hpctrain.ledger.history.attempts import Allocation
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord


class TimeClass(StrEnum):
    """What time went to: a closed set. Only QUEUE lies outside of an allocation."""

    QUEUE = "queue"
    STARTUP = "startup"
    """From the beginning of the allocation until the ranks read a checkpoint."""
    RESTORE = "restore"
    WARM_UP = "warm_up"
    """From the restore to the end of the first step: compiling, first batches and collectives."""
    STEP = "step"
    """Training that counts: the one useful class."""
    DATA = "data"
    """Rank 0 waited for data."""
    SAVE = "save"
    """Training stood still for a checkpoint."""
    REDONE = "redone"
    """Training that had to be done again, or will have to be."""
    NO_PROGRESS = "no_progress"
    """Nothing moved, from the last that did to the verdict: ranks hung, or did not end."""
    SUSPENDED = "suspended"
    """The scheduler let the job stand still, with its nodes."""
    STALL = "stall"
    """After the last sign of life of an attempt that ended without a word."""
    TEARDOWN = "teardown"
    """From the last word of the training program to the end of the allocation, or the restart."""
    OTHER = "other"
    """What no rule explains; also all of a program's own time that tells hpctrain nothing."""


_STILL = {True: TimeClass.SUSPENDED, False: TimeClass.NO_PROGRESS}
ALLOCATED = tuple(kind for kind in TimeClass if kind is not TimeClass.QUEUE)
PATIENCE_S = 300.0
"""Marks come once a minute or more often, but for steps that take longer than that."""
PIECE_S = 3600.0
"""A long training is cut this often, so that a look at the last day has that day's own shares."""


@dataclass(frozen=True)
class TimeSlice:
    """A stretch of time, [start, end) in seconds since the epoch, that went to one thing.

    Attributes:
        attempt: Whose; None in the queue, and where no agent came so far.
        nodes: Nodes that were allocated; 0 in the queue.
    """

    start: float
    end: float
    kind: TimeClass
    attempt: int | None
    nodes: int

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


@dataclass(frozen=True)
class Goodput:
    """Where a run's time went.

    Attributes:
        slices: In order of time; they do not overlap, and leave out only the idle time between an
            end for good and the next submission.
        seconds: Wall time of each class; all classes are there.
        node_seconds: The same weighted by allocated nodes; all classes but QUEUE.
        allocated_s: Node-seconds that were allocated: the sum of `node_seconds`.
        submitted_s: Wall time since the first submission, without idle time: the sum of `seconds`.
        reports_steps: Whether the program reports its steps; without that there is no rate.
    """

    slices: Sequence[TimeSlice] = ()
    seconds: dict[TimeClass, float] = field(default_factory=lambda: dict.fromkeys(TimeClass, 0.0))
    node_seconds: dict[TimeClass, float] = field(
        default_factory=lambda: dict.fromkeys(ALLOCATED, 0.0)
    )
    allocated_s: float = 0.0
    submitted_s: float = 0.0
    reports_steps: bool = False

    @property
    def useful_of_allocated(self) -> float | None:
        """Share of the allocated node-seconds that went to steps that count.

        None where the program tells no steps at all, or nothing was allocated.
        """
        if not self.reports_steps or self.allocated_s <= 0:
            return None
        return self.node_seconds[TimeClass.STEP] / self.allocated_s

    @property
    def useful_since_submit(self) -> float | None:
        """Share of the wall time since the first submission that went to steps that count.

        None where the program tells no steps at all, or no time went by.
        """
        if not self.reports_steps or self.submitted_s <= 0:
            return None
        return self.seconds[TimeClass.STEP] / self.submitted_s


def goodput(
    history: RunHistory,
    *,
    starts: Sequence[JobStart] = (),
    now: float,
    gone: bool = False,
    suspended_at: float | None = None,
) -> Goodput:
    """Where the run's time went; of rows of step marks the last ones are enough.

    `starts` and `gone` are as of `allocations_of`. An attempt that still runs is counted up to
    `now`, its job is suspended since `suspended_at`.
    """
    kept = kept_steps(history.attempts)
    words = reported(history, now=now)
    slices: list[TimeSlice] = []
    for allocation in allocations_of(history, starts, gone=gone, now=now):
        slices += waited(allocation)
        if allocation.started:
            until = max(allocation.begin, now) if allocation.end is None else allocation.end
            stood = until
            if suspended_at is not None:  # later than the end of each start but the newest
                stood = min(max(suspended_at, allocation.begin), until)
            slices += cut(allocation, stood, kept, silent=words.unaccounted)
            newest = allocation.attempts[-1].number if allocation.attempts else None
            slices += _slice(stood, until, TimeClass.SUSPENDED, newest, allocation.nodes)
    return _summed(slices, reports_steps=words.tells)


def window(g: Goodput, since: float) -> Goodput:
    """The same for the time after `since` only, e.g. the last 24 hours."""
    clipped = [replace(s, start=max(s.start, since)) for s in g.slices if s.end > since]
    return _summed(clipped, reports_steps=g.reports_steps)


def kept_steps(attempts: Sequence[AttemptRecord]) -> dict[int, int]:
    """The last step of each attempt that counts, by what later attempts restored.

    Where none came so far, what an attempt committed counts. Attempts whose steps all count are not
    in it: the run is done, or nobody knows what was kept.
    """
    kept: dict[int, int] = {}
    lowest: int | None = None
    for attempt, saved in zip(reversed(attempts), reversed(committed_steps(attempts)), strict=True):
        superseded = attempt is not attempts[-1]
        if lowest is not None:
            kept[attempt.number] = lowest
        elif (attempt.is_over or superseded) and attempt.reason is not EndReason.COMPLETED:
            kept |= {} if saved is None else {attempt.number: saved}
        if attempt.restored_step is not None:
            lowest = attempt.restored_step if lowest is None else min(lowest, attempt.restored_step)
    return kept


def cut(
    allocation: Allocation, until: float, kept: Mapping[int, int], *, silent: Collection[int]
) -> Iterator[TimeSlice]:
    """All the time of one start, from `allocation.begin` to `until`, without a gap.

    `kept` is as of `kept_steps`. The programs of attempts in `silent` told nothing of what they
    did.
    """
    cursor = allocation.begin
    if not allocation.attempts:
        yield from _slice(cursor, until, TimeClass.STARTUP, None, allocation.nodes)
    for attempt, following in pairwise([*allocation.attempts, None]):
        if attempt is None:
            continue
        last = following is None
        ends = until if following is None else following.began
        ends = min(max(ends, cursor), until)
        going = last and allocation.goes_on
        of = _silent if attempt.number in silent else _parts
        parts = of(attempt, ends, going=going)
        word, ceased = _cease(attempt, ends, going=going)
        last_still = ceased if word or not going else ends
        for end, kind in parts:
            part = cursor, min(max(end, cursor), ends)
            still = within(attempt, cursor, min(part[1], last_still))
            whole = TimeSlice(*part, kind, attempt.number, allocation.nodes)
            yield from _part(attempt, whole, kept.get(attempt.number), still)
            cursor = part[1]


def waited(allocation: Allocation) -> Iterator[TimeSlice]:
    """The wait before a start, or one that no start followed."""
    if allocation.asked is not None:
        yield from _slice(allocation.asked, allocation.begin, TimeClass.QUEUE, None, 0)


def _summed(slices: Sequence[TimeSlice], *, reports_steps: bool) -> Goodput:
    seconds: dict[TimeClass, float] = dict.fromkeys(TimeClass, 0.0)
    node_seconds: dict[TimeClass, float] = dict.fromkeys(ALLOCATED, 0.0)
    for piece in slices:
        seconds[piece.kind] += piece.seconds
        if piece.kind is not TimeClass.QUEUE:
            node_seconds[piece.kind] += piece.seconds * piece.nodes
    return Goodput(
        slices=tuple(slices),
        seconds=seconds,
        node_seconds=node_seconds,
        allocated_s=sum(node_seconds.values()),
        submitted_s=sum(seconds.values()),
        reports_steps=reports_steps,
    )


def _slice(
    start: float, end: float, kind: TimeClass, attempt: int | None, nodes: int
) -> Iterator[TimeSlice]:
    if end > start:
        yield TimeSlice(start, end, kind, attempt, nodes)


def _parts(
    attempt: AttemptRecord, ends: float, *, going: bool
) -> Iterator[tuple[float, TimeClass]]:
    """What an attempt's time went to, each part by its end; the last ends with the attempt."""
    word, cease = _cease(attempt, ends, going=going)
    now_at = TimeClass.STARTUP
    if attempt.restored is not None and attempt.restoring is not None:
        yield attempt.restoring, TimeClass.STARTUP
        yield attempt.restored, TimeClass.RESTORE
        now_at = TimeClass.WARM_UP
    if attempt.first_step is not None:
        yield attempt.first_step, now_at
        now_at = TimeClass.STEP
    if attempt.stopping is not None or attempt.left is not None:
        yield _halted(attempt, cease), now_at
        yield cease, TimeClass.SAVE
    else:
        yield min(_heard(attempt, cease), cease) if now_at is TimeClass.STEP else cease, now_at
        yield cease, TimeClass.STALL
    yield ends, TimeClass.TEARDOWN if word else TimeClass.STALL


def _part(
    attempt: AttemptRecord,
    part: TimeSlice,
    kept: int | None,
    still: Sequence[StoodStill],
) -> Iterator[TimeSlice]:
    """A part of an attempt's time, of which nothing moved in `still`."""
    pairs = [(stood.start, stood.end) for stood in still]

    def clock(t: float) -> float:
        return moved_by(t, pairs)

    start, end = part.start, clock(part.end)
    if part.kind is TimeClass.STEP:
        pieces = _training(attempt, (start, end), kept, part.nodes, clock)
    else:
        pieces = _slice(start, end, part.kind, attempt.number, part.nodes)
    if not still:
        yield from pieces
        return
    real = [
        replace(piece, start=first, end=last)
        for piece in pieces
        for first, last in spread(piece.start, piece.end, pairs)
    ]
    stood = [
        replace(part, start=stood.start, end=stood.end, kind=_STILL[stood.suspended])
        for stood in still
    ]
    yield from sorted([*real, *stood], key=lambda piece: piece.start)


def _silent(
    attempt: AttemptRecord, ends: float, *, going: bool
) -> Iterator[tuple[float, TimeClass]]:
    """The same where the program reported no step: what it did in its time, nobody can say."""
    yield attempt.began, TimeClass.STARTUP
    word, cease = _cease(attempt, ends, going=going)
    yield cease if word else ends, TimeClass.OTHER
    yield ends, TimeClass.TEARDOWN


def _cease(attempt: AttemptRecord, ends: float, *, going: bool) -> tuple[bool, float]:
    """When the ranks ceased, and whether somebody who saw it said so."""
    for word in (attempt.left, attempt.failed, attempt.witnessed):
        if word is not None:
            return True, word
    heard = attempt.last_heard
    if going and (attempt.first_step is None or ends - heard < _patience(attempt)):
        return False, ends
    return False, heard


def _patience(attempt: AttemptRecord) -> float:
    """After so long a silence an attempt in training no longer counts as being at work."""
    moments = [attempt.first_step or 0.0, *(mark.t for mark in attempt.marks[-2:])]
    apart = [after - before for before, after in pairwise(moments[-2:])]
    return max([PATIENCE_S, *(3 * gap for gap in apart)])


def _heard(attempt: AttemptRecord, cease: float) -> float:
    """When a step was last heard of, of an attempt that did not stop in order."""
    if attempt.heard is None:
        return cease
    return max([attempt.heard, *(mark.t for mark in attempt.marks[-1:])])


def _halted(attempt: AttemptRecord, cease: float) -> float:
    """When no further step was done, of an attempt that stopped or finished in order."""
    if attempt.stopping is not None:
        return attempt.stopping
    return attempt.marks[-1].t if attempt.marks else cease


class _Point(NamedTuple):
    """Where training was at a moment: all of it counted from the end of the first step."""

    t: float
    step: int
    data_s: float
    save_s: float


def _training(
    attempt: AttemptRecord,
    stretch: tuple[float, float],
    kept: int | None,
    nodes: int,
    clock: Callable[[float], float],
) -> Iterator[TimeSlice]:
    """The stretch of steps: those that count with their data and saves, then those in vain."""
    start, end = stretch
    points = _points(attempt, start, end, clock)
    last = points[-1]
    if kept is not None and (attempt.highest_step or 0) > kept:
        last = _last_that_counts(attempt, points, kept)
    last = last._replace(t=min(last.t, end))
    for piece in pairwise(_pieces(points, last)):
        yield from _mixed(*piece, attempt.number, nodes)
    yield from _slice(last.t, end, TimeClass.REDONE, attempt.number, nodes)


def _points(
    attempt: AttemptRecord, start: float, end: float, clock: Callable[[float], float]
) -> list[_Point]:
    """Where training was, in order of time and within the stretch."""
    points = [_Point(start, (attempt.restored_step or 0) + 1, 0.0, 0.0)]
    # Where no mark tells of saves, the saves themselves do.
    marks_report_saves = any(mark.fact.save_s is not None for mark in attempt.marks)
    saves = iter([] if marks_report_saves else attempt.saves)
    save, stalled = next(saves, None), 0.0
    for mark in attempt.marks:
        while save is not None and save.t <= mark.t:
            stalled, save = stalled + (save.stall_s or 0.0), next(saves, None)
        before = points[-1]
        save_s = (mark.fact.save_s or 0.0) - attempt.base[1] if marks_report_saves else stalled
        points.append(
            _Point(
                min(max(clock(mark.t), before.t), end),
                max(mark.fact.last or 0, before.step),
                max((mark.fact.data_s or 0.0) - attempt.base[0], before.data_s),
                max(save_s, before.save_s),
            )
        )
    if points[-1].t < end:
        points.append(_tail(attempt, points[-1], end, clock))
    return points


def _tail(
    attempt: AttemptRecord, last: _Point, end: float, clock: Callable[[float], float]
) -> _Point:
    """The end of the stretch: after the last mark only the saves are known."""
    since = clock(attempt.marks[-1].t) if attempt.marks else last.t
    saves = [save for save in attempt.saves if since < clock(save.t) <= end]
    stalled = sum((save.stall_s or 0.0) for save in saves)
    return _Point(
        end, max(last.step, attempt.highest_step or 0), last.data_s, last.save_s + stalled
    )


def _last_that_counts(attempt: AttemptRecord, points: Sequence[_Point], kept: int) -> _Point:
    """Where the last step that counts was done, and saved: without its save it would be lost."""
    before = points[0]
    for after in points[1:]:
        if kept < after.step:
            break
        before = after
    else:
        after = before
    if kept <= before.step or after.step <= before.step:
        same = (save for save in attempt.saves if save.step == kept == before.step)
        stall = next(((save.stall_s or 0.0) for save in same), 0.0)
        return before._replace(t=before.t + stall, save_s=before.save_s + stall)
    share = (kept - before.step) / (after.step - before.step)
    return _between(before, after, before.t + share * (after.t - before.t))


def _pieces(points: Sequence[_Point], last: _Point) -> list[_Point]:
    """Some of the points before the last one, far enough apart, and that one."""
    cuts = [points[0]]
    for point in points[1:]:
        if point.t >= last.t:
            break
        if point.t - cuts[-1].t >= PIECE_S and point.step <= last.step:
            cuts.append(point)
    return [*cuts, last]


def _between(before: _Point, after: _Point, t: float) -> _Point:
    share = (t - before.t) / (after.t - before.t) if after.t > before.t else 0.0
    return _Point(
        t,
        after.step,
        before.data_s + share * (after.data_s - before.data_s),
        before.save_s + share * (after.save_s - before.save_s),
    )


def _mixed(start: _Point, end: _Point, attempt: int, nodes: int) -> Iterator[TimeSlice]:
    """Steps, data and saves of a piece: sums only are known, so they stand one after the other."""
    seconds = end.t - start.t
    data = min(max(end.data_s - start.data_s, 0.0), seconds)
    save = min(max(end.save_s - start.save_s, 0.0), seconds - data)
    first, second = end.t - data - save, end.t - save
    yield from _slice(start.t, first, TimeClass.STEP, attempt, nodes)
    yield from _slice(max(start.t, first), second, TimeClass.DATA, attempt, nodes)
    yield from _slice(max(start.t, first, second), end.t, TimeClass.SAVE, attempt, nodes)
