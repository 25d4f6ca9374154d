"""Parts of a checkpoint's files, read by several threads; the file system's errors are named."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np

from hpctrain.base.files import plain_descriptor
from hpctrain.checkpoint.format.digest import PREFIX
from hpctrain.checkpoint.format.patience import Patience, proves_absence
from hpctrain.errors import FileSystemFault, IncompleteCheckpoint
from hpctrain.testing import points

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.table import ChunkTable

T = TypeVar("T")
WINDOW_BYTES = 1 << 20
"""Read in one call. More is not faster, and would no longer be in the cache when it is digested."""


class Files:
    """A checkpoint's files for one thread: one is open at a time, beside memory for a window."""

    def __init__(self, path: Path, manifest: Manifest, patience: Patience | None = None) -> None:
        self._path = path
        self._manifest = manifest
        self._patience = patience or Patience()
        self._open: tuple[int, int, Path] | None = None
        nbytes = window_blocks(manifest.block_bytes) * manifest.block_bytes
        self.scratch: memoryview = np.empty(nbytes, np.uint8).data

    def read(self, number: int, buffers: list[memoryview], position: int) -> int:
        """Fill buffers from one file, one behind the other; returns their bytes.

        Args:
            number: Of the file, as the manifest counts them.
            buffers: 1,024 at most.
            position: Where in the file.

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
            self._open = number, plain_descriptor(path), path
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
