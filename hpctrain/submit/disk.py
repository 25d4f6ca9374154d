"""Whether a disk can hold runs: what a run's promises stand on, tried where it is to lie.

Two writers are kept apart by flock(2), a checkpoint is there whole or not at all by rename(2), a
power loss takes nothing by fsync(2), and facts of several nodes stand one behind the other by
O_APPEND. Tried from one node in some milliseconds; whether locks hold between nodes is what
`hpctrain preflight` tries. tests/unit/submit/test_disk.py holds the promises.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import ChecksFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME_BYTES = 128
"""Longer than any name that a run gives a file."""
COPIES = frozenset(
    {
        *("fuse.s3fs", "fuse.goofys", "fuse.mountpoint-s3", "fuse.gcsfuse", "fuse.geesefs"),
        *("fuse.rclone", "fuse.blobfuse", "fuse.blobfuse2", "fuse.davfs", "davfs"),
    }
)
"""Object stores: renaming a folder there is copying it, file by file."""
_TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1], "rb+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
"""
_HELD = 3
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def check_disk(folder: Path) -> None:
    """Refuse a folder whose disk does not do what a run's promises stand on.

    Args:
        folder: An existing folder, which can be written. What is tried in it is taken away again.
            On a full disk nothing is said: whoever needs the room names what it is for.

    Raises:
        ChecksFailed: names the file system, what it lacks, and what to do.
    """
    kind = file_system(folder)
    if kind in COPIES:
        raise _unfit(folder, kind, "renaming a folder there is not one change")
    with _trial(folder, kind) as trial:
        if trial is None:
            return
        for what, tried in _TRIALS.items():
            try:
                holds = tried(trial)
            except OSError as error:
                if error.errno in _FULL:
                    return
                raise _unfit(folder, kind, f"{what} ({error.strerror})") from None
            if not holds:
                raise _unfit(folder, kind, what)


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The name of the file system that a folder lies on, "" where nobody can tell."""
    path, mount_type, length = str(folder.resolve()), "", -1
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            mount = before.split()[4].encode().decode("unicode_escape").rstrip("/")
            if (path + "/").startswith(mount + "/") and len(mount) >= length:
                mount_type, length = after.split()[0], len(mount)
    return mount_type


def _unfit(folder: Path, kind: str, what: str) -> ChecksFailed:
    on = f" ({kind})" if kind else ""
    return ChecksFailed(
        f"{folder}{on} cannot hold a run: {what}; have it mounted otherwise (Lustre: -o flock), or "
        "choose another disk with --runs"
    )


@contextlib.contextmanager
def _trial(folder: Path, kind: str) -> Iterator[Path | None]:
    """A folder to try things in, gone afterwards; None where there is no room for one."""
    try:
        trial = Path(tempfile.mkdtemp(prefix=".hpctrain-disk-", dir=folder))
    except OSError as error:
        if error.errno in _FULL:
            yield None
            return
        raise _unfit(folder, kind, f"no folder can be made there ({error.strerror})") from None
    try:
        yield trial
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _locks(trial: Path) -> bool:
    path = trial / "lock"
    path.touch()
    with path.open("rb+") as holder, path.open("rb+") as other:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        # Where flock is made of locks that belong to a process: another process must be kept out.
        import subprocess  # slow to import, and rarely needed

        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        words = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(path)]
        return subprocess.run(words, capture_output=True, check=False).returncode == _HELD


def _renames(trial: Path) -> bool:
    old, new = trial / "old", trial / "new"
    old.write_text("old")
    new.write_text("new")
    new.replace(old)
    staged, committed = trial / "staged", trial / "committed"
    staged.mkdir()
    (staged / "shard").write_text("1")
    staged.rename(committed)
    there = sorted(path.name for path in trial.iterdir() if path.name != "lock")
    whole = old.read_text() == "new" and (committed / "shard").read_text() == "1"
    return whole and there == ["committed", "old"]


def _flushes(trial: Path) -> bool:
    for path in (trial / "old", trial):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return True


def _appends(trial: Path) -> bool:
    path = trial / "facts"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    first, second = os.open(path, flags), os.open(path, flags)
    try:
        for descriptor in (first, second, first):
            os.write(descriptor, b"fact\n")
    finally:
        os.close(first)
        os.close(second)
    return path.read_bytes() == b"fact\n" * 3


def _names(trial: Path) -> bool:
    (trial / ("n" * NAME_BYTES)).touch()
    return True


def _maps(trial: Path) -> bool:
    with (
        (trial / "old").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        return mapped[:] == b"new"


_TRIALS: dict[str, Callable[[Path], bool]] = {
    "flock does not keep a second process out": _locks,
    "a rename is not one change": _renames,
    "fsync does not work on files and folders": _flushes,
    "appends of two writers overwrite each other": _appends,
    f"names of {NAME_BYTES} bytes are too long for it": _names,
    "files cannot be mapped into memory": _maps,
}
"""What is wrong where it does not hold, in the order in which it is tried."""
