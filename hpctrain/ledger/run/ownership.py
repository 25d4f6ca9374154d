"""Ownership of a run: whose files are obeyed, and the secret that its processes share.

A folder of runs may be shared by a group or by all users of a cluster. A run names a program, a
script's header and a command for notifications, so who can write its files decides what its owner
runs: its files are obeyed for their owner alone. tests/unit/run/test_ownership.py holds the
promises.

The secret is a file that only the owner reads. Each start of a job uses one that is derived from
it, so that nothing that was said in one start counts in another. tests/unit/base/test_secret.py
holds the promises.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.files import write_private
from hpctrain.core.base.secret import BYTES, code, new_secret
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import ChecksFailed, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir

ROOT = 0
LENGTH = 2 * BYTES + 1
WAIT_S = 60.0
"""So long may a file that another node has made take to show its content (NFS)."""
_POLL_S = 0.05


def is_mine(path: Path) -> bool:
    """Whether this user owns what lies there, or what a link there points to; no where it is gone.

    Raises:
        OSError: nobody can tell.
    """
    try:
        return path.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def distrust(path: Path, *, group: bool = False, roots: bool = False) -> str:
    """Who else can have written it, as words that follow the path; "" where nobody can.

    What is not there can be trusted. With `group` its group may write it: the run is shared on
    purpose. With `roots` it may be root's.
    """
    try:
        status, own = path.stat(), path.lstat()
    except FileNotFoundError:
        return ""
    # Who makes a link chooses which file of mine counts, or of root's; root may write any file.
    if stat.S_ISLNK(own.st_mode) and own.st_uid not in {os.geteuid(), ROOT}:
        return f"is a link, which belongs to {_user(own.st_uid)}"
    if status.st_uid != os.geteuid() and not (roots and status.st_uid == ROOT):
        return f"belongs to {_user(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if status.st_mode & stat.S_IWGRP and not group:
        return "can be written by its group"
    return ""


def refuse_foreign(run: RunDir, *, group: bool = True, hint: str = "") -> None:
    """Refuse to change another user's run, or to act on the job that its ledger names.

    For every command that needs no spec of the run: others go by `own_spec`. With `group` members
    of its group may change it where the folder says so. `hint` ends the message.

    Raises:
        ChecksFailed: it belongs to another user.
    """
    status = run.root.stat()
    own_groups = (
        {os.getegid(), *os.getgroups()} if group and status.st_mode & stat.S_IWGRP else set()
    )
    if status.st_uid != os.geteuid() and status.st_gid not in own_groups:
        user = _user(status.st_uid)
        raise ChecksFailed(f"{run.root} belongs to {user}, who alone may change it{hint}")


def refuse_planted(path: Path, *, flag: str) -> None:
    """Refuse a settings file that was found, not named, and may be another user's.

    It says what is executed as this user: in a folder that all can write, anybody leaves one. A
    file of root's is an admin's; one that the user's group can write is the project's. `flag` is
    how the user names such a file all the same.

    Raises:
        ChecksFailed: another user owns it, or all users can write it.
    """
    why = distrust(path, group=True, roots=True)
    if why:
        raise ChecksFailed(
            f"{path} {why}, and it would decide what runs as you; look at it, then take another "
            f"folder, or say {flag} if you trust it"
        )


def own_spec(run: RunDir, *, named: str, foreign: bool | None = None) -> Spec:
    """The spec of a run, once it is certain that nobody else can have written it.

    `named` is how the user named the run. With `foreign` take another user's too, as the user has
    asked; None for a command that has no such flag.

    Raises:
        ChecksFailed: others own the run or can write it.
        UsageError: `foreign` without a path: nothing else may be meant.
        NotFound: see `load_spec`.
    """
    if foreign:
        if "/" not in named:
            raise UsageError(f"--foreign takes the run's path, not {named!r}: {run.root}")
        return replace(load_spec(run.spec), foreign=True)
    # The spec says whether its group may write the rest, so the group may not write the spec.
    hint = "" if foreign is None else "; if you trust them, name it by its path, with --foreign"
    _refuse(run, run.root, hint, group=True)
    _refuse(run, run.spec, hint)
    spec = load_spec(run.spec)
    shared = spec.settings.run.group_writable
    for path in (run.root, run.jobs, run.snapshot):
        _refuse(run, path, hint, group=shared)
    return replace(spec, foreign=False)


def job_spec(run: RunDir) -> Spec:
    """The spec of a run, in its own job: what stands there is executed as this user.

    Raises:
        ChecksFailed: others own spec.json or the copy of the code, or can write them.
        NotFound: see `load_spec`.
    """
    _refuse_in_job(run, run.spec)
    spec = load_spec(run.spec)
    if not spec.foreign:
        _refuse_in_job(run, run.snapshot, group=spec.settings.run.group_writable)
    return spec


def renew_secret(run: RunDir) -> None:
    """Give the run another secret; called before a job of it is submitted, while none is alive.

    Raises:
        OSError: it cannot be written.
    """
    write_private(run.secret, new_secret() + "\n", shared=False)


def start_secret(run: RunDir, job_id: str, restarts: int) -> str:
    """The secret of one start of a job, the same on all of its nodes.

    Of nodes that come at once to a run without a secret, one makes it.

    Raises:
        ChecksFailed: others own or can read the file.
        OSError: it can neither be read nor made.
    """
    return code(_read_or_make(run.secret), "start", job_id, restarts)


def _refuse_in_job(run: RunDir, path: Path, *, group: bool = False) -> None:
    why = distrust(path, group=group)
    if why:
        raise ChecksFailed(
            f"{path} {why}: it decides what this job runs as you; look at it, then "
            f"`chmod -R go-w {shlex.quote(str(run.root))}` and `hpctrain resume {run.typed}`"
        )


def _refuse(run: RunDir, path: Path, hint: str, *, group: bool = False) -> None:
    why = distrust(path, group=group)
    if not why:
        return
    command = f"; `chmod -R go-w {shlex.quote(str(run.root))}` fixes it"
    repair = "" if why.startswith("belongs") else command
    raise ChecksFailed(
        f"{path} {why}: who can write a run decides what it runs as you{repair}{hint}"
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _read_or_make(path: Path) -> str:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    deadline = clock.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            return _read(path, deadline)
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:  # another node was quicker
            continue
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret() + "\n")
            file.flush()
            os.fsync(descriptor)


def _read(path: Path, deadline: float) -> str:
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(LENGTH + 1)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ChecksFailed(
                f"{path} can be read or was made by others, so it is no secret; remove it, and "
                "`hpctrain resume` makes another"
            )
        if len(content) == LENGTH and content.endswith(b"\n"):
            return content[:-1].decode(errors="replace")
        if clock.monotonic() > deadline:
            raise ChecksFailed(f"{path} holds no secret; remove it, and resume the run")
        clock.sleep(_POLL_S)
