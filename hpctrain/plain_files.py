"""Files in folders that others can write: only ordinary ones are opened, and nothing is waited for.

A FIFO would keep its reader for ever, a device may do anything. Standard library only.
tests/unit/test_plain_files.py holds the promises.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

SMALL_BYTES = 64 << 20
"""More than any file has that is read in one piece."""


def is_plain(path: Path) -> bool:
    """Whether an ordinary file is there, or a link to one.

    Raises:
        OSError: nobody can tell, e.g. the folder may not be looked into.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def open_plain(path: Path) -> FileIO:
    """An ordinary file, open for reading without a buffer.

    Raises:
        OSError: it is not there, may not be read, or is something else (EINVAL).
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return open(descriptor, "rb", buffering=0)  # noqa: PTH123 - a descriptor has no path


def read_plain(path: Path, most_bytes: int = SMALL_BYTES) -> bytes:
    """All of an ordinary file.

    Raises:
        OSError: see `open_plain`; also where it has more bytes than that (EFBIG).
    """
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
        return file.readall()
