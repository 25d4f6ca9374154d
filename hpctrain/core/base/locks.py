"""Locks between processes and nodes: flock(2), which the kernel frees when the holder dies.

Never a file whose mere being there is the lock: one of a killed holder would stay for ever. And
never a file that others may open: flock(2) asks for no right to write on most file systems, so
a user who can read a lock's file could keep it. Standard library only; the ledger stands on it. A
process's own folder on its node (`NodeFolder`) is known by its lock too.
tests/unit/base/test_locks.py holds the promises.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = Path("/dev/shm")  # noqa: S108 - folders of this user's own are made there
POLL_S = 0.01
NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What flock(2) answers where a file system has none."""
_UNANSWERED = frozenset({errno.ENOLCK, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR})
"""What a lock server's hiccup looks like, and a file that another node has just replaced."""


@contextlib.contextmanager
def held(path: Path, timeout_s: float, *, insist: bool = True) -> Iterator[None]:
    """Hold the lock of a file, which is made if need be, readable for its owner alone.

    Where the folder may be written by its group, the group may lock too. With `insist` it asks
    again where the server of the locks does not answer.

    Raises:
        TimeoutError: another process has kept it for so long.
        OSError: it cannot be locked, with the system's reason.
    """
    deadline = clock.monotonic() + timeout_s
    while (descriptor := _taken(path, deadline, insist=insist)) is None:
        clock.sleep(POLL_S)
    try:
        yield
    finally:
        # A child forked meanwhile has a copy of the descriptor and would keep the lock for life.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _taken(path: Path, deadline: float, *, insist: bool) -> int | None:
    """The descriptor that has the lock; None where the next try may help."""
    descriptor = -1
    try:
        descriptor = _opened(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(path, descriptor):
            return descriptor
    except BlockingIOError as error:
        if clock.monotonic() > deadline:
            os.close(descriptor)
            raise TimeoutError(errno.ETIMEDOUT, "held by another process", str(path)) from error
    except OSError as error:
        unanswered = insist and error.errno in _UNANSWERED and clock.monotonic() <= deadline
        if not unanswered:
            _close(descriptor)
            raise
    _close(descriptor)
    return None


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _opened(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _shut(path, descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _shut(path: Path, descriptor: int) -> None:
    """Keep other users from opening the file; also one that an earlier version made."""
    now = os.fstat(descriptor)
    shared = path.parent.stat().st_mode & stat.S_IWGRP
    wanted = 0o660 if shared else 0o600
    if stat.S_IMODE(now.st_mode) != wanted and now.st_uid == os.geteuid():
        os.fchmod(descriptor, wanted)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file was not removed while we waited: others lock its successor."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))  # noqa: PTH116 - as samestat
    except FileNotFoundError:
        return False


class NodeFolder:
    """A folder of this process on its node, which nobody but its user can enter.

    It is locked as long as this process lives, or one that it has forked. So what a killed process
    has left is known from what is in use, and is removed by `remove_left_over`.
    """

    def __init__(self, kind: str, parent: Path) -> None:
        """Make it, and remove what killed processes of this user have left beside it.

        Raises:
            OSError: it cannot be made.
        """
        remove_left_over(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"hpctrain-{kind}-{_here()}", dir=parent))
            # Another process that starts may take it for left over, until it is locked.
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes it
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if _is_still(self.path, self._descriptor):
                return
            os.close(self._descriptor)

    def remove(self) -> None:
        """Remove it with all that is in it. Harmless when repeated."""
        shutil.rmtree(self.path, ignore_errors=True)
        _close(self._descriptor)
        self._descriptor = -1


def _here() -> str:
    """This user and this node, which a lock may not reach beyond where they share a disk.

    Short: the path of a socket in such a folder has a hundred characters.
    """
    return f"{os.getuid()}-{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}-"


def remove_left_over(*parents: Path) -> None:
    """Remove folders whose processes were killed."""
    for parent in parents or (MEMORY, Path(tempfile.gettempdir())):
        for folder in parent.glob(f"hpctrain-*-{_here()}*"):
            with contextlib.suppress(OSError):
                # Anybody can give a folder, or a link, such a name where all can write.
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(descriptor).st_uid == os.geteuid():
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(descriptor)
