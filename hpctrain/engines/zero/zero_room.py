"""A folder on the node's disk for a rank's state of ZeRO, and whether the disk can hold it.

tests/engines/test_zero.py holds the promises.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "hpctrain-zero3-"
STATE_BYTES = 16
"""Of an element in files: a master, two moments and a gradient in fp32."""
_LOCKS: list[int] = []
"""Open folders, which says that they are in use until this process ends."""


def take_folder(nvme_path: str) -> Path:
    """A new folder for this process alone below `engine.nvme_path`, removed when it ends.

    Folders of processes that were killed are removed here, by whoever comes next.

    Raises:
        UsageError: there is no such place, or nothing can be written there.
    """
    told = f"engine.nvme_path is {nvme_path}"
    base = Path(os.path.expandvars(nvme_path))
    if "$" in str(base):
        raise UsageError(f"{told}, and this node has no such variable; set it, or name a folder")
    try:
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        return _locked(base)
    except OSError as error:
        raise UsageError(
            f"{told}: {error.strerror} ({error.filename}); it takes a writable folder on a disk "
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
