"""The files of a program's own checkpoint: which they are, their digests, copies, a new place.

Others may write where a program saves, and what it loads is often run (a pickle). So only ordinary
files of this user's are sealed, and no link is followed below the path that is sealed. Of a run
that its group shares, files may be anybody's. tests/unit/checkpoint/sealed/test_resume.py holds
the promises.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from hpctrain.checkpoint.format.manifest import PREFIX, READ_BYTES
from hpctrain.checkpoint.sealed.manifest import MOST_FILES, SealedFile
from hpctrain.checkpoint.store.commit import flush_directory, remove_tree
from hpctrain.core.base.files import ROOT, plain_descriptor
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO

COPY_BYTES = 64 << 20
_NO_RANGE = frozenset(
    {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EIO}
)
"""copy_file_range(2) cannot do it here; reading and writing may, or says what is wrong."""


@dataclass(frozen=True)
class UnitFile:
    """One file of what is to be sealed, by its name below the unit's root and without its bytes."""

    name: str
    size: int
    mtime_ns: int


def root_of(path: Path, *, is_folder: bool) -> Path:
    """The folder to which a unit's file names are relative."""
    return path if is_folder else path.parent


def unit_files(path: Path, *, anybodys: bool = False) -> list[UnitFile]:
    """List every file of a checkpoint (a file or a folder) by name; open none.

    With `anybodys`, files of other users are accepted.

    Raises:
        CheckpointError: there is nothing, or something that is not sealed: a link, a FIFO, another
            user's file.
        OSError: the file system did not answer.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        return [_unit_file(path, path.name, status, anybodys=anybodys)]
    files = sorted(_below(path, "", anybodys=anybodys), key=lambda file: file.name)
    if not files:
        raise CheckpointError(f"{path} is an empty folder; there is nothing to seal")
    if len(files) > MOST_FILES:
        raise CheckpointError(f"{path} has {len(files):,} files; {MOST_FILES:,} can be sealed")
    return files


def _below(folder: Path, prefix: str, *, anybodys: bool) -> Iterator[UnitFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            name = prefix + entry.name
            if stat.S_ISDIR(status.st_mode):
                yield from _below(Path(entry.path), f"{name}/", anybodys=anybodys)
            else:
                yield _unit_file(Path(entry.path), name, status, anybodys=anybodys)


def _unit_file(path: Path, name: str, status: os.stat_result, *, anybodys: bool) -> UnitFile:
    if stat.S_ISLNK(status.st_mode):
        raise CheckpointError(f"{path} is a link; only ordinary files are registered")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no ordinary file; only such are registered")
    if not anybodys and status.st_uid not in {os.geteuid(), ROOT}:
        raise CheckpointError(
            f"{path} belongs to user {status.st_uid}; only your own are registered"
        )
    return UnitFile(name, status.st_size, max(0, status.st_mtime_ns))


def sealed_file(
    path: Path, file: UnitFile, copy: Path | None, on_bytes: Callable[[int], object] | None = None
) -> SealedFile:
    """Return the digest of a listed file; flush what was read to disk.

    With `copy`, copy the file there; the digest is then of the copy's bytes.

    Raises:
        CheckpointError: it was changed since it was listed.
        OSError: it cannot be read, or the copy not be written.
    """
    with _open(path) as source:
        if copy is None:
            digest = _digest(source.fileno(), on_bytes)
            os.fsync(source.fileno())
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copied(source.fileno(), copy, on_bytes)
            digest = digest_of(copy, on_bytes)
        status = os.fstat(source.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise CheckpointError(
            f"{path} was changed while it was registered; seal what is written out"
        )
    return SealedFile(file.name, file.size, digest, file.mtime_ns)


def _open(path: Path) -> FileIO:
    descriptor = plain_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW)
    return open(descriptor, "rb", buffering=0)  # noqa: PTH123 - a descriptor has no path


def digest_of(path: Path, on_bytes: Callable[[int], object] | None = None) -> str:
    """The digest of an ordinary file's bytes; no link is followed.

    Raises:
        OSError: it cannot be read.
    """
    with _open(path) as file:
        return _digest(file.fileno(), on_bytes)


def _digest(descriptor: int, on_bytes: Callable[[int], object] | None) -> str:
    hasher = xxhash.xxh3_64()
    part = memoryview(bytearray(READ_BYTES))
    os.lseek(descriptor, 0, os.SEEK_SET)
    while size := os.readv(descriptor, [part]):
        hasher.update(part[:size])
        if on_bytes is not None:
            on_bytes(size)
    return PREFIX + hasher.hexdigest()


def _copied(source: int, copy: Path, on_bytes: Callable[[int], object] | None = None) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    target = os.open(copy, flags, 0o666)
    try:
        _copy_bytes(source, target, on_bytes or (lambda _: None))
        os.fsync(target)
    finally:
        os.close(target)


def _copy_bytes(source: int, target: int, on_bytes: Callable[[int], object]) -> None:
    """Copy by the file system if it can (it may share the blocks); call `on_bytes` with 0 per part.

    `on_bytes` may raise to end the copy.
    """
    try:
        while os.copy_file_range(source, target, COPY_BYTES):
            on_bytes(0)
    except OSError as error:
        if error.errno not in _NO_RANGE:
            raise
    else:
        # Some file systems say that nothing is left of a file of theirs that is not empty.
        if os.fstat(target).st_size == os.fstat(source).st_size:
            return
    os.lseek(source, 0, os.SEEK_SET)
    os.ftruncate(target, 0)
    os.lseek(target, 0, os.SEEK_SET)
    with (
        open(source, "rb", buffering=0, closefd=False) as reader,
        open(target, "wb", buffering=0, closefd=False) as writer,
    ):
        while part := reader.read(READ_BYTES):
            on_bytes(0)
            writer.write(part)


def flush_tree(root: Path) -> None:
    """Make the names in a folder, and in those below it, survive a power loss."""
    for folder, _, _ in os.walk(root, topdown=False):
        flush_directory(Path(folder))


def put_back(copy: Path, path: Path, on_bytes: Callable[[int], object] | None = None) -> None:
    """Put a copy where it came from: readers find nothing there, or all of it.

    The copy stays. Whatever lies in the way must have been moved first. What `on_bytes` raises ends
    it; it is told of no bytes, since they were read before.

    Raises:
        OSError: it cannot be written; what was begun is removed.
    """
    staged = path.with_name(f".{path.name}.putting-back")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_tree(staged)
    try:
        if copy.is_dir():
            for file in unit_files(copy, anybodys=True):
                _put(copy / file.name, staged / file.name, on_bytes)
            flush_tree(staged)
        else:
            _put(copy, staged, on_bytes)
        staged.rename(path)
        flush_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(staged)
        raise


def _put(source: Path, target: Path, on_bytes: Callable[[int], object] | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _open(source) as file:
        _copied(file.fileno(), target, on_bytes)
