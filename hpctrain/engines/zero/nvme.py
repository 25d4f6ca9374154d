"""Optimizer state on a disk of the node, under ZeRO-3: what DeepSpeed keeps in files of its own.

DeepSpeed reads a row of masters, moments and gradients into host memory, updates it, and writes it
back; between steps its tensors are empty. `Disk` maps these files into memory instead: a save reads
them page by page, a restore writes them, and neither needs memory for the state.

`NvmeFiles` reads and writes them in the place of DeepSpeed's operator async_io. The operator
(0.19.8) never asks what became of a read or a write: on a full disk, or with memory that the disk
cannot write to directly, training goes on with what lay there before. It also needs libaio and
minutes of compiling on each node. Here a failure is raised, by threads that do the same work.

`take_folder` gives each rank a folder on the disk, removed when it ends, and `require_room` refuses
a disk that cannot hold the state. tests/engines/test_zero_nvme.py holds the promises.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CHUNK_BYTES = 16 << 20
"""Read or written in one call."""
THREADS = 4
"""Calls at a time: enough for a disk of some gigabytes a second."""
_ALIGNED = 4096
"""What memory, length and place in the file must be multiples of to go past the page cache."""
PREFIX = "hpctrain-zero3-"
"""Of the folders of this machine's ranks."""
STATE_BYTES = 16
"""Of an element in files: a master, two moments and a gradient in fp32."""
_LOCKS: list[int] = []
"""Open folders, which says that they are in use until this process ends."""


class Operator:
    """What DeepSpeed makes in the place of its `AsyncIOBuilder`."""

    def load(self, **_: Any) -> Operator:
        """The module that DeepSpeed takes `aio_handle` from."""
        return self

    def aio_handle(self, **_: Any) -> NvmeFiles:
        """See `NvmeFiles`; the operator's own sizes of blocks and queues mean nothing to it."""
        return NvmeFiles()


class NvmeFiles:
    """DeepSpeed's handle: reads and writes begin at once and are waited for together."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "hpctrain-files")
        self._memory: list[tuple[int, int]] = []
        self._begun: list[list[Future[None]]] = []

    def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Host memory that goes to disks directly, and to a GPU in the background."""
        nbytes = max(count * like.element_size(), _ALIGNED)
        if torch.accelerator.is_available():
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


class Disk:
    """The rows of fp32 that DeepSpeed keeps in files; rows below 1 MiB it keeps in memory."""

    def __init__(self, zero: Any) -> None:
        """Look which rows they are.

        Args:
            zero: DeepSpeed's optimizer of stage 3, made with `offload_optimizer.device` "nvme".

        Raises:
            UsageError: this DeepSpeed does not read and write by `Files`.
        """
        self._swapper = zero.optimizer_swapper
        if not isinstance(self._swapper.aio_handle, NvmeFiles):
            raise UsageError(
                "engine.offload nvme: this version of DeepSpeed reads and writes its files in a "
                "way that hpctrain does not know; use deepspeed 0.19.8, or engine.offload cpu"
            )
        self._rows = {
            id(row): self._swapper.swap_params_info[row.ds_id]
            for row in zero.fp32_partitioned_groups_flat
            if row.ds_id in self._swapper.swap_params_info
        }

    def holds(self, row: torch.Tensor) -> bool:
        """Whether a row of masters lies in files, with its moments."""
        return id(row) in self._rows

    def mapped(self, row: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The file of a row, or of one of its moments, as a tensor; for now, not for long.

        What is written there is the file's when the row is `here` the next time.

        Args:
            row: Masters that lie in files.
            value: These masters, or a moment of theirs.
        """
        held = self._rows[id(row)]
        path = next(
            row_tensor.swap_path
            for row_tensor in held.tensors
            if row_tensor.compute_tensor is value
        )
        # DeepSpeed writes past the page cache: pages from before must not be read for the file's.
        _each_file([path], lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
        return torch.from_file(path, shared=True, size=held.numel(), dtype=row.dtype)

    @contextlib.contextmanager
    def here(self, row: torch.Tensor, *, changes: bool) -> Iterator[None]:
        """Around work on a row and its moments that needs them in memory.

        Args:
            row: Masters that lie in files.
            changes: Write them back, with moments that have been made meanwhile.
        """
        # DeepSpeed reads past the page cache: what was written to a mapping must be on the disk.
        _each_file([row_tensor.swap_path for row_tensor in self._rows[id(row)].tensors], os.fsync)
        self._swapper.swap_in_optimizer_state(row)
        try:
            yield
        finally:
            if changes:
                self._swapper.swap_out_optimizer_state(row)
            else:
                self._swapper.release_swap_buffers(row)
            row.grad = None

    def fill_gradients(self) -> None:
        """Give zeros to what got no gradient, before a step.

        DeepSpeed reads gradients into memory that it has used before: a parameter without one would
        be updated by whatever lies there.
        """
        for held in self._rows.values():
            filled = [(gap.offset, gap.length) for gap in held.swapped_gradients.values()]
            filled += [(offset, part.numel()) for offset, part in held.unswapped_gradients.items()]
            for first, count in gaps(filled, held.numel()):
                held.unswapped_gradients[first] = torch.zeros((), dtype=held.dtype()).expand(count)

    def forget_gradients(self) -> None:
        """After a step, whether it was taken or left out: else the next one reads these files."""
        for held in self._rows.values():
            held.swapped_gradients.clear()
            held.release_unswapped_gradients()


def gaps(ranges: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What of [0, size) lies in no range; ranges and answer are (first, count). Pure."""
    holes, at = [], 0
    for first, count in [*sorted(ranges), (size, 0)]:
        if first > at:
            holes.append((at, first - at))
        at = max(at, first + count)
    return holes


def _each_file(paths: Iterable[str], do: Any) -> None:
    for path in paths:
        file = os.open(path, os.O_RDWR)
        try:
            do(file)
        finally:
            os.close(file)


def take_folder(nvme_path: str) -> Path:
    """A new folder for this process alone below `engine.nvme_path`, removed when it ends.

    Folders of processes that were killed are removed here, by whoever comes next.

    Raises:
        UsageError: there is no such place, or nothing can be written there.
    """
    setting = f"engine.nvme_path is {nvme_path}"
    base = Path(os.path.expandvars(nvme_path))
    if "$" in str(base):
        raise UsageError(f"{setting}, and this node has no such variable; set it, or name a folder")
    try:
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        return _locked(base)
    except OSError as error:
        raise UsageError(
            f"{setting}: {error.strerror} ({error.filename}); it takes a writable folder on a disk "
            "of each node"
        ) from None


def require_room(folder: Path, elements: int, ranks: int) -> None:
    """Refuse a disk that the state would not fit.

    Args:
        folder: Where this rank's state goes.
        elements: Of this rank.
        ranks: On this node, each with as many.

    Raises:
        UsageError: too little room.
    """
    need, free = elements * STATE_BYTES * ranks, shutil.disk_usage(folder).free
    if need > free:
        raise UsageError(
            f"engine.nvme_path: the disk of {folder.parent} has {_gib(free)} GiB free, and the "
            f"node's {ranks} ranks need {_gib(need)}; choose another disk, or more nodes"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"


def _locked(base: Path) -> Path:
    """A new folder, locked until this process ends, however that is."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another rank of the node has swept it before it was locked
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # else swept in between
            _LOCKS.append(lock)
            util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=1)
            return folder
        os.close(lock)


def _sweep(base: Path) -> None:
    for folder, lock in _left_behind(base):
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _left_behind(base: Path) -> Iterator[tuple[Path, int]]:
    """Folders that no process holds any more, each locked by this one."""
    for folder in base.glob(PREFIX + "*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another user's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        yield folder, lock
