"""From what each rank wrote to the one table of all chunks, checked to cover every tensor once.

A rank sends its part as columns, not as objects: with a thousand ranks of five hundred tensors
unpickling and merging objects takes rank 0 most of a minute.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.format.manifest import FileEntry, TensorEntry
from hpctrain.checkpoint.format.shard import DTYPES
from hpctrain.checkpoint.format.table import ChunkTable, elements, misplaced, numels, starts
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpctrain.checkpoint.format.shard import Piece, Report

KINDS = list(DTYPES)
ITEMSIZES = np.array(list(DTYPES.values()), np.int64)
SHOWN = 3
MOST_CELLS = 1 << 22
"""Of the grid in which boxes are painted: 32 MiB."""


@dataclass(frozen=True)
class RankPart:
    """One rank's file, or nothing of one, in a form that is small and quick to send.

    Attributes:
        file: Its entry in the manifest; None if the rank had nothing to write.
        names: The tensors' names, one for each chunk.
        dtype: Number in KINDS, for each chunk.
        ranks: Dimensions of each chunk's tensor.
        shape: The tensors' shapes, one behind the other.
        offset: Of each chunk in the file.
        dims: See `table.ChunkTable`, also for the rest.
    """

    file: FileEntry | None
    names: tuple[str, ...]
    dtype: NDArray[np.uint8]
    ranks: NDArray[np.uint8]
    shape: NDArray[np.int64]
    offset: NDArray[np.int64]
    dims: NDArray[np.uint8]
    flat: NDArray[np.uint8]
    begin: NDArray[np.int64]
    extent: NDArray[np.int64]
    digests: NDArray[np.uint64]

    def state_digests(self, block_bytes: int) -> NDArray[np.uint64]:
        """The digests of all blocks but those of random generators."""
        state = np.array([not name.startswith("rng.") for name in self.names], bool)
        nbytes = elements(self.dims.astype(np.int64), self.extent) * ITEMSIZES[self.dtype]
        kept: NDArray[np.uint64] = self.digests[np.repeat(state, -(-nbytes // block_bytes))]
        return kept


def part_of(pieces: Sequence[Piece], report: Report | None) -> RankPart:
    """What one rank has to say of its file; `report` is None where it wrote none."""
    if report is None:
        pieces = []
    return RankPart(
        file=FileEntry(report.name, report.size, report.digest) if report else None,
        names=tuple(piece.name for piece in pieces),
        dtype=np.array([KINDS.index(piece.dtype) for piece in pieces], np.uint8),
        ranks=np.array([len(piece.shape) for piece in pieces], np.uint8),
        shape=np.array([size for piece in pieces for size in piece.shape], np.int64),
        offset=report.offsets if report else np.zeros(0, np.int64),
        dims=np.array([len(piece.begin) for piece in pieces], np.uint8),
        flat=np.array([piece.flat for piece in pieces], np.uint8),
        begin=np.array([at for piece in pieces for at in piece.begin], np.int64),
        extent=np.array([size for piece in pieces for size in piece.extent], np.int64),
        digests=report.digests if report else np.zeros(0, np.uint64),
    )


def assemble(
    parts: Sequence[RankPart], block_bytes: int
) -> tuple[list[FileEntry], list[TensorEntry], ChunkTable]:
    """Files, tensors and chunks of a checkpoint from all ranks' parts.

    Raises:
        CheckpointError: ranks disagree on a tensor, or some element of one is written twice or by
            nobody.
    """
    parts = [part for part in parts if part.file is not None]
    tensors, numbers = _number(parts)
    table = ChunkTable(
        tensor=numbers,
        file=_joined([np.full(len(part.dims), file) for file, part in enumerate(parts)]),
        offset=_joined([part.offset for part in parts]),
        dims=_joined([part.dims for part in parts]),
        flat=_joined([part.flat for part in parts]),
        begin=_joined([part.begin for part in parts]),
        extent=_joined([part.extent for part in parts]),
        digests=np.concatenate([np.zeros(0, np.uint64), *(part.digests for part in parts)]),
        itemsize=ITEMSIZES[_joined([part.dtype for part in parts])],
        block_bytes=block_bytes,
    )
    require_cover(tensors, table)
    return [part.file for part in parts if part.file is not None], tensors, table


def _joined(columns: Sequence[NDArray[np.int64] | NDArray[np.uint8]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *columns]).astype(np.int64)


def _number(parts: Sequence[RankPart]) -> tuple[list[TensorEntry], NDArray[np.int64]]:
    """Every tensor once, and the number of each chunk's tensor, on which all ranks agree.

    Names are looked up in a loop, all else is compared as columns: each rank has names of its own
    (its random generators), so no two ranks' parts are alike.
    """
    numbers: dict[str, int] = {}
    rows = [numbers.setdefault(name, len(numbers)) for part in parts for name in part.names]
    tensor = np.array(rows, np.int64)
    dtype = _joined([part.dtype for part in parts])
    ranks = _joined([part.ranks for part in parts])
    shape = _joined([part.shape for part in parts])
    start = starts(ranks)

    def entry(name: str, row: int) -> TensorEntry:
        sizes = shape[start[row] : start[row + 1]].tolist()
        return TensorEntry(name, KINDS[dtype[row]], tuple(sizes))

    first = np.unique(tensor, return_index=True)[1]
    tensors = [entry(name, row) for name, row in zip(numbers, first.tolist(), strict=True)]
    like = first[tensor]
    odd = np.flatnonzero((dtype != dtype[like]) | (ranks != ranks[like]))
    if not len(odd):
        across = np.arange(len(shape)) + np.repeat(start[like] - start[:-1], ranks)
        odd = np.searchsorted(start, np.flatnonzero(shape != shape[across]), "right") - 1
    if len(odd):
        known = tensors[tensor[odd[0]]]
        other = entry(known.name, int(odd[0]))
        raise CheckpointError(f"ranks disagree on {known.name}: {known.text} and {other.text}")
    return tensors, tensor


def require_cover(tensors: Sequence[TensorEntry], table: ChunkTable) -> None:
    """Every element of every tensor lies in exactly one chunk.

    A region that no chunk covers would stay as it was at a load, silently (trap 8).

    Raises:
        CheckpointError: which tensor, and whether too much or too little of it is there.
    """
    outside = misplaced(tensors, table)
    if outside is not None:
        raise CheckpointError(
            f"the ranks' parts of {tensors[outside].name} reach out of its shape, "
            f"{tensors[outside].text}"
        )
    wanted = numels(tensors)
    got = np.bincount(
        table.tensor, weights=elements(table.dims, table.extent), minlength=len(tensors)
    ).astype(np.int64)
    bad = np.flatnonzero(wanted != got)
    if len(bad):
        shown = ", ".join(
            f"{tensors[i].name} has {wanted[i]:,} elements, {got[i]:,} were written"
            for i in bad[:SHOWN].tolist()
        )
        more = f" (and {len(bad) - SHOWN} more)" if len(bad) > SHOWN else ""
        raise CheckpointError(f"the ranks' parts do not make up the tensors: {shown}{more}")
    for number in np.flatnonzero(np.bincount(table.tensor) > 1).tolist():
        if not _tiles(tensors[number], table, table.rows_of(number)):
            raise CheckpointError(
                f"the ranks' parts of {tensors[number].name} overlap: some of it was written "
                "twice, some by nobody"
            )


def _tiles(entry: TensorEntry, table: ChunkTable, rows: NDArray[np.int64]) -> bool:
    """Whether chunks inside a tensor, with its number of elements in all, lie beside each other."""
    rows = rows[table.nbytes[rows] > 0]  # an empty one is in nobody's way
    if len(rows) <= 1:
        return True
    if table.flat[rows].any():
        begin, extent = _flat_ranges(entry, table, rows)
        return _line_up(begin, extent)
    begin, extent = table.boxes(rows)
    cut = np.flatnonzero((extent != np.array(entry.shape, np.int64)).any(axis=0))
    if len(cut) == 1:
        return _line_up(begin[:, cut[0]], extent[:, cut[0]])
    return _no_two_meet(begin[:, cut], extent[:, cut])


def _line_up(begin: NDArray[np.int64], extent: NDArray[np.int64]) -> bool:
    order = np.argsort(begin, kind="stable")
    ends = (begin + extent)[order]
    return bool((ends[:-1] <= begin[order][1:]).all())


def _no_two_meet(begin: NDArray[np.int64], extent: NDArray[np.int64]) -> bool:
    """Paint all boxes into a grid of their edges: where two meet, a cell is painted twice.

    A box adds and takes away 1 at its corners, and sums along each dimension fill it. Comparing
    each two boxes took 20 s for 500 tensors in 1,024 boxes each.
    """
    ends = begin + extent
    sides, sizes = [], []
    for low, high in zip(begin.T, ends.T, strict=True):
        edges, index = np.unique(np.concatenate([low, high]), return_inverse=True)
        sides.append(index.reshape(2, -1))
        sizes.append(len(edges))
    cells = math.prod(sizes)
    if cells > MOST_CELLS:
        return _no_pair_meets(begin, ends)
    painted = np.zeros(cells, np.int64)
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        at = np.zeros(len(begin), np.int64)
        for side, which, size in zip(sides, corner, sizes, strict=True):
            at = at * size + side[which]
        painted += (-1) ** sum(corner) * np.bincount(at, minlength=cells)
    painted = painted.reshape(sizes)
    for axis in range(len(sizes)):
        painted = painted.cumsum(axis=axis)
    return bool(painted.max() <= 1)


def _no_pair_meets(begin: NDArray[np.int64], ends: NDArray[np.int64]) -> bool:
    """The same, slow and in little memory: for boxes of which hardly two share an edge."""
    for row in range(len(begin) - 1):
        rest = slice(row + 1, None)
        meet = (np.maximum(begin[row], begin[rest]) < np.minimum(ends[row], ends[rest])).all(axis=1)
        if meet.any():
            return False
    return True


def _flat_ranges(
    entry: TensorEntry, table: ChunkTable, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chunks of a tensor as ranges of its row-major elements: first, number.

    Raises:
        CheckpointError: a box is no range, and so cannot stand beside flat ranges.
    """
    flat = table.flat[rows] == 1
    at = table.first_dim[rows[flat]]
    firsts, counts = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    firsts[flat], counts[flat] = table.begin[at], table.extent[at]
    for index in np.flatnonzero(~flat).tolist():
        pairs = slice(table.first_dim[rows[index]], table.first_dim[rows[index] + 1])
        span = as_range(entry.shape, table.begin[pairs].tolist(), table.extent[pairs].tolist())
        if span is None:
            raise CheckpointError(
                f"{entry.name} is stored as flat ranges and as boxes that are none"
            )
        firsts[index], counts[index] = span
    return firsts, counts


def as_range(
    shape: Sequence[int], begin: Sequence[int], extent: Sequence[int]
) -> tuple[int, int] | None:
    """A box as a range of row-major elements (first, number); None if it is not one.

    It is one if all dimensions behind the first cut one are whole, and all before it of extent 1.
    """
    first, number, stride, whole = 0, 1, 1, True
    for size, at, count in zip(reversed(shape), reversed(begin), reversed(extent), strict=True):
        if not whole and count != 1:
            return None
        first += at * stride
        number *= count
        stride *= size
        whole = whole and count == size
    return first, number
