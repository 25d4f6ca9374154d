"""A folder on a disk in memory, for tests that flush much and lose no power."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A new folder, gone afterwards; on an ordinary disk where there is none in memory."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="hpctrain-test-") as folder:
        yield Path(folder)


def entries(folder: Path) -> list[str]:
    """The paths of all that lies below a folder, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
