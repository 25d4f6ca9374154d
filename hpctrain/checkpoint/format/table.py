"""The chunk table in memory: where each part of each tensor lies, and the digests of its blocks.

Integer columns instead of JSON rows or pickled plans: half a million chunks are read in hundredths
of a second. On disk it is a safetensors file of 1-D columns, each in the narrowest type that holds
it, under another suffix than the shards', so that nobody takes it for weights: `index.py` knows
which.

docs/development/checkpoint-format.md describes the file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.format.manifest import TABLE_NAME, FileEntry, TensorEntry, bytes_digest
from hpctrain.checkpoint.format.shard import DTYPES, encode_header
from hpctrain.core.base.files import SMALL_BYTES, proves_absence, read_plain
from hpctrain.core.testing import points
from hpctrain.errors import (
    CheckpointError,
    FileSystemFault,
    IncompleteCheckpoint,
    TornCheckpoint,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hpctrain.checkpoint.format.manifest import Manifest

NARROW: dict[str, Any] = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
LARGEST = 2**62
"""No number of a table comes near it, so sums of two do not run over."""
KINDS = list(DTYPES)
ITEMSIZES = np.array(list(DTYPES.values()), np.int64)
MOST_PAINTED = 1 << 24
"""Cells of the grid in which boxes are painted, once for each corner of a box."""


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of a checkpoint, one row each, sorted by file and offset.

    Attributes:
        tensor: Number of the tensor, as the manifest counts them. [rows]
        file: Number of the file, as the manifest counts them. [rows]
        offset: Where the chunk starts in its file, in bytes. [rows]
        dims: How many (begin, extent) pairs the row has: the tensor's dimensions, or 1 if flat.
            [rows]
        flat: 1 for a range of row-major elements, 0 for a box. [rows]
        begin: The rows' pairs one behind the other. [pairs], the sum of `dims`
        extent: The same. [pairs]
        digests: xxh3_64 of each block of each chunk, one behind the other; filled in when a file is
            opened. [blocks]
        first_proof: Number of the row's first block in its file. [rows]
        file_blocks: How many blocks the row's file has. [rows]
        itemsize: Bytes of an element; not on disk. [rows]
        block_bytes: Bytes that one digest covers; a chunk's last block may be shorter.
    """

    tensor: NDArray[np.int64]
    file: NDArray[np.int64]
    offset: NDArray[np.int64]
    dims: NDArray[np.int64]
    flat: NDArray[np.int64]
    begin: NDArray[np.int64]
    extent: NDArray[np.int64]
    digests: NDArray[np.uint64]
    first_proof: NDArray[np.int64]
    file_blocks: NDArray[np.int64]
    itemsize: NDArray[np.int64]
    block_bytes: int

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def first_dim(self) -> NDArray[np.int64]:
        """Where each row's pairs start in `begin` and `extent`: [rows + 1]."""
        return starts(self.dims)

    @cached_property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes of each chunk: [rows]."""
        return elements(self.dims, self.extent) * self.itemsize

    @cached_property
    def first_block(self) -> NDArray[np.int64]:
        """Where each row's digests start in `digests`: [rows + 1]."""
        return starts(-(-self.nbytes // self.block_bytes))

    @cached_property
    def _by_tensor(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = np.argsort(self.tensor, kind="stable").astype(np.int64)
        return order, self.tensor[order]

    def rows_of(self, tensor: int) -> NDArray[np.int64]:
        """The rows of one tensor's chunks, in the order of the table."""
        return self.rows_of_all(np.array([tensor]))[0]

    def rows_of_all(
        self, tensors: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of many tensors' chunks, tensor after tensor, and the tensor of each row.

        One call for all: at a load, hundreds of calls of a few microseconds each add up. `tensors`
        is int64 of shape [tensors]. Both results, rows and indices into `tensors`, are int64 of
        shape [chunks of these].
        """
        return of_tensors(*self._by_tensor, tensors)

    def rows_in(self, file: int) -> tuple[int, int]:
        """First row, and one past the last row, of one file's chunks."""
        low, high = np.searchsorted(self.file, [file, file + 1])
        return int(low), int(high)

    def boxes(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return begin and extent of rows that all have the same number of dimensions.

        `rows` is int64 of shape [rows], both results [rows, dimensions].
        """
        dims = int(self.dims[rows[0]]) if len(rows) else 0
        index = self.first_dim[rows][:, None] + np.arange(dims)
        return self.begin[index], self.extent[index]


def read_file(path: Path, manifest: Manifest) -> bytes:
    """Read the bytes of a checkpoint's chunk table, proved by the manifest's digest of it.

    Raises:
        TornCheckpoint: missing, or damaged; the message is the reason.
        FileSystemFault: it cannot be read, and nobody knows what is in it.
    """
    entry = next((file for file in manifest.files if file.name == TABLE_NAME), None)
    if entry is None:
        raise TornCheckpoint(f"manifest names no {TABLE_NAME}")
    try:
        points.reach("read.table", path=path / TABLE_NAME, step=manifest.step)
        content = read_plain(path / TABLE_NAME, max(entry.size, SMALL_BYTES))
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{TABLE_NAME} is missing") from None
    except OSError as error:
        is_damage = proves_absence(error) or error.errno == errno.EFBIG
        kind = IncompleteCheckpoint if is_damage else FileSystemFault
        raise kind(f"{TABLE_NAME} cannot be read: {error}") from error
    if len(content) != entry.size:
        raise IncompleteCheckpoint(
            f"{TABLE_NAME} is {len(content):,} bytes, manifest says {entry.size:,}"
        )
    if bytes_digest(content) != entry.digest:
        raise TornCheckpoint(
            f"{TABLE_NAME}: digest {bytes_digest(content)}, manifest says {entry.digest} "
            "(damaged bytes)"
        )
    return content


@contextlib.contextmanager
def not_a_table() -> Iterator[None]:
    """What goes wrong in here with bytes of somebody's is said of the file.

    Raises:
        TornCheckpoint: it is not a chunk table.
    """
    try:
        yield
    except (KeyError, ValueError, IndexError, TypeError, RecursionError, struct.error) as error:
        raise TornCheckpoint(f"{TABLE_NAME} is not a chunk table: {error}") from error


def entry_of(content: bytes) -> FileEntry:
    """What the manifest says of a table with these bytes."""
    return FileEntry(TABLE_NAME, len(content), bytes_digest(content))


def encode_columns(columns: Mapping[str, NDArray[Any]]) -> bytes:
    """Columns of whole numbers as a safetensors file, each in the narrowest type that holds it."""
    entries: dict[str, object] = {}
    parts: list[bytes] = []
    position = 0
    for name, column in columns.items():
        kind = _narrowest(column)
        part = column.astype(np.dtype(NARROW[kind]).newbyteorder("<")).tobytes()
        offsets = [position, position + len(part)]
        entries[name] = {"dtype": kind, "shape": [len(column)], "data_offsets": offsets}
        parts.append(part)
        position += len(part)
    return encode_header(entries) + b"".join(parts)


def decode_columns(content: bytes, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The columns of these names.

    Raises:
        ValueError: and others of `not_a_table`: these bytes hold no such columns.
    """
    (length,) = struct.unpack_from("<Q", content)
    entries = json.loads(content[8 : 8 + length])
    data = memoryview(content)[8 + length :]
    columns = {}
    for name in names:
        low, high = entries[name]["data_offsets"]
        dtype = np.dtype(NARROW[entries[name]["dtype"]]).newbyteorder("<")
        column = np.frombuffer(data[low:high], dtype)
        if name != "digests" and len(column) and int(column.max()) > LARGEST:
            raise ValueError(f"column {name} holds {column.max()}")
        columns[name] = column
    return columns


def elements(dims: NDArray[np.int64], extent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the product of each row's extents, int64 of shape [rows]; 1 for a scalar.

    `dims` is the number of extents of each row, `extent` all of them one behind the other.
    """
    product = np.ones(len(dims), np.int64)
    filled = dims > 0
    first = starts(dims)[:-1][filled]
    if len(first):
        product[filled] = np.multiply.reduceat(extent, first)
    return product


def numels(tensors: Sequence[TensorEntry]) -> NDArray[np.int64]:
    """How many elements each tensor has: int64 of shape [tensors]."""
    return np.array([int(np.prod(entry.shape, dtype=np.int64)) for entry in tensors], np.int64)


def of_tensors(
    order: NDArray[np.int64], keys: NDArray[np.int64], tensors: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what is of many tensors, tensor after tensor, and the index in `tensors` of each.

    `order` are rows or pieces by tensor, `keys` the tensor of each, ascending.
    """
    low, high = np.searchsorted(keys, [tensors, tensors + 1])
    owner = np.repeat(np.arange(len(tensors)), high - low)
    place = np.arange(len(owner)) - starts(high - low)[:-1][owner]
    return order[low[owner] + place], owner


def starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each begins if they lie one behind the other, and the end of the last.

    `counts` are lengths, int64 of shape [n]; the result is [n + 1] and begins with 0.
    """
    begins = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=begins[1:])
    return begins


def _narrowest(column: NDArray[Any]) -> str:
    largest = int(column.max()) if len(column) else 0
    return next(kind for kind, dtype in NARROW.items() if largest <= np.iinfo(dtype).max)


def tiles(entry: TensorEntry, table: ChunkTable, rows: NDArray[np.int64]) -> bool:
    """Whether chunks inside a tensor, with its number of elements in all, lie beside each other.

    `rows` is int64 of shape [chunks].
    """
    rows = rows[table.nbytes[rows] > 0]  # an empty one is in nobody's way
    if len(rows) <= 1:
        return True
    if table.flat[rows].any():
        shape = np.broadcast_to(np.array(entry.shape, np.int64), (len(rows), len(entry.shape)))
        first, count, is_range = row_ranges(table, rows, shape)
        if not is_range.all():
            raise CheckpointError(
                f"{entry.name} is stored as flat ranges and as boxes that are none"
            )
        return _line_up(first, count)
    begin, extent = table.boxes(rows)
    cut = np.flatnonzero((extent != np.array(entry.shape, np.int64)).any(axis=0))
    if len(cut) == 1:
        return _line_up(begin[:, cut[0]], extent[:, cut[0]])
    return not boxes_meet(begin[:, cut], (begin + extent)[:, cut])


def _line_up(begin: NDArray[np.int64], extent: NDArray[np.int64]) -> bool:
    order = np.argsort(begin, kind="stable")
    ends = (begin + extent)[order]
    return bool((ends[:-1] <= begin[order][1:]).all())


def boxes_meet(low: NDArray[np.int64], high: NDArray[np.int64]) -> bool:
    """Whether any two boxes share an element; `low` and `high` are [boxes, dimensions].

    All boxes are painted into a grid: where two meet, a cell has 2. A box adds and takes away 1 at
    its corners; sums along each dimension fill it. Comparing all pairs took 20 s for 500 tensors of
    1,024 boxes each; it is left for boxes of which hardly two share an edge.
    """
    boxes, dimensions = low.shape
    if boxes < 2 or not dimensions:  # noqa: PLR2004 - a pair
        return bool(boxes > 1)
    sides, sizes = [], []
    for begin, end in zip(low.T, high.T, strict=True):
        edges, index = np.unique(np.concatenate([begin, end]), return_inverse=True)
        sides.append(index.reshape(2, -1))
        sizes.append(len(edges))
    cells = math.prod(sizes)
    if cells << dimensions > MOST_PAINTED:
        return any(
            bool((np.maximum(low[i], low[:i]) < np.minimum(high[i], high[:i])).all(axis=1).any())
            for i in range(1, boxes)
        )
    painted = np.zeros(cells, np.int64)
    for corner in itertools.product((0, 1), repeat=dimensions):
        at = np.zeros(boxes, np.int64)
        for side, which, size in zip(sides, corner, sizes, strict=True):
            at = at * size + side[which]
        painted += (-1) ** sum(corner) * np.bincount(at, minlength=cells)
    painted = painted.reshape(sizes)
    for axis in range(dimensions):
        painted = painted.cumsum(axis=axis)
    return bool(painted.max() > 1)


def row_ranges(
    table: ChunkTable, rows: NDArray[np.int64], shape: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return rows as ranges of row-major elements: first, number, and whether they are ranges.

    `shape` is that of each row's tensor, all with as many dimensions: int64 of shape [rows,
    dimensions]. The results are [rows].
    """
    flat = table.flat[rows] > 0
    first, count = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    is_range = np.ones(len(rows), bool)
    at = table.first_dim[rows[flat]]
    first[flat], count[flat] = table.begin[at], table.extent[at]
    if not flat.all():
        begin, extent = table.boxes(rows[~flat])
        first[~flat], is_range[~flat] = place_in(begin, extent, shape[~flat])
        count[~flat] = extent.prod(axis=1)
    return first, count, is_range


def place_in(
    at: NDArray[np.int64], count: NDArray[np.int64], size: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the first element's number of boxes within larger ones, and whether they are runs.

    A box is a run if all dimensions behind the first cut one are complete, and those before have
    size 1. Arguments are [boxes, dimensions], results [boxes].
    """
    first, stride = np.zeros(len(at), np.int64), np.ones(len(at), np.int64)
    run, whole = np.ones(len(at), bool), np.ones(len(at), bool)
    for dimension in reversed(range(at.shape[1])):
        run &= whole | (count[:, dimension] == 1)
        first += at[:, dimension] * stride
        whole &= count[:, dimension] == size[:, dimension]
        stride *= size[:, dimension]
    return first, run
