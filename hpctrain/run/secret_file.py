"""A run's secret: a file that only its owner reads. Processes of its jobs know each other by it.

What a start of a job uses is derived from it, so that nothing that was said in one start counts in
another. tests/unit/test_secret.py holds the promises.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from hpctrain.base.modes import write_private
from hpctrain.base.secret import BYTES, code, new_secret
from hpctrain.errors import ChecksFailed

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.run.layout import RunDir

LENGTH = 2 * BYTES + 1
WAIT_S = 60.0
"""So long may a file that another node has made take to show its content (NFS)."""
_POLL_S = 0.05


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


def _read_or_make(path: Path) -> str:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    deadline = time.monotonic() + WAIT_S
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
            found = os.fstat(descriptor)
            content = file.read(LENGTH + 1)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ChecksFailed(
                f"{path} can be read or was made by others, so it is no secret; remove it, and "
                "`hpctrain resume` makes another"
            )
        if len(content) == LENGTH and content.endswith(b"\n"):
            return content[:-1].decode(errors="replace")
        if time.monotonic() > deadline:
            raise ChecksFailed(f"{path} holds no secret; remove it, and resume the run")
        time.sleep(_POLL_S)
