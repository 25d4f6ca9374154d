"""The lineage of a run: which samples made the weights. Pure.

It is the proof that each sample was used exactly once: attempt by attempt, with what a restore went
back behind cut away. tests/unit/history/test_lineage.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpctrain.ledger.history.run_records import Restore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import Hole, Rewind, StepMark


@dataclass(frozen=True)
class LineagePiece:
    """Steps `first` to `last` of one attempt, both inclusive, that are in the final weights.

    Attributes:
        sample_first: Global position of the first sample; None where the program does not tell.
        sample_last: Position after the last sample.
    """

    attempt: int | None
    first: int
    last: int
    sample_first: int | None
    sample_last: int | None


@dataclass(frozen=True)
class LineageHole:
    """Samples that were not trained on, since a guard has left their update or themselves out.

    Positions are as in `LineagePiece`; `why` is "nonfinite" or "spike".
    """

    attempt: int | None
    step: int
    sample_first: int | None
    sample_last: int | None
    why: str


@dataclass
class Lineage:
    """What the final weights are made of, and what is wrong with it."""

    pieces: list[LineagePiece] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Gaps and overlaps, a line each; none means that every sample was used exactly once, or lies
    in one of the holes."""
    holes: list[LineageHole] = field(default_factory=list)


def lineage(history: RunHistory) -> Lineage:
    """The steps that made the final weights: what a restore went back behind is cut away."""
    pieces: list[LineagePiece] = []
    problems: list[str] = []
    for point in history.training:
        if isinstance(point, Restore):
            problems += _go_back(pieces, point, history.rewinds)
        elif (piece := _piece(point)) is not None:
            pieces.append(piece)
    problems += [text for pair in _pairs(pieces) for text in _joint(*pair)]
    holes = [_hole(point) for point in history.holes]
    problems += [text for hole in holes if (text := _misplaced(hole, pieces))]
    for rewind in history.rewinds:
        hole = rewind.hole
        if hole is not None:
            fact = rewind.fact
            holes.append(LineageHole(rewind.attempt, fact.step or 0, *hole, fact.why))
            if history.rewound_to is None:  # else the restore that goes behind it is to come
                problems += [text for piece in pieces if (text := _met(rewind, hole, piece))]
    return Lineage(pieces, problems, holes)


def _comes_by(piece: LineagePiece, rewind: Rewind) -> bool:
    """Whether the piece was made when the rewind's samples were left out already."""
    return None not in {piece.attempt, rewind.attempt} and (
        (piece.attempt or 0) > (rewind.attempt or 0)
    )


def _met(rewind: Rewind, hole: tuple[int, int], piece: LineagePiece) -> str:
    """What is wrong where a piece meets samples that are left out; "" for nothing."""
    if piece.sample_first is None or piece.sample_last is None:
        return ""
    first, last = max(hole[0], piece.sample_first), min(hole[1], piece.sample_last)
    if first >= last or (_comes_by(piece, rewind) and (first, last) == hole):
        return ""
    return (
        f"hole: samples {hole[0]} to {hole[1] - 1} are left out since step {rewind.fact.step}, and "
        f"attempt {piece.attempt} used {first} to {last - 1}"
    )


def _hole(point: Hole) -> LineageHole:
    fact = point.fact
    return LineageHole(point.attempt, fact.step or 0, fact.first, fact.last, fact.why)


def _misplaced(hole: LineageHole, pieces: Sequence[LineagePiece]) -> str:
    """What is wrong with a hole: it is where its step has no samples; "" for nothing.

    A step whose mark is not written yet has none so far.
    """
    own = next((piece for piece in pieces if piece.first <= hole.step <= piece.last), None)
    if own is None or None in {hole.sample_first, hole.sample_last, own.sample_first}:
        return ""
    first, last = hole.sample_first or 0, hole.sample_last or 0
    if (own.sample_first or 0) <= first <= last <= (own.sample_last or 0):
        return ""
    return f"hole: samples {first} to {last - 1} are left out in step {hole.step}, which has others"


def _piece(mark: StepMark) -> LineagePiece | None:
    fact = mark.fact
    if not mark.steps or fact.first is None or fact.last is None:
        return None
    return LineagePiece(mark.attempt, fact.first, fact.last, fact.sample_first, fact.sample_last)


def _go_back(pieces: list[LineagePiece], restore: Restore, rewinds: Sequence[Rewind]) -> list[str]:
    """Take away the steps that a restore has undone; says what is not known."""
    step, attempt = restore.step, restore.attempt
    while pieces and pieces[-1].first > step:
        pieces.pop()
    if pieces and pieces[-1].last > step:
        own = (each.hole for each in rewinds if _comes_by(pieces[-1], each))
        pieces[-1], exact = _cut(pieces[-1], step, [hole for hole in own if hole is not None])
        lies = f"attempt {attempt} restored step {step}, which lies inside a step mark"
        return [] if exact else [f"{lies}: its sample position is not exact"]
    last_known = pieces[-1].last if pieces else 0
    if last_known == step:
        return []
    missing = f"steps {last_known + 1} to {step} are not in the ledger"
    return [f"attempt {attempt} restored step {step}, but {missing}"]


def _cut(
    piece: LineagePiece, step: int, left_out: Sequence[tuple[int, int]]
) -> tuple[LineagePiece, bool]:
    """The part of a piece up to a step, and whether its sample position is exact."""
    if piece.sample_first is None or piece.sample_last is None:
        return replace(piece, last=step), True
    inside = [h for h in left_out if piece.sample_first <= h[0] and h[1] <= piece.sample_last]
    used = piece.sample_last - piece.sample_first - sum(last - first for first, last in inside)
    middle, rest = divmod(used * (step - piece.first + 1), piece.last - piece.first + 1)
    end = piece.sample_first + middle
    for first, last in sorted(inside):
        if first < end:
            end += last - first
    return replace(piece, last=step, sample_last=end), rest == 0


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


def _compare(what: str, wanted: int, actual: int, attempt: int | None) -> list[str]:
    if actual == wanted:
        return []
    if actual > wanted:
        return [f"gap: {what}s {wanted} to {actual - 1} are missing before attempt {attempt}'s"]
    return [f"overlap: {what}s {actual} to {wanted - 1} were used again by attempt {attempt}"]
