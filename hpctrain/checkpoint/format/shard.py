"""One rank's file of a checkpoint: a valid safetensors file, its blocks' digests taken on the way.

The digests are the file's last tensor: the rank that writes the bytes writes them too, and nobody
gathers them.

The header carries what torch's own reader of safetensors needs to put shards together
(DCP_SHARDING_INFO), so that neither safetensors nor torch needs hpctrain to read a checkpoint. No
torch here: the writer process does not import it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import xxhash

from hpctrain.checkpoint.format.manifest import BLOCK_BYTES, BLOCKS_PREFIX, block_digest
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

Number = TypeVar("Number", int, "NDArray[np.int64]")
DTYPES: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Dtypes in safetensors' words, and the bytes of one element. Our own words are added below."""
SAFETENSORS = frozenset(DTYPES)
"""Dtypes that safetensors has words for."""
_BYTES = [
    "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4_X2", *(f"INT{bits}" for bits in range(1, 8)),
    *(f"UINT{bits}" for bits in range(1, 8)),
]  # fmt: skip
STORED: dict[str, tuple[str, tuple[int, ...]]] = {
    "C128": ("F64", (2,)),
    "C32": ("F16", (2,)),
    **dict.fromkeys(_BYTES, ("U8", ())),
}
"""Dtypes that safetensors does not have: as which they stand in a shard, and with which axes."""
DTYPES |= {word: DTYPES[kind] * (2 if axes else 1) for word, (kind, axes) in STORED.items()}
SUFFIX = ".safetensors"
DIGEST_BYTES = 8
WRITE_BYTES = 4 << 20
MAX_PARTS = 512
"""Buffers in one call of writev; the kernel takes 1,024."""


@dataclass(frozen=True)
class ShardPiece:
    """A part of a tensor that is stored together: a box of it, or a range of its elements.

    Attributes:
        dtype: One of DTYPES.
        shape: Of the whole tensor.
        begin: Where the box starts in each dimension; of a flat piece, its first element.
        extent: The box's size in each dimension; of a flat piece, its number of elements.
        flat: A range of the row-major elements instead of a box.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    extent: tuple[int, ...]
    flat: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    @cached_property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.extent) * DTYPES[self.dtype]


class PieceSources(Protocol):
    """The bytes of each piece; a sequence, or something that makes each when it is asked for."""

    def __getitem__(self, index: int, /) -> memoryview:
        """All bytes of one piece."""


class OneAtATime:
    """Pieces' bytes, each made when it is asked for and forgotten with the next.

    Several threads may ask where several write a shard; each piece may then be made more than once.
    """

    def __init__(self, make: Callable[[int], memoryview]) -> None:
        """Take what makes the bytes of a piece, given its index."""
        self._make = make
        self._last: tuple[int, memoryview] | None = None

    def __getitem__(self, index: int, /) -> memoryview:
        last = self._last
        if last is None or last[0] != index:
            self._last = last = (index, self._make(index))
        return last[1]


@dataclass(frozen=True)
class ShardReport:
    """What has been written.

    Attributes:
        digest: See `proof_digest`.
        head: Bytes before the first piece.
        offsets: Where each piece starts in the file, in bytes: int64 of shape [pieces].
        digests: Of all blocks, piece after piece: uint64 of shape [blocks].
    """

    name: str
    size: int
    digest: str
    head: int
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint64]


def file_name(rank: int) -> str:
    """The name of a rank's shard, e.g. ``shard-00003.safetensors``."""
    return f"shard-{rank:05d}{SUFFIX}"


def rank_of(name: str) -> int:
    """The rank whose shard has this name."""
    return int(name.removesuffix(SUFFIX).removeprefix("shard-"))


def blocks_of(nbytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many blocks a chunk of so many bytes has."""
    return -(-nbytes // block_bytes)


def proof(header: bytes, digests: NDArray[np.uint64]) -> bytes:
    """Return what a shard ends with: the digests of its header and of all blocks, in file order.

    So a reader of one block reads these few bytes and needs no other file. `header` includes its
    length; `digests` is uint64 of shape [blocks].
    """
    numbers = np.concatenate([np.array([block_digest(header)], np.uint64), digests])
    return numbers.astype("<u8").tobytes()


def proof_bytes(blocks: Number) -> Number:
    """How long the proof of a shard of so many blocks is; of many shards at once, as a column."""
    return DIGEST_BYTES * (1 + blocks)


def proof_digest(proof: bytes | bytearray) -> str:
    """Return the digest of a shard, which the manifest has: that of its proof.

    It is known when the blocks' digests are, and two files are the same if their digests are.
    """
    return BLOCKS_PREFIX + xxhash.xxh3_64_hexdigest(proof)


def header(pieces: Sequence[ShardPiece], name: str, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The safetensors header of a file of this name: these pieces, then the proof of them."""
    proof_key = f"digests@{name.removesuffix(SUFFIX)}"
    # First, so that a piece of that very name gets another key.
    entries: dict[str, object] = {proof_key: None}
    boxes: dict[str, dict[str, list[int]]] = {proof_key: {"saved_offsets": [0]}}
    position = blocks = 0
    for piece in pieces:
        key = _key(piece, entries)
        # Torch reads no file of which a key is not listed; one with its own key is by itself.
        begin = piece.begin if key == piece.name else (0,) * len(piece.extent)
        dtype, axes = STORED.get(piece.dtype, (piece.dtype, ()))
        boxes[key] = {"saved_offsets": [*begin, *(0 for _ in axes)]}
        end = position + piece.nbytes
        entries[key] = _entry(dtype, [*piece.extent, *axes], position, end)
        blocks += blocks_of(piece.nbytes, block_bytes)
        position = end
    size = proof_bytes(blocks)
    entries[proof_key] = _entry("U8", [size], position, position + size)
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(boxes)}
    return encode_header({"__metadata__": about, **entries})


def _entry(dtype: str, shape: Sequence[int], low: int, high: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [low, high]}


def encode_header(entries: dict[str, object]) -> bytes:
    """Length and JSON of a safetensors header, padded with spaces to a multiple of 8."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _key(piece: ShardPiece, taken: dict[str, object]) -> str:
    """The piece's key in the header: torch puts boxes together that stand under the name itself."""
    if not piece.flat and piece.name not in taken:
        return piece.name
    return f"{piece.name}@{'flat-' if piece.flat else ''}{'-'.join(map(str, piece.begin))}"


def write(
    path: Path,
    pieces: Sequence[ShardPiece],
    sources: PieceSources,
    *,
    block_bytes: int = BLOCK_BYTES,
    write_bytes: int = WRITE_BYTES,
    threads: int = 1,
    step: int | None = None,
) -> ShardReport:
    """Write a shard where no file is yet, and flush it to disk.

    With one thread, `sources` is indexed in order; a sequence that makes each piece when it is
    indexed keeps memory small. `block_bytes` get one digest, `write_bytes` go to the file system at
    a time. `step` is for the fault points only.

    Raises:
        OSError: the file system refused, or has another length; a part of the file may lie there.
    """
    head = header(pieces, path.name, block_bytes)
    sizes = [piece.nbytes for piece in pieces]
    offsets = len(head) + np.cumsum([0, *sizes], dtype=np.int64)
    blocks = np.cumsum([0, *(blocks_of(size, block_bytes) for size in sizes)], dtype=np.int64)
    points.reach("shard.open", path=path, step=step)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _put(file, [memoryview(head)], 0)
        digests = np.zeros(blocks[-1], np.uint64)
        job = _Job(path, file, pieces, sources, offsets, blocks, digests, block_bytes, step)
        windows = _windows(sizes, max(block_bytes, write_bytes // block_bytes * block_bytes))
        if threads > 1:
            with ThreadPoolExecutor(max_workers=threads) as pool:
                list(pool.map(job.write, windows))  # a list, so that an error is raised here
        else:
            for window in windows:
                job.write(window)
        _put(file, [memoryview(end := proof(head, digests))], int(offsets[-1]))
        points.reach("shard.flush", path=path, fd=file, step=step)
        size = _flush(file, int(offsets[-1]) + len(end))
    finally:
        os.close(file)
    points.reach("shard.done", path=path, step=step)
    return ShardReport(path.name, size, proof_digest(end), len(head), offsets[:-1], digests)


def _flush(file: int, size: int) -> int:
    """Flush to disk; return the size, or refuse a file of another length.

    The writer checks, so that rank 0 need not. It checks the open file after the flush, where a
    file system reports what it has dropped or cut.
    """
    os.fsync(file)
    there = os.fstat(file).st_size
    if there != size:
        raise OSError(errno.EIO, f"is {there:,} bytes after its flush, {size:,} were written")
    return size


@dataclass(frozen=True)
class _Job:
    """A shard that is being written; windows may be written by several threads.

    `offsets` and `blocks` are [pieces + 1]: where each piece starts in the file, in bytes, and the
    number of its first block. `digests` is [blocks], filled by `write`.
    """

    path: Path
    file: int
    pieces: Sequence[ShardPiece]
    sources: PieceSources
    offsets: NDArray[np.int64]
    blocks: NDArray[np.int64]
    digests: NDArray[np.uint64]
    block_bytes: int
    step: int | None

    def write(self, window: list[tuple[int, int, int]]) -> None:
        """Digest and write one window: each block is still in the cache when it is written."""
        parts: list[memoryview] = []
        for index, low, high in window:
            source = self._source(index)
            block = int(self.blocks[index]) + low // self.block_bytes
            for start in range(low, high, self.block_bytes):
                part = source[start : min(start + self.block_bytes, high)]
                self.digests[block] = block_digest(part)
                parts.append(part)
                block += 1
        size = sum(map(len, parts))
        points.reach("shard.write", path=self.path, fd=self.file, step=self.step, bytes=size)
        _put(self.file, parts, int(self.offsets[window[0][0]]) + window[0][1])

    def _source(self, index: int) -> memoryview:
        source, piece = memoryview(self.sources[index]).cast("B"), self.pieces[index]
        if len(source) != piece.nbytes:
            raise CheckpointError(
                f"{piece.name} has {len(source):,} bytes to write, its box takes {piece.nbytes:,}"
            )
        return source


def _windows(sizes: Sequence[int], window_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the pieces (piece, from, to) of each write call, next to each other in the file.

    `window_bytes` is a multiple of the block, so no window cuts a block.
    """
    window: list[tuple[int, int, int]] = []
    room = window_bytes
    for index, nbytes in enumerate(sizes):
        if window and nbytes > room:
            yield window
            window, room = [], window_bytes
        for low in range(0, nbytes, window_bytes):
            high = min(low + window_bytes, nbytes)
            window.append((index, low, high))
            room -= high - low
            if room <= 0:
                yield window
                window, room = [], window_bytes
    if window:
        yield window


def _put(file: int, parts: list[memoryview], position: int) -> None:
    """Write all of it: a call may take less than it was given, and takes 1,024 buffers at most."""
    first = 0
    while first < len(parts):
        count = os.pwritev(file, parts[first : first + MAX_PARTS], position)
        position += count
        while first < len(parts) and count >= len(parts[first]):
            count -= len(parts[first])
            first += 1
        if count:
            parts[first] = parts[first][count:]
