"""Who may write what a run is made of: its folder decides, whatever the umask.

Many sites set umask 002 and share project folders by group. A run names a program that its owner's
job executes, so nobody else writes into it unless `run.group_writable` says so; then the run's
folder can be written by its group, and all that is made in it later follows the folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ROOT = 0
GROUP = 0o070
OTHERS_WRITE = 0o002
NOT_OWNER_WRITE = 0o022


def make_runs_folder(path: Path) -> None:
    """Make the folder of all runs, and those above it, where they are missing.

    Where the umask lets others put their runs there too, they cannot move this user's: a run that
    another has put in its place would be the next that its job starts.

    Raises:
        OSError: one cannot be made.
    """
    for folder in reversed([path, *path.parents]):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & NOT_OWNER_WRITE:
            folder.chmod(mode | stat.S_ISVTX)


def can_be_replaced(runs: Path) -> str:
    """Who else can put something of his in the place of a run in this folder, and what helps.

    Words that go on from the path; "" where nobody can. A folder's owner may rename all that is in
    it, sticky bit or not.
    """
    try:
        found = runs.stat()
    except OSError:
        return ""
    if found.st_uid not in {os.geteuid(), ROOT}:
        return f"belongs to user {found.st_uid}, who can; take a folder of your own"
    if found.st_mode & NOT_OWNER_WRITE and not found.st_mode & stat.S_ISVTX:
        return f"can be written by others; `chmod +t {shlex.quote(str(runs))}` keeps them from it"
    return ""


def make_run_folder(path: Path, *, group: bool) -> None:
    """Make a run's folder, and let this process write into it as `follow_folder` says.

    Args:
        path: The folder; its parent is there.
        group: Its group may write all of it but spec.json.

    Raises:
        OSError: FileExistsError where it is there already.
    """
    path.mkdir(mode=0o755)
    if group:
        path.chmod(stat.S_IMODE(path.stat().st_mode) | GROUP)
    follow_folder(path)


def follow_folder(folder: Path) -> None:
    """From here on this process, and those it starts, make nothing that is more open than a run.

    Group and others get no right to write. Where the run's folder can be written by its group, so
    can everything else, even if the umask would not have it.

    Args:
        folder: The run's; where nothing can be told of it, nobody gets a right.
    """
    umask = os.umask(NOT_OWNER_WRITE)
    if _is_shared(folder):
        os.umask(umask & ~GROUP | OTHERS_WRITE)
    else:
        os.umask(umask | NOT_OWNER_WRITE)


def make_private_folder(path: Path) -> None:
    """Make a folder that nobody else can look into, except the group of a shared run.

    Args:
        path: The folder, right below the run's. One that is there is shut too, if it is ours.
    """
    mode = 0o770 if _is_shared(path.parent) else 0o700
    path.mkdir(mode=mode, exist_ok=True)
    if path.stat().st_uid == os.geteuid():
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o777 | mode)


def write_private(path: Path, text: str, *, mode: int = 0o600, shared: bool = True) -> None:
    """Write a file whole or not at all that nobody else can write, and only the owner read.

    Args:
        path: The file.
        text: Its content.
        mode: The owner's rights: 0o600 or 0o700.
        shared: Whether the group of a shared run may read it.

    Raises:
        OSError: it could not be written, e.g. the disk is full; names the file. What was there
            before is untouched, and nothing is left beside it.
    """
    staged = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    if shared and _is_shared(path.parent):
        mode |= (mode & 0o500) >> 3
    try:
        staged.unlink(missing_ok=True)  # another one's would keep its owner and its mode
        with os.fdopen(os.open(staged, flags, mode), "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
        staged.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _is_shared(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWGRP)
    except OSError:
        return False
