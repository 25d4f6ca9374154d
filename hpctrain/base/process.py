"""How a program of ours is started, and what a forked process does first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PR_SET_PDEATHSIG = 1


def own_program(module: str, *words: str, python: str = "", unbuffered: bool = False) -> list[str]:
    """The command that runs a module of ours, or of a library, as a program.

    With ``-P``: ``python -m`` alone puts the working directory in front of everything that can be
    imported, and a job runs where its user typed submit. A ``json.py`` that lies there, somebody's
    or the user's own, would run in the place of the library's.

    Args:
        module: Its full name.
        words: The program's arguments.
        python: The interpreter; "" is this process's.
        unbuffered: What it prints is to appear at once.
    """
    flags = ["-P", "-u"] if unbuffered else ["-P"]
    return [python or sys.executable, *flags, "-m", module, *words]


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
