"""What a forked process does first: whose death it shares, and where its output goes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent dies: an orphan would hold its GPU, and go on writing.

    Args:
        parent_pid: Who is thought to be the parent; when it is no more, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def print_to(path: Path, mode: int = 0o644) -> None:
    """Append what this process prints, and what its libraries print, to a file.

    Args:
        path: The file; made with its folder where they are not there.
        mode: Its permissions where it is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
