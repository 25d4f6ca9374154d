"""New files that get their final names only when they are whole, flushed and verified.

What is written has a temporary name in the same directory. An interrupted or failed export removes
it; a killed one leaves it, under a name that nobody takes for the real one. The promises are held
by tests/unit/checkpoint/exchange/test_exchange_export.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from hpctrain.checkpoint.store.commit import flush_directory
from hpctrain.core.base.text import size
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class Placing:
    """Files that get their final names together, at the end."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory = directory
        self.names = list(names)

    def temporary(self, name: str) -> Path:
        """Where to write what will have this name."""
        return self.directory / f".{name}.partial-{os.getpid()}"

    def finish(self) -> list[Path]:
        """Give all files their names; on an error none has one.

        Raises:
            UsageError: one of the names is taken by now.
        """
        placed: list[Path] = []
        try:
            for name in self.names:
                final = self.directory / name
                _name(self.temporary(name), final)
                placed.append(final)
            flush_directory(self.directory)
        except BaseException:
            for path in placed:
                path.unlink(missing_ok=True)
            raise
        return placed

    def clear(self) -> None:
        """Remove what has no final name."""
        for name in self.names:
            self.temporary(name).unlink(missing_ok=True)


@contextlib.contextmanager
def placing(directory: Path, names: Sequence[str], need_bytes: int) -> Iterator[Placing]:
    """Give a directory that takes these new files; after an error none of them is there.

    The directory is made if it is missing; the files take `need_bytes` together.

    Raises:
        UsageError: one of them is there.
        CheckpointError: there is no room, or the disk refused.
    """
    place = Placing(directory, names)
    with errors_named(directory):
        made = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for name in names:
                _require_free(directory / name)
            _require_room(directory, need_bytes)
            yield place
        except BaseException:
            place.clear()
            if made:
                with contextlib.suppress(OSError):  # somebody else has put something there
                    directory.rmdir()
            raise


@contextlib.contextmanager
def errors_named(where: Path) -> Iterator[None]:
    """Errors of the file system in one line.

    Raises:
        CheckpointError: instead of OSError.
    """
    try:
        yield
    except OSError as error:
        named = error.filename or where
        raise CheckpointError(
            f"{named} cannot be written: {error.strerror or error}; nothing was left of it"
        ) from error


def flush(path: Path) -> None:
    """To disk, and out of memory, so that what is read back comes from the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _require_room(directory: Path, need: int) -> None:
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    # Some FUSE and network file systems report no blocks at all: that is no full disk.
    if stat.f_blocks and free < need:
        raise CheckpointError(
            f"{directory} has {size(free)} free and the export takes {size(need)}; choose another "
            "place, or --dtype bf16"
        )


def _name(temporary: Path, final: Path) -> None:
    """Rename, never onto something: a plain rename would replace a file without a word."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        raise _taken(final) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _require_free(final)
        temporary.rename(final)
        return
    temporary.unlink()


def _require_free(final: Path) -> None:
    if os.path.lexists(final):
        raise _taken(final)


def _taken(final: Path) -> UsageError:
    return UsageError(f"{final} exists and is left as it is; choose another")
