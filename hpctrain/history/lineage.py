"""Lineage and progress of a run: which samples made the weights, and how far it is. Pure.

The lineage is the proof that each sample was used exactly once: attempt by attempt, with what a
restore went back behind cut away. tests/unit/history/test_lineage.py holds its promises,
tests/unit/history/test_attempts.py those of the progress.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpctrain.history.run_state import condensed, live
from hpctrain.run.event_fields import as_number, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpctrain.run.events import Event


@dataclass(frozen=True)
class LineagePiece:
    """Steps of one attempt that are in the final weights.

    Attributes:
        attempt: Which.
        first: First step.
        last: Last step, inclusive.
        sample_first: Global position of the first sample; None where the program does not tell.
        sample_last: Position after the last sample.
    """

    attempt: int | None
    first: int
    last: int
    sample_first: int | None
    sample_last: int | None


@dataclass
class Lineage:
    """What the final weights are made of, and what is wrong with it."""

    pieces: list[LineagePiece] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Gaps and overlaps, a line each; none means that every sample was used exactly once."""


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


def lineage(events: Iterable[Event]) -> Lineage:
    """The steps that made the final weights: what a restore went back behind is cut away."""
    pieces: list[LineagePiece] = []
    problems: list[str] = []
    for event in live(events):
        if event.kind == "restored":
            problems += _go_back(pieces, whole(event.data.get("step")) or 0, event.attempt)
        elif event.kind == "steps" and (piece := _piece(event)) is not None:
            pieces.append(piece)
    problems += [text for pair in _pairs(pieces) for text in _joint(*pair)]
    return Lineage(pieces, problems)


def coverage(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Ranges [first, last) of sample positions that made the final weights, in training order.

    Ranges that join are one: a run that used every sample exactly once has exactly one, from 0 on.
    """
    ranges: list[tuple[int, int]] = []
    for piece in lineage(events).pieces:
        if piece.sample_first is None or piece.sample_last is None:
            continue
        if ranges and ranges[-1][1] == piece.sample_first:
            ranges[-1] = (ranges[-1][0], piece.sample_last)
        else:
            ranges.append((piece.sample_first, piece.sample_last))
    return ranges


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


def _piece(event: Event) -> LineagePiece | None:
    data = event.data
    first, last = whole(data.get("first")), whole(data.get("last"))
    if first is None or last is None or last < first:
        return None
    samples = whole(data.get("sample_first")), whole(data.get("sample_last"))
    return LineagePiece(event.attempt, first, last, *samples)


def _go_back(pieces: list[LineagePiece], step: int, attempt: int | None) -> list[str]:
    """Take away the steps after `step`, which a restore has undone; says what is not known."""
    while pieces and pieces[-1].first > step:
        pieces.pop()
    if pieces and pieces[-1].last > step:
        pieces[-1], exact = _cut(pieces[-1], step)
        lies = f"attempt {attempt} restored step {step}, which lies inside a step mark"
        return [] if exact else [f"{lies}: its sample position is not exact"]
    last_known = pieces[-1].last if pieces else 0
    if last_known == step:
        return []
    missing = f"steps {last_known + 1} to {step} are not in the ledger"
    return [f"attempt {attempt} restored step {step}, but {missing}"]


def _cut(piece: LineagePiece, step: int) -> tuple[LineagePiece, bool]:
    """The part of a piece up to a step, and whether its sample position is exact."""
    if piece.sample_first is None or piece.sample_last is None:
        return replace(piece, last=step), True
    samples = (piece.sample_last - piece.sample_first) * (step - piece.first + 1)
    middle, rest = divmod(samples, piece.last - piece.first + 1)
    return replace(piece, last=step, sample_last=piece.sample_first + middle), rest == 0


def _pairs(pieces: Sequence[LineagePiece]) -> Iterator[tuple[LineagePiece, LineagePiece]]:
    before = LineagePiece(None, 0, 0, 0, 0)
    for piece in pieces:
        yield before, piece
        before = piece


def _joint(before: LineagePiece, after: LineagePiece) -> list[str]:
    """What is wrong where two pieces meet."""
    problems = _compare("step", before.last + 1, after.first, after.attempt)
    if before.sample_last is not None and after.sample_first is not None:
        problems += _compare("sample", before.sample_last, after.sample_first, after.attempt)
    return problems


def _compare(what: str, wanted: int, found: int, attempt: int | None) -> list[str]:
    if found == wanted:
        return []
    if found > wanted:
        return [f"gap: {what}s {wanted} to {found - 1} are missing before attempt {attempt}'s"]
    return [f"overlap: {what}s {found} to {wanted - 1} were used again by attempt {attempt}"]


def _marked(now: Progress, event: Event) -> Progress:
    first, last = whole(event.data.get("first")), whole(event.data.get("last"))
    if first is None or last is None:
        return now
    seconds, loss = as_number(event.data.get("seconds")), as_number(event.data.get("loss"))
    step_s = seconds / (last - first + 1) if seconds and last >= first else now.step_s
    return replace(now, step=last, loss=loss, step_s=step_s, seen=event.t)
