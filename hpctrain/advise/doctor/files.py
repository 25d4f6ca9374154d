"""Read logs from disks and pipes, plain or packed, as blocks of whole lines.

One block is held at a time. tests/unit/doctor/test_files.py holds the promises.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import lzma
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hpctrain.advise.doctor.lines import LINES, rank_of_file
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.core.base.files import NotText, open_plain
from hpctrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.advise.doctor.faults import LogFacts
    from hpctrain.advise.doctor.signature import SignatureTable

BLOCK = 1 << 20
MOST_LINE = 8 << 20
"""A line without an end is cut here, as a progress bar's may be."""
MOST_FILES = 20_000
"""Of a folder: more are somebody's data set."""
_SAMPLE = 1 << 16
_XZ_MEMORY = 256 << 20  # four times what `xz -9` needs; a header may ask for 4 GiB
_PACKED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
BINARY_SHARE = 0.1
"""Of control characters in a file's beginning: it is no text."""
_CONTROLS = bytes([*range(9), *range(14, 27)])


@dataclass(frozen=True)
class LogInput:
    """A log to read."""

    name: str  # as it is shown
    path: Path | None  # None for standard input
    is_named: bool = True  # the user named it; what lies in a folder may be passed over
    tail_bytes: int | None = None  # only its end is read; None for all
    rank: int | None = None  # who wrote it
    attempt: int | None = None  # of which attempt of a run lines are wanted; None for all

    @property
    def size(self) -> int:
        """Bytes to read, as far as the file system knows."""
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size if self.path is not None else 0
            return size if self.tail_bytes is None else min(size, self.tail_bytes)
        return 0


def inputs(names: Sequence[str]) -> list[LogInput]:
    """Return the logs that are meant: files, all files of folders, `-` for standard input.

    Raises:
        NotFound: a file is not there, or a folder has no log.
        UsageError: standard input twice, or a folder of too many files.
    """
    out: list[LogInput] = []
    for name in names:
        path = Path(name)
        if name == "-":
            if any(log.path is None for log in out):
                raise UsageError("standard input (-) can be read once")
            out.append(LogInput("standard input", None))
        elif path.is_dir():
            out += _of_folder(path)
        elif not path.exists():
            raise NotFound(f"{name}: there is no such file or folder")
        else:
            out.append(LogInput(name, path, rank=rank_of_file(path.name)))
    return out


def _of_folder(folder: Path) -> list[LogInput]:
    paths = [*itertools.islice(folder.rglob("*"), MOST_FILES + 1)]
    if len(paths) > MOST_FILES:
        raise UsageError(f"{folder} has more than {MOST_FILES:,} files: name the logs")
    logs = []
    for path in sorted(paths):
        plain = path.with_suffix("") if path.suffix in {".gz", ".xz", ".bz2"} else path
        if plain.suffix not in LINES["no_logs"] and path.is_file():
            logs.append(LogInput(str(path), path, is_named=False, rank=rank_of_file(plain.name)))
    if not logs:
        raise NotFound(f"{folder} has no log")
    return logs


_EMPTY = "it is empty"


def scan(
    logs: Sequence[LogInput],
    advance: Callable[[int], None] = lambda _count: None,
    signatures: SignatureTable | None = None,
) -> tuple[list[LogFacts], list[str]]:
    """Read logs; return what was read of each, and a note for each that could not be read.

    Args:
        logs: Which.
        advance: Is called with the number of bytes that were read.
        signatures: What to look for; those of the package by default.

    Raises:
        UsageError: one that the user named has no text or cannot be read, or none of a folder can.
    """
    facts: list[LogFacts] = []
    notes: list[str] = []
    for log in logs:
        scanner = LogScanner(log.name, log.rank, signatures, attempt=log.attempt)
        try:
            for block in _blocks(log, advance, notes):
                scanner.feed(block)
        except (OSError, NotText) as error:
            why = getattr(error, "strerror", None) or str(error)
            if log.is_named:
                verb = "" if isinstance(error, NotText) else " cannot be read"
                raise UsageError(f"{log.name}{verb}: {why}") from None
            if why != _EMPTY:
                notes.append(f"{log.name} was left out: {why}")
        else:
            facts.append(scanner.finish())
    if not facts:
        raise UsageError(f"none of {len(logs)} files has text: {'; '.join(notes[:3]) or _EMPTY}")
    return facts, notes


def _blocks(log: LogInput, advance: Callable[[int], None], notes: list[str]) -> Iterator[bytes]:
    """Yield a log's blocks of whole lines; notes get what was left out."""
    path, stdin = log.path, cast("io.BufferedReader", sys.stdin.buffer)
    opened = contextlib.nullcontext(stdin) if path is None else io.BufferedReader(open_plain(path))
    with opened as file:
        if log.tail_bytes is not None and log.tail_bytes < os.fstat(file.fileno()).st_size:
            file.seek(-log.tail_bytes, os.SEEK_END)
            file.readline()
            notes.append(f"of {log.name} only the last {log.tail_bytes >> 20} MiB were read")
        at = file.tell() if log.path is not None else 0
        for block in _whole_lines(_contents(file, log.name, notes)):
            yield block
            if log.path is not None:
                advance(file.tell() - at)
                at = file.tell()


def _contents(file: Any, name: str, notes: list[str]) -> Iterator[bytes]:
    """Yield a file's content; of a packed one up to where it is torn or damaged, which is noted."""
    begin, has_some = file.peek(8), False
    unpack = next((unpack for magic, unpack in _PACKED.items() if begin.startswith(magic)), None)
    unpacked = file if unpack is None else unpack(file)
    try:
        if isinstance(unpacked, lzma.LZMAFile):  # which itself knows no limit
            lzma.LZMADecompressor(memlimit=_XZ_MEMORY).decompress(file.peek(), 1)
        while content := unpacked.read1(BLOCK):
            yield content
            has_some = True
    except (OSError, EOFError, zlib.error, lzma.LZMAError, MemoryError) as error:
        fault = str(error) or "it needs more memory than there is"
        if not has_some:
            raise NotText(f"nothing of it can be read ({fault})") from None
        notes.append(f"{name} ends early: {fault}")


def _whole_lines(contents: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks that end with a line's end."""
    rest = bytearray(next(contents, b""))
    if not rest:
        raise NotText(_EMPTY)
    sample = rest[:_SAMPLE].replace(b"\0" * 64, b"")  # holes of a network's disk are no sign
    if len(sample) - len(sample.translate(None, _CONTROLS)) > BINARY_SHARE * len(sample):
        raise NotText("it is no text")
    for content in contents:
        rest += content
        if len(rest) >= BLOCK:
            end = rest.rfind(b"\n", max(0, len(rest) - len(content) - BLOCK)) + 1 or len(rest) * (
                len(rest) > MOST_LINE
            )
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)
