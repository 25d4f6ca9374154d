"""Files in folders that others can write: only ordinary ones are opened, and none is waited for.

A FIFO would keep its reader for ever, a device may do anything. Standard library only.
tests/unit/base/test_plain_files.py and tests/unit/agent/test_full_disk.py hold the promises.

Many sites set umask 002 and share project folders by group. A run names a program that its owner's
job executes, so nobody else writes into it, whatever the umask, unless `run.group_writable` says
so; then the run's folder can be written by its group, and all that is made in it later follows the
folder. tests/unit/base/test_modes.py holds the promises.

`data_dir` finds the files that come with hpctrain.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from hpctrain.core.base import clock
from hpctrain.errors import FileSystemFault, HpctrainError, IncompleteCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO

SMALL_BYTES = 64 << 20
"""More than any file has that is read in one piece."""
NOT_PLAIN = "not an ordinary file"
ROOT = 0
GROUP = 0o070
OTHERS_WRITE = 0o002
NOT_OWNER_WRITE = 0o022
GIT_IGNORE = ".gitignore"
PACKAGE = Path(__file__).resolve().parents[2]
"""Where hpctrain lies; its parent is what has to be on sys.path."""
MOST_SOURCE_BYTES = 4 << 20
"""Of a program that is read: a generated one beyond is no training program."""
_OF_HOST_NAMES = frozenset({"idna", "punycode", "undefined"})
"""Codecs that Python takes in a first line: they raise, or take minutes for megabytes."""
T = TypeVar("T")
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0
_PROOF = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""The file system has answered: there is no such file. Any other error (a stale handle, a server
that is away, an expired ticket) says nothing about the bytes."""


class NotText(ValueError):
    """A file that cannot be read, in words."""


def absolute(folder: Path, named: str | Path) -> Path:
    """The whole path of what is named in a folder; `link/..` is above what the link names."""
    path = folder / named
    above = os.path.realpath(path.parent) if ".." in path.parts else path.parent
    return Path(os.path.normpath(Path(above, path.name)))


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
    return open(plain_descriptor(path), "rb", buffering=0)


def plain_descriptor(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """The descriptor of an ordinary file, opened as asked.

    Raises:
        OSError: as of `open_plain`; also where it is a FIFO that nobody reads (ENXIO).
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    try:
        _refuse_odd(path, descriptor)
    except OSError:  # also of a server that does not answer: a poll must not gather descriptors
        os.close(descriptor)
        raise
    return descriptor


def _refuse_odd(path: Path, descriptor: int) -> None:
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, NOT_PLAIN, str(path))


def read_plain(path: Path, most_bytes: int = SMALL_BYTES) -> bytes:
    """All of an ordinary file.

    Raises:
        OSError: see `open_plain`; also where it has more bytes than that (EFBIG).
    """
    with open_plain(path) as file:
        return all_of(file, path, most_bytes)


def read_end(path: Path, most_bytes: int) -> str:
    """The last bytes of a log as text; a character that was cut is shown as one that is none.

    Raises:
        OSError: see `open_plain`.
    """
    with open_plain(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes).decode(errors="replace")


def all_of(file: FileIO, path: Path, most_bytes: int = SMALL_BYTES) -> bytes:
    """What is in a file that is open.

    Raises:
        OSError: it cannot be read, or has more bytes than that (EFBIG).
    """
    if os.fstat(file.fileno()).st_size > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
    return file.readall()


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Put a text where readers find either all of it or what was there before.

    With `durable` it outlives a power loss.

    Raises:
        OSError: it could not be written, e.g. the disk is full; names the file. What was there
            before is untouched, and nothing is left beside it.
    """
    with whole_file(path, durable=durable) as staged:
        write_plain(staged, text, durable=durable)


@contextlib.contextmanager
def whole_file(path: Path, mark: str = "new", *, durable: bool = False) -> Iterator[Path]:
    """Where to write what then takes the place of a file, or nothing does.

    `mark` is another one for each of several writers at once. With `durable` the name outlives a
    power loss.

    Raises:
        OSError: it could not be written; names the file. Nothing is left beside it.
    """
    staged = path.with_name(f"{path.name}.{mark}")
    try:
        yield staged
        staged.replace(path)
        if durable:
            flush_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def flush_directory(path: Path) -> None:
    """Make names in a directory survive a power loss."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_plain(path: Path, text: str, *, durable: bool = False) -> None:
    """Write an ordinary file anew.

    Raises:
        OSError: it could not be written, or something else is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(plain_descriptor(path, flags), "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_text(path: Path, most_bytes: int = SMALL_BYTES) -> str:
    """All of an ordinary file; what is no UTF-8 in it is replaced.

    Raises:
        OSError: see `read_plain`.
    """
    return read_plain(path, most_bytes).decode(errors="replace")


def read_source(path: Path) -> str:
    """The text of a file, in the encoding that its first lines name.

    Raises:
        NotText: it cannot be read, in words.
    """
    try:
        raw = read_plain(path, MOST_SOURCE_BYTES)
    except OSError as error:
        raise NotText(f"cannot be read: {error.strerror or error}") from None
    return decoded(raw)


def decoded(raw: bytes) -> str:
    """A source as text.

    Raises:
        NotText: it is in another encoding than it says.
    """
    import codecs
    import io
    import tokenize  # slow to import, and rarely needed

    if len(raw) > MOST_SOURCE_BYTES:
        raise NotText(f"has more than {MOST_SOURCE_BYTES} bytes")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        if codecs.lookup(encoding).name in _OF_HOST_NAMES:
            raise NotText(f"cannot be read: {encoding} is no encoding of a program")
        return raw.decode(encoding)
    except (SyntaxError, LookupError) as error:
        raise NotText(f"cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise NotText(
            f"is not {error.encoding} text at byte {error.start}; save it as UTF-8, or name its "
            "encoding in the first line"
        ) from None


def skip_hole(file: FileIO) -> None:
    """Continue where the file has bytes again: reading a terabyte of nothing takes minutes."""
    try:
        file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
    except OSError as error:  # other than that: the file system knows no holes
        if error.errno == errno.ENXIO:  # nothing but the hole is left
            file.seek(0, os.SEEK_END)


def data_extents(descriptor: int, end: int) -> list[tuple[int, int]]:
    """Where an open file has bytes up to `end`: places of the first byte, and after the last one.

    All of it where the file system knows no holes.
    """
    extents: list[tuple[int, int]] = []
    at = 0
    while at < end:
        try:
            first = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, first, os.SEEK_HOLE)
        except OSError as error:
            return extents if error.errno == errno.ENXIO else [*extents, (at, end)]
        if first < end:
            extents.append((first, min(at, end)))
    return extents


def make_runs_folder(path: Path) -> None:
    """Make the folder of all runs, and those above it, where they are missing.

    Where the umask lets others put their runs there too, they cannot move this user's: a run that
    another has put in its place would be the next that its job starts.

    The new folder of all runs ignores itself in git. A folder that is there stays as it is.

    Raises:
        OSError: one cannot be made.
    """
    for folder in reversed([path, *path.parents]):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & NOT_OWNER_WRITE:
            folder.chmod(mode | stat.S_ISVTX)
        if folder == path:
            with contextlib.suppress(OSError):  # a full disk: the writer of the run reports it
                (folder / GIT_IGNORE).write_text("*\n")


def remove_runs_folder(path: Path) -> None:
    """Remove a folder of runs that this process has made, if nobody has put a run there.

    Raises:
        OSError: it is gone, or it is not empty.
    """
    if [entry.name for entry in path.iterdir()] == [GIT_IGNORE]:
        (path / GIT_IGNORE).unlink()
    path.rmdir()


def can_be_replaced(runs: Path) -> str:
    """Who else can put something of his in the place of a run in this folder, and what helps.

    Words that follow the path; "" where nobody can. A folder's owner may rename all that is in
    it, sticky bit or not.
    """
    try:
        status = runs.stat()
    except OSError:
        return ""
    if status.st_uid not in {os.geteuid(), ROOT}:
        return f"belongs to user {status.st_uid}, who can; take a folder of your own"
    if status.st_mode & NOT_OWNER_WRITE and not status.st_mode & stat.S_ISVTX:
        return f"can be written by others; `chmod +t {shlex.quote(str(runs))}` keeps them from it"
    return ""


def make_run_folder(path: Path, *, group: bool) -> None:
    """Make a run's folder, and let this process write into it as `follow_folder` says.

    With `group` its group may write all of it but spec.json.

    Raises:
        OSError: FileExistsError where it is there already.
    """
    path.mkdir(mode=0o755)
    if group:
        path.chmod(stat.S_IMODE(path.stat().st_mode) | GROUP)
    follow_folder(path)


def follow_folder(folder: Path) -> None:
    """From here on this process, and those it starts, make nothing that is more open than a run.

    Group and others get no right to write. Where the run's folder can be written by its group, so
    can everything else, even if the umask would not have it.
    """
    umask = os.umask(NOT_OWNER_WRITE)
    if _is_shared(folder):
        os.umask(umask & ~GROUP | OTHERS_WRITE)
    else:
        os.umask(umask | NOT_OWNER_WRITE)


def make_private_folder(path: Path) -> None:
    """Make a folder that nobody else can look into, except the group of a shared run.

    It lies right below the run's. One that is there is shut too, if it is ours.
    """
    mode = 0o770 if _is_shared(path.parent) else 0o700
    path.mkdir(mode=mode, exist_ok=True)
    if path.stat().st_uid == os.geteuid():
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o777 | mode)


def write_private(path: Path, text: str, *, mode: int = 0o600, shared: bool = True) -> None:
    """Write a file whole or not at all that nobody else can write, and only the owner read.

    `mode` is 0o600 or 0o700; with `shared` the group of a shared run may read it.

    Raises:
        OSError: it could not be written, e.g. the disk is full; names the file. What was there
            before is untouched, and nothing is left beside it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    if shared and _is_shared(path.parent):
        mode |= (mode & 0o500) >> 3
    with whole_file(path) as staged:
        staged.unlink(missing_ok=True)  # another one's would keep its owner and its mode
        opened = os.open(staged, flags, mode)
        with os.fdopen(opened, "w", errors="surrogateescape") as file:  # paths may be no UTF-8
            os.fchmod(file.fileno(), mode)
            file.write(text)


def _is_shared(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWGRP)
    except OSError:
        return False


def data_dir(kind: Literal["site-configs", "sbatch", "docs"]) -> Path:
    """The folder that comes with hpctrain: inside an installed wheel, or at the top of a checkout.

    Raises:
        HpctrainError: it is in neither place.
    """
    places = (PACKAGE / "_data" / kind, PACKAGE.parent / kind)
    for place in places:
        if place.is_dir():
            return place
    raise HpctrainError(f"{places[0]} is missing from this installation; install hpctrain again")


def proves_absence(error: OSError) -> bool:
    """Whether the error says that there is no such file, and not that nobody can tell."""
    return error.errno in _PROOF


class Patience:
    """Tries again what the file system refuses, for so many seconds in all; then raises it.

    The sum is bounded, not each wait: other ranks wait meanwhile in a collective with a time-out.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        """Wait so long in all; without any seconds every error is raised at once."""
        self._all_s = seconds
        self._left_s = seconds

    def __call__(self, act: Callable[[], T]) -> T:
        """What the action returns, once it does; it may be called several times.

        Raises:
            FileSystemFault: and OSError, as the action's last try raised them.
            IncompleteCheckpoint: the same; a node may see a file later than others.
        """
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return act()
            except (OSError, FileSystemFault, IncompleteCheckpoint) as error:
                if self._left_s <= 0:
                    raise
                wait_s = min(wait_s, self._left_s)
                self._tell(error, wait_s)
            clock.sleep(wait_s)
            self._left_s -= wait_s
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _tell(self, error: Exception, wait_s: float) -> None:
        import logging  # here: every command reads this module, and none of them waits

        logging.getLogger("hpctrain.checkpoint").warning(
            "%s; tried again in %g s, for %g s more of %g s (checkpoint.patience_s)",
            error,
            wait_s,
            self._left_s,
            self._all_s,
        )
