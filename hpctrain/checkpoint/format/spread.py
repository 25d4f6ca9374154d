"""Who writes which part of what several ranks hold alike: each byte once, evenly. Pure.

All replicas compute the same cuts from the same boxes, so nothing is exchanged. The boxes are laid
end to end as one line of bytes and the line is cut into equal parts; a cut inside a box goes to the
nearest row, so that every part of it is a box again.
"""

from __future__ import annotations

import bisect
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.checkpoint.format.shard import Piece


def my_part(pieces: Sequence[Piece], replica: int, replicas: int) -> list[tuple[int, Piece]]:
    """The part of the pieces that one replica writes; those of all replicas make up the pieces.

    Args:
        pieces: Boxes, the same on every replica and in the same order.
        replica: Which replica, from 0.
        replicas: How many hold these boxes.

    Returns:
        Number of the piece in `pieces`, and the part of it.
    """
    if replicas == 1:
        return list(enumerate(pieces))
    starts = [0, *accumulate(piece.nbytes for piece in pieces)]
    low = _cut(pieces, starts, replica, replicas)
    high = _cut(pieces, starts, replica + 1, replicas)
    mine = []
    for number, piece in enumerate(pieces):
        begin, end = max(low, starts[number]), min(high, starts[number + 1])
        if begin < end:
            mine.append((number, _rows(piece, begin - starts[number], end - starts[number])))
        elif (
            not piece.nbytes and replica == 0
        ):  # an empty tensor has a name and a shape all the same
            mine.append((number, piece))
    return mine


def _cut(pieces: Sequence[Piece], starts: Sequence[int], number: int, replicas: int) -> int:
    """The byte of the line at which part `number` starts, moved to the nearest row."""
    position = starts[-1] * number // replicas
    if position in {0, starts[-1]}:
        return position
    at = bisect.bisect_right(starts, position) - 1
    row = _row_bytes(pieces[at])
    return starts[at] + (position - starts[at] + row // 2) // row * row


def _row_bytes(piece: Piece) -> int:
    dimension = _cut_dimension(piece)
    return piece.nbytes if dimension is None else piece.nbytes // piece.extent[dimension]


def _cut_dimension(piece: Piece) -> int | None:
    """The first dimension that can be cut; those before it have extent 1."""
    return next((d for d, count in enumerate(piece.extent) if count > 1), None)


def _rows(piece: Piece, low: int, high: int) -> Piece:
    """The box of bytes [low, high) of a piece, which begin and end at rows."""
    dimension = _cut_dimension(piece)
    if dimension is None or (low == 0 and high == piece.nbytes):
        return piece
    row = _row_bytes(piece)
    begin, extent = list(piece.begin), list(piece.extent)
    begin[dimension] += low // row
    extent[dimension] = (high - low) // row
    return replace(piece, begin=tuple(begin), extent=tuple(extent))
