"""Host memory that a rank copies its state into, and that its writer process reads from.

A memfd, not a file in /dev/shm: containers limit that to 64 MB. It only ever grows, and it grows in
place: bytes keep their offsets, and views from before stay views of the same memory. A limit of
memory must be met here, as an error, and not later as the death of the rank: see `_claim`.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALIGNMENT = 64
"""Of the parts in it: a cache line, and more than any dtype asks for."""
CLAIM_BYTES = 64 << 20
"""Memory taken at a time; the room is measured before each: other ranks take some as well."""
WRITE_BYTES = 4 << 20
RESERVE_BYTES = 1 << 30
"""Room that is left to everybody else, or a twentieth of the limit where that is less."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_2 = ("memory.max", "memory.current", "")
CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""Files of a memory cgroup's limit and use, and how the counts in its memory.stat begin."""


def aligned(nbytes: int) -> int:
    """The next offset from here that a part may begin at."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Room(NamedTuple):
    """Memory that can still be taken."""

    nbytes: int
    said_by: str


class Arena:
    """Memory that can be given to another process; every page of it is there when it is made.

    One thread at a time; but `close` may come while another thread is in `ensure`. After a fork,
    parent and child share the memory: the child must let it be.
    """

    def __init__(self, nbytes: int = 0) -> None:
        """Take so many bytes.

        Raises:
            CheckpointError: there is not so much memory.
        """
        self._size = 0
        self._map: mmap.mmap | None = None
        self._closing = threading.Lock()
        try:
            self._fd: int | None = os.memfd_create("hpctrain-checkpoint", os.MFD_CLOEXEC)
        except OSError as error:
            raise _refused(nbytes, f"{error}") from error
        try:
            self.ensure(nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes in it."""
        return self._size

    @property
    def fd(self) -> int:
        """The memory as a file; its receiver can map `size` bytes of it."""
        if self._fd is None:
            raise ValueError("the arena is closed")
        return self._fd

    def ensure(self, nbytes: int) -> None:
        """Grow to at least so many bytes; what is in it stays.

        Views from before the growth stay views of the same bytes. They keep the old mapping
        (address space, no memory) until they are gone.

        Raises:
            CheckpointError: there is not so much memory, and the arena is as it was; or it was
                closed meanwhile.
        """
        with self._closing:
            # A descriptor of its own: once `close` has been here, the number is another file's.
            fd = os.dup(self.fd)
        try:
            if nbytes > self._size:
                self._grow(fd, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        finally:
            os.close(fd)

    def _grow(self, fd: int, size: int) -> None:
        before = self._size
        try:
            _claim(fd, before, size, self._require_open)
            # populated: the first save must not pay for a page fault every 4 KiB
            grown = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.ftruncate(fd, before)  # what was claimed of it is free again
            raise _refused(size, f"{error}") from error
        except CheckpointError:
            os.ftruncate(fd, before)
            raise
        with self._closing:
            self._require_open()
            # The old mapping is dropped, not closed: it goes with its last view.
            self._map, self._size = grown, size

    def _require_open(self) -> None:
        if self._fd is None:
            raise CheckpointError("the memory for copies was given back while it was taken")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of it; `numpy.frombuffer` and `torch.frombuffer` take them.

        Raises:
            ValueError: they do not lie within the arena.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self._size:
            raise ValueError(f"[{offset}, {offset} + {nbytes}) is not in {self._size} bytes")
        if self._map is None:  # an empty one: the kernel maps no empty file
            return memoryview(bytearray())
        return memoryview(self._map)[offset : offset + nbytes]

    def close(self) -> None:
        """Give the memory back, which happens when the last view and the last receiver are gone."""
        with self._closing:
            fd, self._fd, self._map, self._size = self._fd, None, None, 0
            if fd is not None:
                os.close(fd)


def room() -> Room:
    """The memory that can still be taken, by the tightest of all limits that are in force."""
    return min([_host_room(), *_cgroup_rooms()])


def _claim(fd: int, begin: int, end: int, require_open: Callable[[], None]) -> None:
    """Take the memory in steps, as long as there is room for more, by writing to it.

    Beyond a cgroup's limit the kernel kills (seen on a memfd, Linux 6.18), so measure the room
    first. fallocate alone would leave clearing a page to its first touch, through mmap with
    Python's lock held.
    """
    zeros = memoryview(bytes(WRITE_BYTES))
    for low in range(begin, end, CLAIM_BYTES):
        left = room()
        require_open()
        if end - low > left.nbytes:
            raise _refused(end, f"{_giga(max(left.nbytes, 0))} can be had ({left.said_by})")
        high = min(low + CLAIM_BYTES, end)
        while low < high:
            low += os.pwrite(fd, zeros[: high - low], low)  # noqa: PLW2901 - it may take less


def _refused(nbytes: int, why: str) -> CheckpointError:
    return CheckpointError(
        f"background saves need {_giga(nbytes)} of host memory for the copy of this rank's state: "
        f'{why}; ask for more memory, or set checkpoint.mode = "sync"'
    )


def _giga(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB"


def _reserve(limit: int) -> int:
    return min(RESERVE_BYTES, limit // 20)


def _host_room() -> Room:
    path = PROC / "meminfo"
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    free, total = (int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    return Room(free - _reserve(total), f"MemAvailable in {path}")


def _cgroup_rooms() -> Iterator[Room]:
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = CGROUPS, CGROUP_2
        elif "memory" in controllers.split(","):
            base, names = CGROUPS / "memory", CGROUP_1
        else:
            continue
        # A container may have its path on the host, which is not there, and see its own as root.
        own = base / path.lstrip("/")
        for level in (own, *own.parents):
            if level.is_relative_to(base) and (left := _level_room(level, *names)):
                yield left


def _level_room(level: Path, limit_file: str, used_file: str, prefix: str) -> Room | None:
    try:
        limit = (level / limit_file).read_text().strip()
        used = int((level / used_file).read_text())
        stat = (level / "memory.stat").read_text()
    except FileNotFoundError:  # the root of all cgroups, or no memory controller here
        return None
    if limit == "max":
        return None
    counts = dict(line.split() for line in stat.splitlines())
    # Page cache, which the kernel drops rather than kill.
    spare = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    left = int(limit) - used + spare - _reserve(int(limit))
    return Room(left, f"{limit_file} of {level}")
