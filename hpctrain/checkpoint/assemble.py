"""From what each rank wrote to the one table of all chunks, checked to cover every tensor once.

A rank sends its part as columns, not as objects: with a thousand ranks of five hundred tensors
unpickling and merging objects takes rank 0 most of a minute (shared research `checkpoint.md` 4g).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.manifest import FileEntry, TensorEntry
from hpctrain.checkpoint.shard import DTYPES
from hpctrain.checkpoint.table import ChunkTable, elements, numels
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpctrain.checkpoint.shard import Piece, Report

KINDS = list(DTYPES)
SEPARATOR = "\0"
SHOWN = 3


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
    names: str
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
        names = self.names.split(SEPARATOR) if len(self.dtype) else []
        state = np.array([not name.startswith("rng.") for name in names], bool)
        itemsizes = np.array(list(DTYPES.values()), np.int64)[self.dtype]
        nbytes = elements(self.dims.astype(np.int64), self.extent) * itemsizes
        kept: NDArray[np.uint64] = self.digests[np.repeat(state, -(-nbytes // block_bytes))]
        return kept


def part_of(pieces: Sequence[Piece], report: Report | None) -> RankPart:
    """What one rank has to say of its file; `report` is None where it wrote none."""
    if report is None:
        pieces = []
    return RankPart(
        file=FileEntry(report.name, report.size, report.digest) if report else None,
        names=SEPARATOR.join(piece.name for piece in pieces),
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
    itemsizes = np.array(list(DTYPES.values()), np.int64)
    table = ChunkTable(
        tensor=_joined(numbers),
        file=np.repeat(np.arange(len(parts)), [len(part.dims) for part in parts]).astype(np.int64),
        offset=_joined([part.offset for part in parts]),
        dims=_joined([part.dims for part in parts]),
        flat=_joined([part.flat for part in parts]),
        begin=_joined([part.begin for part in parts]),
        extent=_joined([part.extent for part in parts]),
        digests=np.concatenate([np.zeros(0, np.uint64), *(part.digests for part in parts)]),
        itemsize=itemsizes[_joined([part.dtype for part in parts])],
        block_bytes=block_bytes,
    )
    require_cover(tensors, table)
    return [part.file for part in parts if part.file is not None], tensors, table


def _joined(columns: Sequence[NDArray[np.int64] | NDArray[np.uint8]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *columns]).astype(np.int64)


def _number(
    parts: Sequence[RankPart],
) -> tuple[list[TensorEntry], list[NDArray[np.int64]]]:
    """Every tensor once, and the numbers of each part's tensors.

    Ranks that hold the same names in the same order, the usual case, are looked up once.
    """
    numbers: dict[str, int] = {}
    tensors: list[TensorEntry] = []
    seen: dict[str, tuple[RankPart, NDArray[np.int64]]] = {}
    found: list[NDArray[np.int64]] = []
    for part in parts:
        like = seen.get(part.names)
        if like is not None and _same_tensors(like[0], part):
            found.append(like[1])
            continue
        mine = np.array([_lookup(entry, numbers, tensors) for entry in _entries(part)], np.int64)
        seen[part.names] = (part, mine)
        found.append(mine)
    return tensors, found


def _same_tensors(one: RankPart, other: RankPart) -> bool:
    return all(
        np.array_equal(getattr(one, column), getattr(other, column))
        for column in ("dtype", "ranks", "shape")
    )


def _entries(part: RankPart) -> list[TensorEntry]:
    names = part.names.split(SEPARATOR) if len(part.dtype) else []
    ends = np.cumsum(part.ranks, dtype=np.int64)
    shape = part.shape.tolist()
    return [
        TensorEntry(name, KINDS[kind], tuple(shape[end - count : end]))
        for name, kind, count, end in zip(
            names, part.dtype.tolist(), part.ranks.tolist(), ends.tolist(), strict=True
        )
    ]


def _lookup(entry: TensorEntry, numbers: dict[str, int], tensors: list[TensorEntry]) -> int:
    number = numbers.setdefault(entry.name, len(tensors))
    if number == len(tensors):
        tensors.append(entry)
    elif tensors[number] != entry:
        raise CheckpointError(
            f"ranks disagree on {entry.name}: {tensors[number].text} and {entry.text}"
        )
    return number


def require_cover(tensors: Sequence[TensorEntry], table: ChunkTable) -> None:
    """Every element of every tensor lies in exactly one chunk.

    A region that no chunk covers would stay as it was at a load, silently (trap 8).

    Raises:
        CheckpointError: which tensor, and whether too much or too little of it is there.
    """
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
    for number, entry in enumerate(tensors):
        rows = table.rows_of(number)
        if len(rows) > 1 and not _tiles(entry, table, rows):
            raise CheckpointError(
                f"the ranks' parts of {entry.name} overlap: some of it was written twice, "
                "some by nobody"
            )


def _tiles(entry: TensorEntry, table: ChunkTable, rows: NDArray[np.int64]) -> bool:
    """Whether chunks with the right number of elements in all lie beside each other."""
    if table.flat[rows].any():
        begin, extent = flat_ranges(entry, table, rows)
        return _line_up(begin, extent)
    begin, extent = table.boxes(rows)
    extent, begin = extent[extent.all(axis=1)], begin[extent.all(axis=1)]
    cut = [d for d in range(begin.shape[1]) if (extent[:, d] != entry.shape[d]).any()]
    if len(cut) == 1:
        return _line_up(begin[:, cut[0]], extent[:, cut[0]])
    return _no_two_meet(begin, extent)


def _line_up(begin: NDArray[np.int64], extent: NDArray[np.int64]) -> bool:
    begin, extent = begin[extent > 0], extent[extent > 0]  # an empty one is in nobody's way
    order = np.argsort(begin, kind="stable")
    ends = (begin + extent)[order]
    return bool((ends[:-1] <= begin[order][1:]).all())


def _no_two_meet(begin: NDArray[np.int64], extent: NDArray[np.int64]) -> bool:
    end = begin + extent
    for row in range(len(begin) - 1):
        rest = slice(row + 1, None)
        meet = (np.maximum(begin[row], begin[rest]) < np.minimum(end[row], end[rest])).all(axis=1)
        if meet.any():
            return False
    return True


def flat_ranges(
    entry: TensorEntry, table: ChunkTable, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chunks of a tensor as ranges of its row-major elements: first, number.

    Raises:
        CheckpointError: a box is no range, and so cannot stand beside flat ranges.
    """
    firsts, counts = [], []
    for row in rows.tolist():
        pairs = slice(table.first_dim[row], table.first_dim[row + 1])
        begin, extent = table.begin[pairs].tolist(), table.extent[pairs].tolist()
        if table.flat[row]:
            firsts.append(begin[0])
            counts.append(extent[0])
            continue
        span = as_range(entry.shape, begin, extent)
        if span is None:
            raise CheckpointError(
                f"{entry.name} is stored as flat ranges and as boxes that are none"
            )
        firsts.append(span[0])
        counts.append(span[1])
    return np.array(firsts, np.int64), np.array(counts, np.int64)


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
