"""Looks at processes through /proc: who descends from whom, and with which environment."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PROC = Path("/proc")
AT_A_TERMINAL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers ignore it
from hpctrain.cli.main import main
sys.exit(main())
"""
"""The command line as a program for `python -c`, which hears Ctrl-C."""


def parents() -> dict[int, int]:
    """Parent of every live process; zombies, which nobody can kill, are left out."""
    found: dict[int, int] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        if (parent := _parent(entry)) is not None:
            found[int(entry.name)] = parent
    return found


def _parent(entry: Path) -> int | None:
    """That of a process that runs; None if it does not."""
    try:
        stat = (entry / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]
    return None if state in "ZX" else int(parent)


def parent(pid: int) -> int:
    """Which process has started it, or has taken it over."""
    return parents()[pid]


def all_pids() -> list[int]:
    """Every live process of the machine."""
    return list(parents())


def descendants(*roots: int) -> list[int]:
    """All live processes below the roots, which are not included."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in parents().items():
        children[parent].append(pid)
    found: list[int] = []
    queue = list(roots)
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def alive(pid: int) -> bool:
    """True while the process runs (a zombie does not)."""
    return _parent(PROC / str(pid)) is not None


def environment(pid: int) -> dict[str, str]:
    """The environment the process was started with; empty once it has ended."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0"))
    return {name: value for name, mark, value in pairs if mark}


def command(pid: int) -> list[str]:
    """The words that the process was started with; empty once it has ended."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return raw.decode(errors="replace").split("\0")[:-1]


def executable(pid: int) -> str:
    """Name of the program file; empty once it has ended."""
    try:
        return (PROC / str(pid) / "exe").readlink().name
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def open_files(pid: int) -> set[str]:
    """Paths of what the process has open; empty once it has ended."""
    found: set[str] = set()
    try:
        links = list((PROC / str(pid) / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    for link in links:
        try:
            found.add(str(link.readlink()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def kill_all(pids: Iterable[int], signum: int = signal.SIGKILL) -> None:
    """Send a signal to each of them; those that have ended already are fine."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def listening(pid: int) -> set[str]:
    """Where a process listens over TCP, as "address:port" in the kernel's hexadecimals."""
    inodes = set()
    for entry in (PROC / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the folder is closed by now
            inodes.add(str(entry.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found
