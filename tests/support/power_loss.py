"""What a disk may hold after a power loss: changes that were not flushed are there, or are not.

`Recorder` watches the changes that this process makes below a folder (Python's ways to the kernel
are wrapped, as in `every_call`). `states` gives what could be found after a loss of power behind
each of them, by the strict reading of POSIX: a file's bytes are there for certain once that file
was flushed, a name once its directory was; of the rest any part may be there, in any order. A
rename is one change. Of a write the size may be there without the bytes, or with some pages only.
"""

from __future__ import annotations

import io
import itertools
import os
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE_BYTES = 4096
"""The kernel writes a file back in pages, in any order."""
ROOT = 0
"""The number of the folder itself."""


class Named(NamedTuple):
    """Names in a directory that begin or cease to mean something, all at once."""

    inode: int
    names: dict[str, int | None]


class Wrote(NamedTuple):
    """Bytes of a file."""

    inode: int
    offset: int
    content: bytes


class Sized(NamedTuple):
    """The size of a file, at least."""

    inode: int
    size: int


class Flushed(NamedTuple):
    """All that was changed of a file or a directory until now is there for certain."""

    inode: int
    path: str
    """For people."""


class Reached(NamedTuple):
    """The program was told that something is done."""

    what: Any


Change = Named | Wrote | Sized | Flushed | Reached


@dataclass
class Disk:
    """Directories and files by number, as they lie on the disk."""

    directories: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        """Make a change; one of a name that is not there makes what it names all the same."""
        if isinstance(change, Named):
            directory = self.directories.setdefault(change.inode, {})
            for name, inode in change.names.items():
                if inode is None:
                    directory.pop(name, None)
                else:
                    directory[name] = inode
        elif isinstance(change, (Wrote, Sized)):
            content = self.files.setdefault(change.inode, bytearray())
            size = change.size if isinstance(change, Sized) else change.offset + len(change.content)
            content.extend(bytes(max(0, size - len(content))))
            if isinstance(change, Wrote):
                content[change.offset : size] = change.content

    def tree(self, inode: int = ROOT) -> tuple[Any, ...]:
        """All that can be reached, as something that can be compared and hashed."""
        rows = []
        for name, child in sorted(self.directories.get(inode, {}).items()):
            is_file = child in self.files
            rows.append((name, bytes(self.files[child]) if is_file else self.tree(child)))
        return tuple(rows)


def lay_out(tree: tuple[Any, ...], folder: Path) -> None:
    """Make the files of `Disk.tree`."""
    folder.mkdir()
    for name, content in tree:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            lay_out(content, folder / name)


class Recorder:
    """The changes that this process makes to one directory of a folder, which is not there yet."""

    def __init__(self, folder: Path, name: str) -> None:
        self.changes: list[Change] = []
        self._folder = folder
        self._name = name
        self._live = Disk()
        self._inodes: dict[int, int] = {}
        """Of open descriptors."""
        self._numbers = itertools.count(1)

    def reached(self, what: Any) -> None:
        """Note that the program counts on something from here on."""
        self.changes.append(Reached(what))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the block ends; other threads of this process must change nothing there."""
        real = {name: getattr(os, name) for name in (*_WATCHED, *_UNKNOWN)}
        real_open = io.open
        for name in _WATCHED:
            setattr(os, name, partial(getattr(self, f"_{name}"), real[name]))
        for name in _UNKNOWN:
            setattr(os, name, partial(self._refuse, name, real[name]))
        io.open = self._stream
        try:
            yield
        finally:
            io.open = real_open
            for name, call in real.items():
                setattr(os, name, call)

    # ---- where

    def _parts(self, path: Any, dir_fd: int | None = None) -> tuple[str, ...] | None:
        """The path below the folder; None for what is not watched."""
        if isinstance(path, int):
            return None
        text = os.fspath(path)
        if dir_fd is not None:
            text = Path(f"/proc/self/fd/{dir_fd}").readlink() / text
        try:
            parts = Path(text).absolute().relative_to(self._folder).parts
        except ValueError:
            return None
        return parts if not parts or parts[0] == self._name else None

    def _inode(self, parts: tuple[str, ...]) -> int | None:
        inode: int | None = ROOT
        for one in parts:
            inode = None if inode is None else self._live.directories[inode].get(one)
        return inode

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        parts = self._parts(path, dir_fd)
        if not parts:
            return None
        above = self._inode(parts[:-1])
        assert above is not None, f"{path} lies in a directory that nobody made"
        return above, parts[-1]

    # ---- what changes

    def _note(self, *changes: Change) -> None:
        for change in changes:
            self._live.apply(change)
            self.changes.append(change)

    def _appear(self, place: tuple[int, str] | None, *, directory: bool = False) -> None:
        if place is None:
            return
        inode = next(self._numbers)
        if directory:
            self._live.directories[inode] = {}
        else:
            self._live.files[inode] = bytearray()
        self._note(Named(place[0], {place[1]: inode}))

    def _opened(self, handle: int, path: Any, dir_fd: int | None, *, creates: bool) -> None:
        parts = self._parts(path, dir_fd)
        if parts is None:
            return
        if creates and self._inode(parts) is None:
            self._appear(self._place(path, dir_fd))
        inode = self._inode(parts)
        assert inode is not None
        self._inodes[handle] = inode

    def _wrote(self, handle: int, offset: int, content: bytes) -> None:
        inode = self._inodes.get(handle)
        if inode is not None:
            self._note(Sized(inode, offset + len(content)))
            for low in range(0, len(content), PAGE_BYTES):
                self._note(Wrote(inode, offset + low, content[low : low + PAGE_BYTES]))

    def _open(
        self, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        handle: int = real(path, flags, mode, dir_fd=dir_fd)
        assert not (flags & os.O_TRUNC and self._parts(path, dir_fd)), "O_TRUNC is not modelled"
        self._opened(handle, path, dir_fd, creates=bool(flags & os.O_CREAT))
        return handle

    def _close(self, real: Any, handle: int) -> None:
        self._inodes.pop(handle, None)
        real(handle)

    def _mkdir(self, real: Any, path: Any, *args: Any, **options: Any) -> None:
        real(path, *args, **options)
        self._appear(self._place(path), directory=True)

    def _rename(self, real: Any, source: Any, target: Any) -> None:
        real(source, target)
        old, new = self._place(source), self._place(target)
        if old is None or new is None:
            assert old is new, "a rename out of the watched directory is not modelled"
            return
        assert old[0] == new[0], "a rename between directories is not modelled"
        inode = self._live.directories[old[0]][old[1]]
        self._note(Named(old[0], {old[1]: None, new[1]: inode}))

    _replace = _rename

    def _unlink(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if place is not None:
            self._note(Named(place[0], {place[1]: None}))

    _remove = _rmdir = _unlink

    def _pwritev(self, real: Any, handle: int, buffers: Sequence[Any], offset: int) -> int:
        count: int = real(handle, buffers, offset)
        self._wrote(handle, offset, b"".join(buffers)[:count])
        return count

    def _fsync(self, real: Any, handle: int) -> None:
        real(handle)
        inode = self._inodes.get(handle)
        if inode is not None:
            path = Path(f"/proc/self/fd/{handle}").readlink()
            self._note(Flushed(inode, str(path.relative_to(self._folder))))

    def _refuse(self, name: str, real: Any, path: Any, *args: Any, **options: Any) -> Any:
        known = path in self._inodes if isinstance(path, int) else self._parts(path) is not None
        assert not known, f"os.{name} is not modelled"
        return real(path, *args, **options)

    def _stream(self, file: Any, mode: str = "r", buffering: int = -1, *text: Any) -> Any:
        recorder, plain = self, mode.replace("b", "").replace("t", "")

        class Raw(io.FileIO):
            def __init__(self) -> None:
                super().__init__(file, plain)
                if not isinstance(file, int):
                    recorder._opened(self.fileno(), file, None, creates=plain != "r")

            def write(self, data: Any) -> int:
                offset = self.tell()
                count = super().write(data)
                recorder._wrote(self.fileno(), offset, bytes(data)[:count])
                return count

            def close(self) -> None:
                if not self.closed:
                    recorder._inodes.pop(self.fileno(), None)
                super().close()

        raw = Raw()
        if buffering == 0:
            return raw
        stream: Any = io.BufferedReader(raw) if plain == "r" else io.BufferedWriter(raw)
        return stream if "b" in mode else io.TextIOWrapper(stream, *text)


_WATCHED = (
    "open", "close", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "pwritev", "fsync",
)  # fmt: skip
_UNKNOWN = ("write", "pwrite", "writev", "truncate", "ftruncate", "link", "symlink")
"""Whoever begins to use one of these in a save teaches it to the model."""


def states(
    changes: Sequence[Change], *, parts: int, since: int = 0, seed: int = 0
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """What may be found after a loss of power: behind how many changes, and `Disk.tree`.

    Of what was not flushed: none; all; any beginning; all but one; one alone; and `parts` parts of
    it by chance. Each tree comes once behind the same `Reached`. Only behind more than `since`.
    """
    dice = random.Random(seed)
    seen: set[tuple[int, tuple[Any, ...]]] = set()
    for end in range(since, len(changes) + 1):
        told = sum(isinstance(change, Reached) for change in changes[:end])
        loose = _loose(changes[:end])
        for kept in _parts_of(loose, dice, parts):
            lost = set(loose) - kept
            disk = Disk()
            for number, change in enumerate(changes[:end]):
                if number not in lost:
                    disk.apply(change)
            tree = disk.tree()
            if (told, tree) not in seen:
                seen.add((told, tree))
                yield end, tree


def _loose(changes: Sequence[Change]) -> list[int]:
    """Numbers of the changes that no flush has made certain."""
    flushed: set[int] = set()
    loose = []
    for number in reversed(range(len(changes))):
        change = changes[number]
        if isinstance(change, Flushed):
            flushed.add(change.inode)
        elif not isinstance(change, Reached) and change.inode not in flushed:
            loose.append(number)
    return loose[::-1]


def _parts_of(loose: list[int], dice: random.Random, parts: int) -> Iterator[set[int]]:
    whole = set(loose)
    for count in range(len(loose) + 1):
        yield set(loose[:count])
    for one in loose:
        yield whole - {one}
        yield {one}
    for _ in range(parts if len(loose) > 1 else 0):
        yield {one for one in loose if dice.random() < 0.5}
