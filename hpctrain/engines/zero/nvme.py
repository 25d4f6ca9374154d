"""Reading and writing the files of ZeRO's state, in the place of DeepSpeed's operator async_io.

The operator (0.19.8) never asks what became of a read or a write: on a full disk, or with memory
that the disk cannot write to directly, training goes on with what lay there before. It also needs
libaio and minutes of compiling on each node. Here a failure is raised, by threads that do the same
work. tests/engines/test_zero.py holds the promises.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 16 << 20
"""Read or written in one call."""
THREADS = 4
"""Calls at a time: enough for a disk of some gigabytes a second."""
_ALIGNED = 4096
"""What memory, length and place in the file must be multiples of to go past the page cache."""


class Operator:
    """What DeepSpeed makes in the place of its `AsyncIOBuilder`."""

    def load(self, **_: Any) -> Operator:
        """The module that DeepSpeed takes `aio_handle` from."""
        return self

    def aio_handle(self, **_: Any) -> Files:
        """See `Files`; the operator's own sizes of blocks and queues mean nothing to it."""
        return Files()


class Files:
    """DeepSpeed's handle: reads and writes begin at once and are waited for together."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "hpctrain-files")
        self._memory: list[tuple[int, int]] = []
        self._begun: list[list[Future[None]]] = []

    def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Host memory that goes to disks directly, and to a GPU in the background."""
        nbytes = max(count * like.element_size(), _ALIGNED)
        if torch.cuda.is_available():
            whole = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            whole = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self._memory.append((whole.data_ptr(), whole.data_ptr() + nbytes))
        return whole.view(like.dtype).narrow(0, 0, count)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> None:
        """It is freed with its last user."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory made here."""
        return any(low <= tensor.data_ptr() < high for low, high in self._memory)

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        """Begin to fill a tensor from a file."""
        return self._begin(_read, tensor, path, offset)

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        """Begin to write a tensor to a file."""
        return self._begin(_write, tensor, path, offset)

    def wait(self) -> int:
        """Have everything that was begun done; how many tensors that were.

        Raises:
            OSError: one could not be read or written whole.
        """
        begun, self._begun = self._begun, []
        for parts in begun:
            for part in parts:
                part.result()
        return len(begun)

    def _begin(self, do: Callable[..., int], tensor: torch.Tensor, path: str, offset: int) -> int:
        array: Any = tensor.detach().numpy()
        memory = memoryview(array).cast("B")
        direct = len(memory) if (tensor.data_ptr() | offset) % _ALIGNED == 0 else 0
        direct -= direct % _ALIGNED
        ends = [*range(0, direct, CHUNK_BYTES), *range(direct, len(memory), CHUNK_BYTES)]
        self._begun.append(
            [
                self._pool.submit(
                    _whole, do, path, memory[low:high], offset + low, direct=low < direct
                )
                for low, high in zip(ends, [*ends[1:], len(memory)], strict=True)
            ]
        )
        return 0


def _whole(
    do: Callable[..., int], path: str, memory: memoryview, offset: int, *, direct: bool
) -> None:
    """Move all bytes, past the page cache where the file system can."""
    file = _open(path, do, direct=direct)
    try:
        while memory:
            count = do(file, memory, offset)
            memory, offset = memory[count:], offset + count
            if not count or (memory and direct and count % _ALIGNED):
                break  # the file has ended, or what is left cannot go past the page cache
    except OSError as error:  # else it would not say which file, of a disk that is full
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(file)
    if memory and not direct:
        raise OSError(errno.EIO, "the file ends too early", path)
    if memory:
        _whole(do, path, memory, offset, direct=False)


def _open(path: str, do: Callable[..., int], *, direct: bool) -> int:
    mode = os.O_RDONLY if do is _read else os.O_WRONLY | os.O_CREAT
    if direct:
        try:
            return os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, mode | os.O_CLOEXEC, 0o600)


def _read(file: int, memory: memoryview, offset: int) -> int:
    return os.preadv(file, [memory], offset)


def _write(file: int, memory: memoryview, offset: int) -> int:
    return os.pwritev(file, [memory], offset)
