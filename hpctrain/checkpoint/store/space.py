"""Is there room for a save? Asked before it begins, and said in words when it was refused.

A forecast is no promise: others write too, and many quotas do not show in what a file system says
of itself. So no answer (None) means only that nothing speaks against trying.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from hpctrain.base.text import size

if TYPE_CHECKING:
    from pathlib import Path

ADVICE = "free some with `hpctrain checkpoints prune`, or keep fewer (checkpoint.keep_last)"


def forecast(path: Path, need_bytes: int, need_files: int = 1) -> str | None:
    """Why a save of this size would not fit; None where it fits or nobody can say.

    What counts is what a user may take (f_bavail), not the reserve of root's (f_bfree).

    Args:
        path: Where it is to be written; need not be there yet.
        need_bytes: Bytes that the save adds.
        need_files: Files and directories that it adds.
    """
    stat = _stat(path)
    if stat is None:
        return None
    free = stat.f_bavail * stat.f_frsize
    # Some FUSE and network file systems report no blocks at all: that is no full disk.
    if stat.f_blocks > 0 and free < need_bytes:
        return (
            f"{path} has {_exact(free)} free and the next checkpoint needs {_exact(need_bytes)}; "
            f"{ADVICE}"
        )
    # The same for inodes: file systems that make them as needed (btrfs, many servers) report none.
    if stat.f_files > 0 and stat.f_favail < need_files:
        return (
            f"{path} has room for {stat.f_favail:,} more files (inodes) and the next checkpoint "
            f"needs {need_files:,}; {ADVICE}"
        )
    return None


def describe(error: OSError, path: Path) -> str:
    """An error of writing, in words that a user can act on: which limit was hit, and what helps."""
    stat = _stat(path)
    if error.errno == errno.EDQUOT:
        return (
            f"quota exceeded at {path}: a limit of your user, group or project, not of the disk; "
            f"{ADVICE}, or ask for a larger quota (`quota -s`, `lfs quota`)"
        )
    if error.errno != errno.ENOSPC:
        return f"{path}: {error.strerror or error}"
    left = _left(stat)
    # Room first: XFS has no inodes left whenever it has no blocks left.
    if left and stat is not None and stat.f_files > 0 and stat.f_favail == 0:
        return f"no file can be added at {path}: the file system is out of inodes; {ADVICE}"
    # XFS reports a project's quota as a full disk, and others may have freed something meanwhile.
    hint = "; if that is plenty, it was a quota" if left else ""
    return f"disk full at {path}{left}{hint}; {ADVICE}"


def _stat(path: Path) -> os.statvfs_result | None:
    """Of the nearest directory that is there; None where the file system does not tell.

    Not an error: a forecast must not fail a save, which meets whatever is wrong and names it.
    """
    for place in (path, *path.parents):
        try:
            return os.statvfs(place)
        except (FileNotFoundError, NotADirectoryError):  # not made yet
            continue
        except OSError:
            return None
    return None


def _left(stat: os.statvfs_result | None) -> str:
    """What is free, where that is told and is more than a block."""
    if stat is None or stat.f_blocks == 0 or stat.f_bavail <= 1:
        return ""
    return f" ({size(stat.f_bavail * stat.f_frsize)} of the file system are free by now)"


def _exact(count: int) -> str:
    """Both forms: rounded ones can look alike when bytes are missing."""
    return f"{size(count)} ({count:,} bytes)"
