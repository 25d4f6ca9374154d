"""A file system that is really full at so many bytes or files; for tests of what happens then.

A test module says `small_disk = support.small_disk` and has the fixture.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BUSY_S = 10.0
"""So long may a process that used the disk, and has been told to end, hold it on a busy machine."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`small_disk(size_bytes, files=None)`: an empty disk of that size; gone after the test.

    Only root may mount one: tests/conftest.py marks each test that asks for it `two_users`.
    """
    with contextlib.ExitStack() as disks:

        def make(size_bytes: int, files: int | None = None) -> Path:
            path = tmp_path / f"disk-{size_bytes}-{files}"
            disks.enter_context(mounted(path, size_bytes, files))
            return path

        yield make


@contextlib.contextmanager
def mounted(path: Path, size_bytes: int, files: int | None = None) -> Iterator[Path]:
    """A tmpfs of that size; whole pages, and the disk's own root is one of the files."""
    path.mkdir(parents=True)
    options = f"size={size_bytes}" + ("" if files is None else f",nr_inodes={files}")
    done = _call("mount", "-t", "tmpfs", "-o", options, "hpctrain-test", str(path))
    if done.returncode:
        pytest.fail(f"no disk can be mounted: {done.stderr.strip()}")
    try:
        yield path
    finally:
        done = _call("umount", str(path))
        deadline = time.monotonic() + BUSY_S
        while done.returncode and time.monotonic() < deadline:
            time.sleep(0.05)  # of a process that is just ending nobody tells
            done = _call("umount", str(path))
        if done.returncode:  # something still has a file open there: take it away, and say so
            _call("umount", "--lazy", str(path))
            pytest.fail(f"the small disk was still in use: {done.stderr.strip()}")


def fill(path: Path) -> int:
    """Write until the disk is full; returns how many bytes went in."""
    written = 0
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return written


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))
