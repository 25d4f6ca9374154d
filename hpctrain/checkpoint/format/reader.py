"""Reads this rank's part of a checkpoint of any number of ranks, and proves every byte used.

`CheckpointSource.read` fills memory from the checkpoint's files. Bytes go straight from the file to
where they are wanted, and each block is digested while it is still in the cache.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from hpctrain.checkpoint.format import index as indices
from hpctrain.checkpoint.format import table as tables
from hpctrain.checkpoint.format.geometry import overlap
from hpctrain.checkpoint.format.manifest import PREFIX, block_digest
from hpctrain.checkpoint.format.shard import DIGEST_BYTES, proof_bytes, proof_digest
from hpctrain.core.base.files import Patience, plain_descriptor, proves_absence
from hpctrain.core.testing import points
from hpctrain.errors import (
    CheckpointError,
    FileSystemFault,
    IncompleteCheckpoint,
    TornCheckpoint,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hpctrain.checkpoint.format.geometry import Grid, Overlap
    from hpctrain.checkpoint.format.index import ChunkIndex
    from hpctrain.checkpoint.format.manifest import Manifest, TensorEntry
    from hpctrain.checkpoint.format.shard import ShardPiece
    from hpctrain.checkpoint.format.table import ChunkTable

T = TypeVar("T")
WINDOW_BYTES = 1 << 20
"""Read in one call. More is not faster, and would no longer be in the cache when it is digested."""
MAX_PARTS = 256
"""Chunks in one call; each takes three buffers at most, and the kernel takes 1,024."""
SHOWN = 3


class ChunkFiles:
    """A checkpoint's files for one thread: one is open at a time, beside memory for a window."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        patience: Patience | None = None,
        descriptor: Callable[[Path], int] = plain_descriptor,
    ) -> None:
        self._path = path
        self._manifest = manifest
        self._descriptor = descriptor
        self._patience = patience or Patience()
        self._open: tuple[int, int, Path] | None = None
        nbytes = window_blocks(manifest.block_bytes) * manifest.block_bytes
        self.scratch: memoryview = np.empty(nbytes, np.uint8).data

    def read(self, number: int, buffers: list[memoryview], position: int) -> int:
        """Fill at most 1,024 buffers from one file, one behind the other; return their bytes.

        Raises:
            IncompleteCheckpoint: the file is missing or ends too early.
            FileSystemFault: it cannot be read; that proves no damage.
        """
        return self._patience(lambda: self._read(number, buffers, position))

    def _read(self, number: int, buffers: list[memoryview], position: int) -> int:
        name, step = self._manifest.files[number].name, self._manifest.step
        wanted = sum(map(len, buffers))
        try:
            file, path = self._file(number, name)
            points.reach("read.block", path=path, fd=file, step=step, bytes=wanted)
            done = os.preadv(file, buffers, position)
            while done < wanted:  # a call may give less than it was asked for
                count = os.preadv(file, _rest(buffers, done), position + done)
                if not count:
                    size, said = os.fstat(file).st_size, self._manifest.files[number].size
                    self.close()
                    raise IncompleteCheckpoint(
                        f"shard {name} is {size:,} bytes, manifest says {said:,}"
                    )
                done += count
        except FileNotFoundError:
            raise IncompleteCheckpoint(f"shard {name} is missing") from None
        except OSError as error:
            self.close()  # a stale handle stays stale
            kind = IncompleteCheckpoint if proves_absence(error) else FileSystemFault
            raise kind(f"shard {name} cannot be read: {error}") from error
        return done

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            os.close(self._open[1])
        self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, number: int, name: str) -> tuple[int, Path]:
        if self._open is None or self._open[0] != number:
            self.close()
            path = self._path / name
            self._open = number, self._descriptor(path), path
        return self._open[1:]


class Shared(Generic[T]):
    """An iterator that several threads take from."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = Lock()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)

    def stop(self) -> None:
        """Give nothing more."""
        with self._lock:
            self._items = iter(())


def in_threads(items: Iterable[T], threads: int, work: Callable[[Iterator[T]], int]) -> int:
    """Let threads take items until there are none; returns the sum of what `work` returns.

    The first error stops all of them, and is raised.
    """
    shared = Shared(items)

    def run() -> int:
        try:
            return work(shared)
        except BaseException:
            shared.stop()
            raise

    if threads <= 1:
        return run()
    with ThreadPoolExecutor(max_workers=threads) as pool:
        futures = [pool.submit(run) for _ in range(threads)]
        try:
            return sum(future.result() for future in futures)
        except BaseException:  # also an interrupt of this thread, which waits for the others
            shared.stop()
            raise


def window_blocks(block_bytes: int) -> int:
    """How many blocks are read in one call."""
    return max(1, WINDOW_BYTES // block_bytes)


def damage(manifest: Manifest, table: ChunkTable, row: int, block: int, digest: int) -> str:
    """The line for a block that is not what was written: file, tensor and place."""
    name = manifest.files[int(table.file[row])].name
    pairs = slice(int(table.first_dim[row]), int(table.first_dim[row + 1]))
    begin, extent = table.begin[pairs].tolist(), table.extent[pairs].tolist()
    place = ", ".join(f"{at}:{at + count}" for at, count in zip(begin, extent, strict=True))
    kind = "elements" if table.flat[row] else "box"
    said = int(table.digests[table.first_block[row] + block])
    return (
        f"{name}: {manifest.tensors[int(table.tensor[row])].name}, block {block} of {kind} "
        f"[{place}]: digest {PREFIX}{digest:016x}, manifest says {PREFIX}{said:016x} "
        "(damaged bytes)"
    )


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Buffers without their first bytes."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


class Target(NamedTuple):
    """Where a part of a tensor is to go."""

    piece: ShardPiece
    """Which part; its cuts need not be those of the chunks."""
    buffer: Any
    """Writable memory of exactly these elements, row-major and without gaps."""


class BlockRun(NamedTuple):
    """Blocks of one chunk, all or part of which go to one destination as they are."""

    row: int
    first: int
    """Its first block."""
    last: int
    """One past its last block."""
    low: int
    """The first byte of the chunk that is wanted."""
    high: int
    shift: int
    """From a position in the chunk to one in the destination."""
    memory: memoryview


class Scattered(NamedTuple):
    """Blocks of one chunk, the bytes of which go to many places."""

    row: int
    first: int
    last: int
    grids: list[tuple[Grid, memoryview]]


class ReadWindow(NamedTuple):
    """What one call reads."""

    file: int
    position: int
    content: list[BlockRun] | Scattered


def open_chunks(path: Path, manifest: Manifest) -> ChunkIndex:
    """Read where the chunks of a checkpoint lie.

    Raises:
        TornCheckpoint: missing, damaged, or at odds with the manifest; the message is the reason.
        FileSystemFault: it cannot be read, and nobody knows what is in it.
    """
    return indices.parse(tables.read_file(path, manifest), manifest)


class Proofs:
    """The digests of blocks: a shard's are read, and proved, when the first of its blocks is.

    Several threads use one.
    """

    def __init__(self, manifest: Manifest, table: ChunkTable) -> None:
        self._manifest = manifest
        self._table = table
        self._left = {*table.file.tolist()}
        self._lock = Lock()

    def need(self, files: ChunkFiles, number: int) -> int:
        """Have the digests of a file's chunks in the table; returns the bytes read for it.

        Raises:
            TornCheckpoint: the file's own list of digests is damaged.
            IncompleteCheckpoint: the file is missing or ends too early.
            FileSystemFault: it cannot be read; that proves no damage.
        """
        with self._lock:
            if number not in self._left:
                return 0
            count = self._fill(files, number)
            self._left.remove(number)
            return count

    def _fill(self, files: ChunkFiles, number: int) -> int:
        table = self._table
        low, high = table.rows_in(number)
        entry = self._manifest.files[number]
        content = bytearray(proof_bytes(int(table.file_blocks[low])))
        files.read(number, [memoryview(content)], entry.size - len(content))
        if proof_digest(content) != entry.digest:
            raise TornCheckpoint(
                f"{entry.name}: digests [{entry.size - len(content)}:{entry.size}]: digest of the "
                f"file {proof_digest(content)}, manifest says {entry.digest} (damaged bytes)"
            )
        digests = np.frombuffer(content, "<u8", offset=DIGEST_BYTES)
        counts = np.diff(table.first_block[low : high + 1])
        row = np.repeat(np.arange(high - low), counts)
        place = np.arange(len(row)) - tables.starts(counts)[:-1][row]
        first, last = table.first_block[[low, high]]
        table.digests[first:last] = digests[table.first_proof[low:high][row] + place]
        return len(content)


class CheckpointSource:
    """A checkpoint to read from."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        chunks: ChunkIndex,
        patience: Patience | None = None,
        descriptor: Callable[[Path], int] = plain_descriptor,
    ) -> None:
        """Take a chunk table that is known already; see `open` for one on disk.

        `descriptor` opens one of the checkpoint's files, which need not lie on disk.
        """
        self._descriptor = descriptor
        self._patience = patience or Patience()
        self.path = path
        self.manifest = manifest
        self._chunks = chunks

    @classmethod
    def open(
        cls, path: Path, manifest: Manifest, patience: Patience | None = None
    ) -> CheckpointSource:
        """Read the chunk table of a checkpoint whose manifest is known already.

        Raises:
            TornCheckpoint: the table is missing or damaged.
            FileSystemFault: it cannot be read.
        """
        patience = patience or Patience()
        return cls(path, manifest, patience(lambda: open_chunks(path, manifest)), patience)

    @cached_property
    def rows(self) -> ChunkTable:
        """All chunks, without the digests of their blocks."""
        return self._chunks.whole()

    @property
    def names(self) -> list[str]:
        """The tensors' names."""
        return [entry.name for entry in self.manifest.tensors]

    def entry(self, name: str) -> TensorEntry:
        """Dtype and shape of a tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        if name not in self._numbers:
            raise CheckpointError(f"{name} is not in the checkpoint {self.path.name}")
        return self.manifest.tensors[self._numbers[name]]

    def read(
        self,
        targets: Sequence[Target],
        *,
        threads: int = 1,
        on_bytes: Callable[[int], object] | None = None,
    ) -> int:
        """Fill all targets; return how many bytes were read from files.

        Whether everything fits is known before the first byte is read. After an error the targets
        hold anything. `threads` read at a time, and each calls `on_bytes` with the bytes it read.

        Raises:
            CheckpointError: a target is not in the checkpoint as it is: name, dtype, shape, region.
            TornCheckpoint: bytes are missing, or are not what was written.
            FileSystemFault: they cannot be read.
        """
        reading, windows = self._plan(targets)

        def work(taken: Iterator[ReadWindow]) -> int:
            with self._files() as files:
                return sum(reading.read(files, window, on_bytes) for window in taken)

        total = in_threads(windows, min(threads, len(windows)), work)
        points.reach("read.done", path=self.path, step=self.manifest.step, bytes=total)
        return total

    def _files(self) -> ChunkFiles:
        return ChunkFiles(self.path, self.manifest, self._patience, self._descriptor)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {entry.name: number for number, entry in enumerate(self.manifest.tensors)}

    def _plan(self, targets: Sequence[Target]) -> tuple[_WindowReader, list[ReadWindow]]:
        """All windows to read, in the order of the files."""
        problems: list[str] = []
        wanted: list[tuple[Target, memoryview]] = []
        for target in targets:
            try:
                memory = self._memory(target)
            except CheckpointError as error:
                problems.append(f"{target.piece.name} {error}")
                continue
            if len(memory):
                wanted.append((target, memory))
        table, shared = self._overlap([target for target, _ in wanted])
        problems += [
            f"{wanted[number][0].piece.name} {why}" for number, why in shared.problems.items()
        ]
        if problems:
            more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
            shown = "; ".join(problems[:SHOWN])
            raise CheckpointError(f"{self.path.name} cannot be loaded here: {shown}{more}")
        reading = _WindowReader(self.manifest, table, Proofs(self.manifest, table))
        return reading, reading.windows(shared, [memory for _, memory in wanted])

    def _memory(self, target: Target) -> memoryview:
        piece = target.piece
        number = self._numbers.get(piece.name)
        if number is None:
            raise CheckpointError("is not in the checkpoint")
        entry = self.manifest.tensors[number]
        if entry.dtype != piece.dtype or entry.shape != piece.shape:
            wanted = f"{piece.dtype}[{','.join(map(str, piece.shape))}]"
            raise CheckpointError(f"is {entry.text} in the checkpoint, {wanted} is wanted")
        if not _is_inside(piece):
            raise CheckpointError(
                f"is {entry.text}, and {list(piece.extent)} from {list(piece.begin)} is not in it"
            )
        nbytes = piece.nbytes
        whole = memoryview(target.buffer)
        if whole.nbytes != nbytes or whole.readonly or not whole.c_contiguous:
            raise CheckpointError(
                f"has memory of {whole.nbytes:,} bytes, {nbytes:,} writable ones in a row are "
                "wanted"
            )
        if whole.format == "B" and whole.ndim == 1:
            return whole
        # Not memoryview.cast, which knows neither complex numbers nor empty arrays.
        return np.frombuffer(whole, np.uint8).data if nbytes else memoryview(b"")

    def _overlap(self, targets: Sequence[Target]) -> tuple[ChunkTable, Overlap]:
        pieces = [target.piece for target in targets]
        numbers = np.array([self._numbers[piece.name] for piece in pieces], np.int64)
        table = self._chunks.select(pieces, numbers)
        return table, overlap(table, pieces, numbers)


@dataclass(frozen=True)
class _WindowReader:
    """Windows of a checkpoint, made and read; `table` has at least the chunks that are wanted."""

    manifest: Manifest
    table: ChunkTable
    proofs: Proofs

    def windows(self, shared: Overlap, memories: Sequence[memoryview]) -> list[ReadWindow]:
        """All windows to read, in the order of the files."""
        windows = [*self._run_windows(shared, memories), *self._grid_windows(shared, memories)]
        return sorted(windows, key=lambda window: window[:2])

    def _run_windows(self, shared: Overlap, memories: Sequence[memoryview]) -> Iterator[ReadWindow]:
        """Runs of blocks, those put together that are neighbours in their file."""
        block, most = self.table.block_bytes, window_blocks(self.table.block_bytes)
        window: list[BlockRun] = []
        file = start = end = room = 0
        for number, position, nbytes, run in self._runs(shared, memories):
            for first in range(run.first, run.last, most):
                last = min(first + most, run.last)
                low = position + first * block
                high = position + min(last * block, nbytes)
                joins = (number, low) == (file, end) and high - low <= room
                if not window or not joins or len(window) == MAX_PARTS:
                    if window:
                        yield ReadWindow(file, start, window)
                    window, room, file, start = [], most * block, number, low
                whole = (first, last) == (run.first, run.last)
                window.append(run if whole else run._replace(first=first, last=last))
                room, end = room - (high - low), high
        if window:
            yield ReadWindow(file, start, window)

    def _runs(
        self, shared: Overlap, memories: Sequence[memoryview]
    ) -> Iterator[tuple[int, int, int, BlockRun]]:
        """All runs in the order of the files, each with its chunk's file, offset and bytes."""
        table, block = self.table, self.table.block_bytes
        region, rows, source, target, nbytes = shared.runs
        columns: list[NDArray[np.int64]] = [
            table.file[rows], table.offset[rows], table.nbytes[rows], region,
            rows, source // block, -(-(source + nbytes) // block),
            source, source + nbytes, target - source,
        ]  # fmt: skip
        order = np.lexsort((source, rows))
        for at, offset, size, index, row, first, last, low, high, shift in zip(
            *(column[order].tolist() for column in columns), strict=True
        ):
            yield at, offset, size, BlockRun(row, first, last, low, high, shift, memories[index])

    def _grid_windows(
        self, shared: Overlap, memories: Sequence[memoryview]
    ) -> Iterator[ReadWindow]:
        """Blocks that some grid needs, those of a chunk put together that are neighbours."""
        table, block = self.table, self.table.block_bytes
        by_row: dict[int, list[tuple[Grid, memoryview]]] = {}
        for region, row, grid in shared.grids:
            by_row.setdefault(row, []).append((grid, memories[region]))
        for row, grids in by_row.items():
            edges = np.arange(-(-int(table.nbytes[row]) // block) + 1) * block
            needed = np.zeros(len(edges) - 1, bool)
            for grid, _ in grids:
                needed |= np.diff(grid.before(edges)) > 0
            for first, last in _stretches(needed, window_blocks(block)):
                position = int(table.offset[row]) + first * block
                yield ReadWindow(int(table.file[row]), position, Scattered(row, first, last, grids))

    def read(
        self, files: ChunkFiles, window: ReadWindow, on_bytes: Callable[[int], object] | None
    ) -> int:
        """Read and prove one window; returns the bytes read."""
        count = self.proofs.need(files, window.file)
        if isinstance(window.content, Scattered):
            count += self._read_scattered(files, window, window.content)
        else:
            count += self._read_runs(files, window, window.content)
        if on_bytes is not None:
            on_bytes(count)
        return count

    def _read_runs(self, files: ChunkFiles, window: ReadWindow, runs: list[BlockRun]) -> int:
        """Whole blocks straight to their place; those wanted in part go through the scratch."""
        buffers: list[memoryview] = []
        blocks: list[tuple[int, int, memoryview]] = []
        copies: list[tuple[memoryview, memoryview]] = []
        used, size = 0, self.table.block_bytes
        for run in runs:
            for first, last, begin, end in _spans(run, size, int(self.table.nbytes[run.row])):
                if run.low <= begin and end <= run.high:
                    content = run.memory[begin + run.shift : end + run.shift]
                else:
                    content, used = files.scratch[used : used + end - begin], used + end - begin
                    low, high = max(begin, run.low), min(end, run.high)
                    place = run.memory[low + run.shift : high + run.shift]
                    copies.append((place, content[low - begin : high - begin]))
                buffers.append(content)
                for block in range(first, last):
                    at = (block - first) * size
                    blocks.append((run.row, block, content[at : at + size]))
        count = files.read(window.file, buffers, window.position)
        for row, block, content in blocks:
            self._prove(row, block, content)
        for place, content in copies:
            place[:] = content
        return count

    def _read_scattered(self, files: ChunkFiles, window: ReadWindow, part: Scattered) -> int:
        size = self.table.block_bytes
        begin = part.first * size
        end = min(part.last * size, int(self.table.nbytes[part.row]))
        content = files.scratch[: end - begin]
        count = files.read(window.file, [content], window.position)
        for block in range(part.first, part.last):
            low = block * size - begin
            self._prove(part.row, block, content[low : low + size])
        for grid, memory in part.grids:
            low, high = grid.before(np.array([begin, end])).tolist()
            for part_of_it in grid.part(low, high):
                _copy(part_of_it, content, begin, memory)
        return count

    def _prove(self, row: int, block: int, content: memoryview) -> None:
        digest = block_digest(content)
        if digest != self.table.digests[self.table.first_block[row] + block]:
            raise TornCheckpoint(damage(self.manifest, self.table, row, block, digest))


def _is_inside(piece: ShardPiece) -> bool:
    """Whether a piece is a part of its tensor."""
    if piece.extent == piece.shape and not piece.flat and not any(piece.begin):
        return len(piece.begin) == len(piece.shape)
    sizes = (math.prod(piece.shape),) if piece.flat else piece.shape
    return len(piece.begin) == len(piece.extent) == len(sizes) and all(
        0 <= begin <= begin + count <= size
        for begin, count, size in zip(piece.begin, piece.extent, sizes, strict=True)
    )


def _spans(run: BlockRun, size: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """A run's blocks, those at its ends apart if they are wanted in part: blocks, and bytes."""
    first = run.first + (run.first * size < run.low)
    last = max(first, run.last - (run.high < min(run.last * size, nbytes)))
    for low, high in pairwise((run.first, first, last, run.last)):
        if low < high:
            yield low, high, low * size, min(high * size, nbytes)


def _stretches(needed: NDArray[np.bool_], most: int) -> Iterator[tuple[int, int]]:
    """Runs of what is needed, cut where they are longer than `most`: first, one past the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], needed, [False]]).astype(np.int8)))
    for low, high in edges.reshape(-1, 2).tolist():
        for first in range(low, high, most):
            yield first, min(first + most, high)


def _copy(grid: Grid, content: memoryview, begin: int, memory: memoryview) -> None:
    source = grid.source - begin
    # In the widest numbers that the innermost loop is a multiple of: fewer steps than by bytes.
    unit = math.gcd(8, grid.counts[-1])
    dtype = np.dtype(f"u{unit}")
    shape = (*grid.counts[:-1], grid.counts[-1] // unit)
    into = np.ndarray(shape, dtype, memory, grid.target, (*grid.target_strides[:-1], unit))
    into[...] = np.ndarray(shape, dtype, content, source, (*grid.source_strides[:-1], unit))
