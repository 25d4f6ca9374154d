"""Read logs from disks and pipes, plain or packed, as blocks of whole lines.

One block is held at a time. tests/unit/doctor/test_files.py holds the promises.
"""

from __future__ import annotations

import bz2
import itertools
import lzma
import os
import sys
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from hpctrain.advise.doctor.lines import LINES, rank_of_file
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.core.base.files import open_plain
from hpctrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.advise.doctor.faults import LogFacts
    from hpctrain.advise.doctor.signature import SignatureTable

STDIN = "-"
BLOCK = 1 << 20
MOST_LINE = 8 << 20
"""A line without an end is cut here, as a progress bar's may be."""
MOST_FILES = 20_000
"""Of a folder: more are somebody's data set."""
_SAMPLE = 1 << 16
_XZ_MEMORY = 256 << 20
"""Of a packed log's dictionary: four times what `xz -9` needs, and no header can ask for more."""
_MAGIC: tuple[tuple[bytes, Callable[[], Any]], ...] = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(wbits=31)),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\x00", lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY)),
)
_PIECE = 64
"""Packed bytes at a time: so much of what lies before a damaged place is lost with it."""
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
        try:
            size = self.path.stat().st_size if self.path is not None else 0
        except OSError:
            return 0
        return size if self.tail_bytes is None else min(size, self.tail_bytes)


def inputs(names: Sequence[str]) -> list[LogInput]:
    """The logs that are meant: files, all files of folders, `-` for standard input.

    Raises:
        NotFound: a file is not there, or a folder has no log.
        UsageError: standard input twice, or a folder of too many files.
    """
    out: list[LogInput] = []
    for name in names:
        path = Path(name)
        if name == STDIN:
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
    files: list[LogInput] = []
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(where) / name
            plain_name = path.with_suffix("") if path.suffix in {".gz", ".xz", ".bz2"} else path
            if plain_name.suffix not in LINES["no_logs"] and path.is_file():
                rank = rank_of_file(plain_name.name)
                files.append(LogInput(str(path), path, is_named=False, rank=rank))
        if len(files) > MOST_FILES:
            raise UsageError(f"{folder} has more than {MOST_FILES:,} files: name the logs")
    if not files:
        raise NotFound(f"{folder} has no log")
    return files


_EMPTY = "it is empty"


class _NotText(OSError):
    """Nothing of it can be read as a log."""


def scan(
    logs: Sequence[LogInput],
    advance: Callable[[int], None] = lambda _count: None,
    signatures: SignatureTable | None = None,
) -> tuple[list[LogFacts], list[str]]:
    """Read logs, one after the other.

    Args:
        logs: Which.
        advance: Is called with the number of bytes that were read.
        signatures: What to look for; those of the package by default.

    Returns:
        What was read of each, and what could not be read, in a line each.

    Raises:
        UsageError: one that the user named is empty, no text, or cannot be read; or none of a
            folder can.
    """
    facts: list[LogFacts] = []
    notes: list[str] = []
    for log in logs:
        scanner = LogScanner(log.name, log.rank, signatures, attempt=log.attempt)
        try:
            for block in _blocks(log, advance, notes):
                scanner.feed(block)
        except OSError as error:
            why = error.strerror or str(error)
            if log.is_named:
                verb = "" if isinstance(error, _NotText) else " cannot be read"
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
    with nullcontext(sys.stdin.buffer) if log.path is None else open_plain(log.path) as opened:
        file = cast("IO[bytes]", opened)
        if log.tail_bytes is not None and log.tail_bytes < os.fstat(file.fileno()).st_size:
            file.seek(-log.tail_bytes, os.SEEK_END)
            file.readline()
            notes.append(f"of {log.name} only the last {log.tail_bytes >> 20} MiB were read")

        def read(size: int) -> bytes:
            content = file.read(size)
            advance(len(content))
            return content

        yield from _whole_lines(_unpacked(read, log.name, notes))


def _unpacked(read: Callable[[int], bytes], name: str, notes: list[str]) -> Iterator[bytes]:
    """Yield a file's content; of a packed one up to where it is torn or damaged, which is noted."""
    first = read(_SAMPLE)
    packing = next((packing for packing in _MAGIC if first.startswith(packing[0])), None)
    if packing is None:
        yield from itertools.chain(filter(None, [first]), iter(lambda: read(BLOCK), b""))
        return
    content = bytearray()
    is_new = True
    try:
        for part in _parts(_small_pieces(first, read), *packing):
            content += part
            if len(content) >= BLOCK:
                yield bytes(content)
                content, is_new = bytearray(), False
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, MemoryError) as error:
        fault = str(error) or "it needs more memory than there is"
        if is_new and not content:
            raise _NotText(f"nothing of it can be unpacked ({fault})") from None
        notes.append(f"{name} ends early: {fault}")
    if content:
        yield bytes(content)


def _parts(pieces: Iterator[bytes], magic: bytes, new: Callable[[], Any]) -> Iterator[bytes]:
    """Yield what packed pieces hold, also of several packed files behind each other.

    Raises:
        ValueError: the end is missing, or something else follows; or as of the decoder.
    """
    decoder, rest = new(), b""
    for piece in pieces:
        rest += piece
        # Few packed bytes may be megabytes: a decoder that was given them has more to give.
        while rest or not (decoder.eof or getattr(decoder, "needs_input", True)):
            if decoder.eof:
                rest = rest.lstrip(b"\0")  # padding
                if not rest.startswith(magic):
                    break
                decoder = new()
            yield decoder.decompress(rest, BLOCK)
            rest = decoder.unused_data if decoder.eof else b""
        if decoder.eof and len(rest) >= len(magic):
            break
    if rest or not decoder.eof:
        raise ValueError("what follows is not packed" if decoder.eof else "its end is missing")


def _small_pieces(first: bytes, read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield a packed file in small pieces, and its end byte by byte: its last words matter most."""
    while first:
        size = _PIECE if len(first) == _SAMPLE else 1
        yield from (first[at : at + size] for at in range(0, len(first), size))
        first = read(_SAMPLE)


def _whole_lines(contents: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks that end with a line's end."""
    rest = next(contents, b"")
    if not rest:
        raise _NotText(_EMPTY)
    if _is_binary(rest[:_SAMPLE]):
        raise _NotText("it is no text")
    for content in itertools.chain([b""], contents):
        rest += content
        end = rest.rfind(b"\n") + 1 or len(rest) * (len(rest) > MOST_LINE)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def _is_binary(first: bytes) -> bool:
    """Return whether much of it is control characters; holes of a network's disk are no sign."""
    sample = first.replace(b"\0" * 64, b"")
    return len(sample) - len(sample.translate(None, _CONTROLS)) > BINARY_SHARE * len(sample)
