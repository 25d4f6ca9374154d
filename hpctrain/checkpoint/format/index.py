"""The chunk table as it lies on disk: where each part of each tensor lies, without a row for each.

Ranks of a program hold boxes that differ in little else than where they begin: rank 7 of a sharded
program holds of each tensor the seventh part. So files are put together whose chunks differ only in
that, a layout, and a few numbers describe a file in it: each chunk begins at such a number times
its extent, or at the number itself, or at 0. Of 16,384 ranks and 3,400 tensors that is half a
megabyte where rows would be a gigabyte. What is laid out in no order (parts of replicas) is a
layout of its own, as large as its rows.

The digests of the blocks are not in here: each shard ends with its own, and the manifest's digest
of the shard proves them. docs/development/checkpoint-format.md describes the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.format.manifest import MOST_ELEMENTS, TABLE_NAME
from hpctrain.checkpoint.format.shard import DTYPES, proof_bytes
from hpctrain.checkpoint.format.table import (
    ChunkTable,
    decode_columns,
    elements,
    encode_columns,
    not_a_table,
    numels,
    of_tensors,
    starts,
    tiles,
)
from hpctrain.errors import CheckpointError, TornCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from hpctrain.checkpoint.format.manifest import Manifest, TensorEntry
    from hpctrain.checkpoint.format.shard import ShardPiece

COLUMNS = (
    "pieces", "files", "numbers", "tensor", "own", "dims", "flat",
    "extent", "unit", "source", "file", "head", "number",
)  # fmt: skip
SHOWN = 3
FEW = 64
"""Files of a layout, of which all are taken rather than looked for."""


@dataclass(frozen=True)
class ChunkIndex:
    """All chunks of a checkpoint.

    Attributes:
        pieces: How many chunks each file of a layout has. [layouts]
        files: How many files have this layout. [layouts]
        numbers: How many numbers tell a file of it. [layouts]
        tensor: Number of the piece's tensor in the first file of its layout. [pieces]
        own: By how much that grows from one file of the layout to the next: 0 but for tensors that
            each rank has for itself. [pieces]
        dims: As in `ChunkTable`. [pieces]
        flat: The same. [pieces]
        extent: The same. [pairs], the sum of `dims`
        unit: 1 where a pair's number counts extents, 0 where it counts elements. [pairs]
        source: Which of its file's numbers says where the pair begins, from 1; 0 for those that
            begin at 0. [pairs]
        file: Number of the file, as the manifest counts them; layout after layout. [files]
        head: Bytes of the file before its first chunk. [files]
        number: The files' numbers, one file's behind the other's. [sum of files x numbers]
        itemsize: Bytes of an element; not on disk. [pieces]
        block_bytes: Bytes that one digest covers.
    """

    pieces: NDArray[np.int64]
    files: NDArray[np.int64]
    numbers: NDArray[np.int64]
    tensor: NDArray[np.int64]
    own: NDArray[np.int64]
    dims: NDArray[np.int64]
    flat: NDArray[np.int64]
    extent: NDArray[np.int64]
    unit: NDArray[np.int64]
    source: NDArray[np.int64]
    file: NDArray[np.int64]
    head: NDArray[np.int64]
    number: NDArray[np.int64]
    itemsize: NDArray[np.int64]
    block_bytes: int

    def dump(self) -> bytes:
        """The file's bytes."""
        return encode_columns({name: getattr(self, name) for name in COLUMNS})

    # ---- what follows from the columns

    @cached_property
    def first_piece(self) -> NDArray[np.int64]:
        """Where each layout's pieces start: [layouts + 1]."""
        return starts(self.pieces)

    @cached_property
    def first_file(self) -> NDArray[np.int64]:
        """Where each layout's files start in `file` and `head`: [layouts + 1]."""
        return starts(self.files)

    @cached_property
    def first_number(self) -> NDArray[np.int64]:
        """Where each layout's numbers start in `number`: [layouts + 1]."""
        return starts(self.files * self.numbers)

    @cached_property
    def first_dim(self) -> NDArray[np.int64]:
        """Where each piece's pairs start: [pieces + 1]."""
        return starts(self.dims)

    @cached_property
    def layout(self) -> NDArray[np.int64]:
        """Of each piece, its layout: [pieces]."""
        return np.repeat(np.arange(len(self.pieces)), self.pieces)

    @cached_property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes of each piece: [pieces]."""
        return elements(self.dims, self.extent) * self.itemsize

    @cached_property
    def blocks(self) -> NDArray[np.int64]:
        """Blocks of each piece: [pieces]."""
        return -(-self.nbytes // self.block_bytes)

    def before(self, column: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each piece, the sum of a column over the pieces before it in its file: [pieces]."""
        sums = starts(column)
        return sums[:-1] - sums[self.first_piece[:-1]][self.layout]

    @cached_property
    def layout_blocks(self) -> NDArray[np.int64]:
        """Blocks of a file of each layout: [layouts]."""
        return np.diff(starts(self.blocks)[self.first_piece])

    # ---- rows

    def rows(self, slot: NDArray[np.int64], piece: NDArray[np.int64]) -> ChunkTable:
        """Return the rows of some chunks, without their digests, sorted by file and offset.

        `slot` are entries of `file`, `piece` pieces of that file's layout; both int64 of shape
        [rows].
        """
        order = np.lexsort((piece, self.file[slot]))
        slot, piece = slot[order], piece[order]
        layout, dims = self.layout[piece], self.dims[piece]
        place = slot - self.first_file[layout]
        row = np.repeat(np.arange(len(piece)), dims)
        pair = np.arange(len(row)) - starts(dims)[:-1][row] + self.first_dim[piece][row]
        source = self.source[pair]
        at = (self.first_number[layout] + place * self.numbers[layout])[row] + source - 1
        number = self.number[np.maximum(at, 0)] if len(self.number) else np.zeros_like(at)
        number = np.where(source > 0, number, 0)
        extent = self.extent[pair]
        return ChunkTable(
            tensor=self.tensor[piece] + place * self.own[piece],
            file=self.file[slot],
            offset=self.head[slot] + self.before(self.nbytes)[piece],
            dims=dims,
            flat=self.flat[piece],
            begin=np.where(self.unit[pair] == 1, number * extent, number),
            extent=extent,
            digests=np.zeros(int(self.blocks[piece].sum()), np.uint64),
            itemsize=self.itemsize[piece],
            block_bytes=self.block_bytes,
            first_proof=self.before(self.blocks)[piece],
            file_blocks=self.layout_blocks[layout],
        )

    def whole(self) -> ChunkTable:
        """All rows."""
        return self.rows(*self._chunks(np.arange(len(self.tensor)))[:2])

    def of_file(self, number: int) -> ChunkTable:
        """The rows of one file; none for the table itself."""
        slots = np.flatnonzero(self.file == number)
        layout = np.searchsorted(self.first_file, slots, "right") - 1
        piece = np.concatenate(
            [np.arange(0), *(np.arange(*self.first_piece[at : at + 2]) for at in layout)]
        )
        return self.rows(np.resize(slots, len(piece)), piece)

    def _chunks(
        self, pieces: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return every chunk of some pieces: slot, piece, and the file's number in its layout."""
        counts = self.files[self.layout[pieces]]
        piece = np.repeat(pieces, counts)
        place = np.arange(len(piece)) - np.repeat(starts(counts)[:-1], counts)
        return self.first_file[self.layout[piece]] + place, piece, place

    # ---- what is wanted

    def select(self, regions: Sequence[ShardPiece], tensors: NDArray[np.int64]) -> ChunkTable:
        """Return the rows of all chunks that share something with the regions, and maybe some more.

        `tensors` has the number of each region's tensor: int64 of shape [regions].
        """
        piece, region = of_tensors(*self._by_tensor, tensors)
        layout = self.layout[piece]
        many = self.files[layout] > FEW
        bounds = _Bounds(regions if many.any() else [])
        own = np.isin(self._own[0], tensors)
        wanted = [(self._own[1][own], self._own[2][own]), self._chunks(piece[~many])[:2]]
        for number in np.unique(layout[many]).tolist():
            of_it = layout == number
            wanted.append(self._near(number, region[of_it], piece[of_it], bounds))
        slots, pieces = (np.concatenate(column) for column in zip(*wanted, strict=True))
        both = np.unique(np.stack([slots, pieces]), axis=1)
        return self.rows(both[0], both[1])

    @cached_property
    def _by_tensor(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The pieces of tensors that several files may have part of, by tensor; and of which."""
        shared = np.flatnonzero(self.own == 0)
        order = shared[np.argsort(self.tensor[shared], kind="stable")]
        return order, self.tensor[order]

    @cached_property
    def _own(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of each file's own tensors: number, slot and piece."""
        slot, piece, place = self._chunks(np.flatnonzero(self.own))
        return self.tensor[piece] + place * self.own[piece], slot, piece

    def _near(
        self,
        layout: int,
        region: NDArray[np.int64],
        piece: NDArray[np.int64],
        bounds: _Bounds,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots and pieces of one layout that may meet their regions, by the best dimension."""
        count, width = int(self.files[layout]), int(self.numbers[layout])
        low = self.first_number[layout]
        table = self.number[low : low + count * width].reshape(count, width)
        order = np.argsort(table, axis=0, kind="stable")
        ranked = np.take_along_axis(table, order, axis=0)
        first = np.zeros(len(piece), np.int64)
        last = np.full(len(piece), count)
        source = np.zeros(len(piece), np.int64)
        for dimension in range(int(self.dims[piece].max(initial=0))):
            for number in range(width + 1):
                at = np.flatnonzero(self.dims[piece] > dimension)
                at = at[self._pair(piece[at], dimension, self.source) == number]
                if not len(at):
                    continue
                begin, end = self._numbers(region[at], piece[at], dimension, bounds)
                if number:
                    column = ranked[:, number - 1]
                    from_, to = np.searchsorted(column, begin), np.searchsorted(column, end)
                else:  # all begin at 0
                    from_, to = np.zeros(len(at), np.int64), ((begin <= 0) & (end > 0)) * count
                better = at[to - from_ < last[at] - first[at]]
                chosen = np.isin(at, better)
                first[better], last[better], source[better] = from_[chosen], to[chosen], number
        counts = np.maximum(last - first, 0)
        which = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(which)) - starts(counts)[:-1][which] + first[which]
        sorted_by = np.concatenate([np.arange(count)[:, None], order], axis=1)
        return self.first_file[layout] + sorted_by[place, source[which]], piece[which]

    def _pair(
        self, piece: NDArray[np.int64], dimension: int, column: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return column[self.first_dim[piece] + dimension]

    def _numbers(
        self,
        region: NDArray[np.int64],
        piece: NDArray[np.int64],
        dimension: int,
        bounds: _Bounds,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The least number with which a piece reaches into its region, and one past the largest."""
        extent = self._pair(piece, dimension, self.extent)
        unit = np.where(self._pair(piece, dimension, self.unit) == 1, np.maximum(extent, 1), 1)
        low, high = bounds.of(region, dimension, self.flat[piece] == 1)
        return (low - extent) // unit + 1, -(-high // unit)

    # ---- whether it is right

    def require_cover(self, tensors: Sequence[TensorEntry]) -> None:
        """Every element of every tensor lies in exactly one chunk.

        Tensors of the same shape in the same layouts are alike: one of them is looked at.

        Raises:
            CheckpointError: which tensor, and whether too much or too little of it is there.
        """
        outside = self._misplaced(tensors)
        if outside is not None:
            raise CheckpointError(
                f"the ranks' parts of {tensors[outside].name} reach out of its shape, "
                f"{tensors[outside].text}"
            )
        self._require_elements(tensors)
        order, keys = self._by_tensor
        edges = np.flatnonzero(np.diff(keys, prepend=-1, append=len(tensors)))
        seen: set[tuple[object, ...]] = set()
        for low, high in pairwise(edges.tolist()):
            entry, pieces = tensors[int(keys[low])], order[low:high]
            if high - low == 1 and self.files[self.layout[pieces[0]]] == 1:
                continue
            kind = (entry.shape, self._shape_of(pieces))
            if kind in seen:
                continue
            seen.add(kind)
            rows = self.rows(*self._chunks(pieces)[:2])
            if not tiles(entry, rows, np.arange(len(rows))):
                raise CheckpointError(
                    f"the ranks' parts of {entry.name} overlap: some of it was written "
                    "twice, some by nobody"
                )

    def _shape_of(self, pieces: NDArray[np.int64]) -> bytes:
        pairs = np.concatenate([np.arange(*self.first_dim[at : at + 2]) for at in pieces.tolist()])
        columns = [
            self.layout[pieces], self.flat[pieces], self.dims[pieces],
            self.extent[pairs], self.unit[pairs], self.source[pairs],
        ]  # fmt: skip
        return np.concatenate(columns).tobytes()

    def _require_elements(self, tensors: Sequence[TensorEntry]) -> None:
        wanted, sizes = numels(tensors), elements(self.dims, self.extent)
        shared = self.own == 0
        got = np.zeros(len(tensors), np.int64)
        np.add.at(got, self.tensor[shared], (sizes * self.files[self.layout])[shared])
        numbers, _, piece = self._own
        np.add.at(got, numbers, sizes[piece])
        bad = np.flatnonzero(wanted != got)
        if len(bad):
            shown = ", ".join(
                f"{tensors[i].name} has {wanted[i]:,} elements, {got[i]:,} were written"
                for i in bad[:SHOWN].tolist()
            )
            more = f" (and {len(bad) - SHOWN} more)" if len(bad) > SHOWN else ""
            raise CheckpointError(f"the ranks' parts do not make up the tensors: {shown}{more}")

    def _misplaced(self, tensors: Sequence[TensorEntry]) -> int | None:
        """The number of a tensor with a chunk that is no part of its shape; None without one."""
        shapes = [tensors[number].shape for number in self.tensor.tolist()]
        own = np.array([len(shape) for shape in shapes], np.int64)
        is_flat = self.flat == 1
        odd = np.flatnonzero((self.flat > 1) | (self.dims != np.where(is_flat, 1, own)))
        if len(odd):
            return int(self.tensor[odd[0]])
        limit = np.array(
            [
                size
                for shape, line in zip(shapes, is_flat.tolist(), strict=True)
                for size in ((math.prod(shape),) if line else shape)
            ],
            np.int64,
        )
        # Not in whole numbers: foreign ones may be so large that their product runs over.
        begin = self._largest.astype(float) * np.where(self.unit == 1, self.extent, 1)
        inside = (begin <= MOST_ELEMENTS) & (self.extent <= limit)
        begin = np.where(inside, begin, 0).astype(np.int64)
        outside = np.flatnonzero(~inside | (begin > limit - self.extent))
        if not len(outside):
            return None
        piece = np.searchsorted(self.first_dim, outside[0], "right") - 1
        return int(self.tensor[piece])

    @cached_property
    def _largest(self) -> NDArray[np.int64]:
        """Of each pair, the largest number with which a file has it: [pairs]."""
        largest = np.zeros(len(self.extent), np.int64)
        layout = np.repeat(self.layout, self.dims)
        first = starts(self.numbers + 1)
        most = np.zeros(int(first[-1]), np.int64)
        for at in range(len(self.files)):
            low, high = self.first_number[at : at + 2].tolist()
            if low < high:
                table = self.number[low:high].reshape(int(self.files[at]), -1)
                most[first[at] + 1 : first[at + 1]] = table.max(axis=0)
        largest[:] = most[first[layout] + self.source] if len(layout) else 0
        return largest


class _Bounds:
    """Where regions lie: as boxes, and along the line of their tensors' elements."""

    def __init__(self, regions: Sequence[ShardPiece]) -> None:
        width = max((len(region.shape) for region in regions), default=0)
        boxes = np.zeros((2, len(regions), width + 1), np.int64)
        lines = np.zeros((2, len(regions)), np.int64)
        for at, region in enumerate(regions):
            low, high = _box(region)
            boxes[0, at, : len(low)], boxes[1, at, : len(high)] = low, high
            lines[:, at] = _line(region)
        self._boxes, self._lines = boxes, lines

    def of(
        self, region: NDArray[np.int64], dimension: int, flat: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        low, high = (
            np.where(flat, line[region], box[region, dimension])
            for line, box in zip(self._lines, self._boxes, strict=True)
        )
        return low, high


def _box(region: ShardPiece) -> tuple[list[int], list[int]]:
    if not region.flat:
        ends = [at + count for at, count in zip(region.begin, region.extent, strict=True)]
        return list(region.begin), ends
    if not region.shape:
        return [], []
    row = max(1, math.prod(region.shape[1:]))
    first, count = region.begin[0], region.extent[0]
    rest = list(region.shape[1:])
    return [first // row, *(0 for _ in rest)], [-(-(first + count) // row), *rest]


def _line(region: ShardPiece) -> tuple[int, int]:
    if region.flat:
        return region.begin[0], region.begin[0] + region.extent[0]
    first = last = 0
    for size, at, count in zip(region.shape, region.begin, region.extent, strict=True):
        first, last = first * size + at, last * size + at + count - 1
    return first, last + 1


def parse(content: bytes, manifest: Manifest) -> ChunkIndex:
    """The index that these bytes hold, checked against the manifest.

    Raises:
        TornCheckpoint: it is not one, or names what the manifest does not.
    """
    with not_a_table():
        columns = decode_columns(content, COLUMNS)
        whole = {name: column.astype(np.int64) for name, column in columns.items()}
        problem = next(_lengths(whole), None)
        if problem is None:
            sizes = np.array([DTYPES[entry.dtype] for entry in manifest.tensors], np.int64)
            itemsize = sizes[whole["tensor"]] if len(whole["tensor"]) else whole["tensor"]
            index = ChunkIndex(**whole, itemsize=itemsize, block_bytes=manifest.block_bytes)
            problem = next(_problems(index, manifest), None)
    if problem:
        raise TornCheckpoint(f"{TABLE_NAME} {problem}")
    return index


def _lengths(columns: dict[str, NDArray[np.int64]]) -> Iterator[str]:
    """Columns that are not as long as others say; counts first, so that no sum runs over."""
    of_each = {"pieces": "tensor", "files": "file", "numbers": "number", "dims": "extent"}
    for count, counted in of_each.items():
        if int(columns[count].max(initial=0)) > len(columns[counted]):
            yield f"has {len(columns[counted])} of {counted}, column {count} says more"
    made = {
        "files": len(columns["pieces"]), "numbers": len(columns["pieces"]),
        "own": len(columns["tensor"]), "dims": len(columns["tensor"]),
        "flat": len(columns["tensor"]), "unit": len(columns["extent"]),
        "source": len(columns["extent"]), "head": len(columns["file"]),
    }  # fmt: skip
    if any(len(columns[name]) != length for name, length in made.items()):
        yield "has columns of different lengths"
    made = {
        "tensor": int(columns["pieces"].sum()), "file": int(columns["files"].sum()),
        "number": int((columns["files"] * columns["numbers"]).sum()),
        "extent": int(columns["dims"].sum()),
    }  # fmt: skip
    for name, length in made.items():
        if len(columns[name]) != length:
            yield f"has {len(columns[name])} of {name}, its other columns need {length}"


def _problems(index: ChunkIndex, manifest: Manifest) -> Iterator[str]:
    """Yield what is at odds in an index; its bytes are proved, so these are a writer's mistakes."""
    count = len(manifest.tensors)
    if (index.pieces == 0).any() or (index.files == 0).any():
        yield "has a layout of nothing"
    last = index.tensor + index.own * (index.files[index.layout] - 1)
    if (index.own > count).any() or (last >= count).any():
        yield f"names a tensor beyond the {count} of the manifest"
    if (index.source > np.repeat(index.numbers[index.layout], index.dims)).any():
        yield "names a number that its file does not have"
    if (index.unit > 1).any():
        yield "has units that are none"
    outside = index._misplaced(manifest.tensors)  # noqa: SLF001 - of this module
    if outside is not None:
        yield f"names a chunk outside of {manifest.tensors[outside].name}"
    numbers, _, piece = index._own  # noqa: SLF001
    for number, first in zip(numbers.tolist(), index.tensor[piece].tolist(), strict=True):
        own, alike = manifest.tensors[number], manifest.tensors[first]
        if (own.dtype, own.shape) != (alike.dtype, alike.shape):
            yield f"takes {own.name} for another {alike.name}"
    named = [at for at, entry in enumerate(manifest.files) if entry.name != TABLE_NAME]
    if sorted(index.file.tolist()) != named:
        yield "does not name each of the manifest's files once"
    if _misfilled(index, manifest):
        yield "has chunks that do not fill their file"


def _misfilled(index: ChunkIndex, manifest: Manifest) -> bool:
    """A shard's digest is over all blocks in file order: in a hole, no byte would be proved."""
    if not len(index.file):
        return False
    # Not in whole numbers: foreign ones may be so large that their sum runs over.
    bytes_of = np.add.reduceat(index.nbytes.astype(float), index.first_piece[:-1])
    if (bytes_of > MOST_ELEMENTS).any():
        return True
    layout = np.repeat(np.arange(len(index.files)), index.files)
    inside = np.diff(starts(index.nbytes)[index.first_piece])[layout]
    ends = index.head + inside + proof_bytes(index.layout_blocks)[layout]
    sizes = np.array([manifest.files[at].size for at in index.file.tolist()], np.int64)
    return bool((ends != sizes).any())
