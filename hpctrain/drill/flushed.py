"""Whether a file's bytes lie on the disk, or only in this machine's memory yet.

A missing fsync is seen by nobody until the power goes: the page cache outlives every process. Linux
(6.5 and newer) tells by cachestat(2) how many of a file's pages are dirty. Where the file system
does not account for them (tmpfs), a probe that was never flushed looks clean too; so it is asked
first. tests/e2e/test_drill.py holds the promises.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import TYPE_CHECKING

from hpctrain.drill.judging import WRITTEN_ELSEWHERE

if TYPE_CHECKING:
    from pathlib import Path

_CACHESTAT = 451
"""The number of the call, the same on every architecture."""
_PROBE = b"\x5a" * 65536


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")
    )


def unflushed_pages(descriptor: int) -> tuple[int, int] | None:
    """Pages of a file that are on no disk yet, and all that are in memory; None: nobody can say."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = _Pages()
    whole = _Range(0, 0)
    if libc.syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(pages), 0) != 0:
        return None
    return int(pages.dirty + pages.writeback), int(pages.cached)


def unflushed_files(folder: Path) -> list[str] | str:
    """Names of the files in a folder with bytes that a power cut would take.

    Returns:
        The names, or why nobody can say.
    """
    with tempfile.TemporaryFile(dir=folder.parent, buffering=0) as probe:
        probe.write(_PROBE)
        seen = unflushed_pages(probe.fileno())
    if seen is None:
        return "this kernel does not tell what lies in memory alone (cachestat, Linux 6.5)"
    if not seen[0]:
        return "this file system does not tell what lies in memory alone"
    unflushed, cached = [], 0
    for path in sorted(one for one in folder.iterdir() if one.is_file()):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = unflushed_pages(descriptor)
        finally:
            os.close(descriptor)
        if pages is None:
            return f"{path.name} cannot be asked about"
        cached += pages[1]
        unflushed += [path.name] if pages[0] else []
    if not cached:
        return WRITTEN_ELSEWHERE
    return unflushed
