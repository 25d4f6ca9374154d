"""Logs from disks and pipes, as blocks of whole lines in UTF-8, however they were written.

Plain, gzip, bzip2 and xz; UTF-16 is recognised; what cannot be decoded is replaced. One block is
held at a time. tests/unit/doctor/test_files.py holds the promises.
"""

from __future__ import annotations

import bz2
import codecs
import lzma
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from hpctrain.advise.doctor.lines import rank_of_file
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.core.base.files import open_plain
from hpctrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.advise.doctor.sighting import LogFacts
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
_NO_LOGS = frozenset(
    {
        *(".pt", ".pth", ".bin", ".safetensors", ".distcp", ".pickle", ".pkl", ".npy", ".npz"),
        *(".py", ".sh", ".toml", ".yaml", ".yml", ".md", ".csv", ".tsv", ".so", ".zip", ".tar"),
        *(".png", ".svg", ".html", ".json", ".jsonl", ".times", ".lock", ".nsys-rep"),
    }
)
"""Endings that are passed over in a folder."""
BINARY_SHARE = 0.1
"""Of control characters in a file's beginning: it is no text."""


@dataclass(frozen=True)
class LogInput:
    """A log to read.

    Attributes:
        name: As it is shown.
        path: None for standard input.
        is_named: The user named it; what lies in a folder may be passed over.
        tail_bytes: Only its end is read; None for all.
        rank: Who wrote it; None where nobody knows.
        attempt: Of which attempt of a run lines are wanted; None for all.
    """

    name: str
    path: Path | None
    is_named: bool = True
    tail_bytes: int | None = None
    rank: int | None = None
    attempt: int | None = None

    @property
    def size(self) -> int:
        """Bytes to read, as far as the file system tells."""
        if self.path is None:
            return 0
        try:
            size = self.path.stat().st_size
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
            if plain_name.suffix not in _NO_LOGS and path.is_file():
                rank = rank_of_file(plain_name.name)
                files.append(LogInput(str(path), path, is_named=False, rank=rank))
        if len(files) > MOST_FILES:
            raise UsageError(f"{folder} has more than {MOST_FILES:,} files: name the logs")
    if not files:
        raise NotFound(f"{folder} has no log")
    return files


def scan(
    logs: Sequence[LogInput],
    advance: Callable[[int], None] | None = None,
    signatures: SignatureTable | None = None,
) -> tuple[list[LogFacts], list[str]]:
    """Read logs, one after the other.

    Args:
        logs: Which.
        advance: Is told of bytes that were read.
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
        try:
            read = _scan_one(log, advance or (lambda _count: None), notes, signatures)
        except _NotText as why:
            if log.is_named:
                raise UsageError(f"{log.name}: {why}") from None
            if str(why) != _EMPTY:
                notes.append(f"{log.name} was left out: {why}")
            continue
        except OSError as error:
            why_not = error.strerror or str(error)
            if log.is_named:
                raise UsageError(f"{log.name} cannot be read: {why_not}") from None
            notes.append(f"{log.name} was left out: {why_not}")
            continue
        facts.append(read)
    if not facts:
        raise UsageError(f"none of {len(logs)} files has text: {'; '.join(notes[:3]) or _EMPTY}")
    return facts, notes


class _NotText(Exception):
    """Nothing of it can be read as a log."""


_EMPTY = "it is empty"


def _scan_one(
    log: LogInput,
    advance: Callable[[int], None],
    notes: list[str],
    signatures: SignatureTable | None,
) -> LogFacts:
    scanner = LogScanner(log.name, log.rank, signatures, attempt=log.attempt)
    if log.path is None:
        _feed(scanner, sys.stdin.buffer, log, advance, notes)
        return scanner.finish()
    with open_plain(log.path) as file:
        size = os.fstat(file.fileno()).st_size
        if log.tail_bytes is not None and size > log.tail_bytes:
            file.seek(size - log.tail_bytes)
            file.readline()
            notes.append(f"of {log.name} only the last {log.tail_bytes >> 20} MiB were read")
        _feed(scanner, cast("IO[bytes]", file), log, advance, notes)
    return scanner.finish()


def _feed(
    scanner: LogScanner,
    file: IO[bytes],
    log: LogInput,
    advance: Callable[[int], None],
    notes: list[str],
) -> None:
    counted = _CountedFile(file, advance)
    first = counted.read(_SAMPLE)
    read: Callable[[int], bytes] = counted.read
    for magic, new in _MAGIC:
        if first.startswith(magic):
            unpacked = _UnpackedFile(counted, first, magic, new)
            first, read = unpacked.read(_SAMPLE), unpacked.read
            break
    else:
        unpacked = None
    try:
        for block in _blocks(read, first):
            scanner.feed(block)
    except _NotText:
        if first or unpacked is None or not unpacked.fault:
            raise
        raise _NotText(f"nothing of it can be unpacked ({unpacked.fault})") from None
    if unpacked is not None and unpacked.fault:
        notes.append(f"{log.name} ends early: {unpacked.fault}")


class _CountedFile:
    """A file whose bytes are counted as they are read."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], None]) -> None:
        self._file = file
        self._advance = advance

    def read(self, size: int) -> bytes:
        """At most that many bytes; b"" at the end."""
        content = self._file.read(size)
        self._advance(len(content))
        return content


class _UnpackedFile:
    """A packed file's content, up to where it is torn or damaged.

    Attributes:
        fault: Why it ended before its end; "" while it did not.
    """

    def __init__(
        self, file: _CountedFile, first: bytes, magic: bytes, new: Callable[[], Any]
    ) -> None:
        self.fault = ""
        self._file, self._packed, self._at = file, first, 0
        self._magic, self._new = magic, new
        self._decoder = new()

    def read(self, size: int) -> bytes:
        """About that many bytes; b"" at the end. What came before a fault is given first."""
        content = bytearray()
        while len(content) < size and not self.fault:
            piece = b"" if self._has_more() else self._next_piece()
            if self._decoder.eof:
                if not self._begin_next():
                    break
                continue
            if not piece and not self._has_more():
                self.fault = "its end is missing"
                break
            try:
                content += self._decoder.decompress(piece, BLOCK)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, MemoryError) as why:
                self.fault = str(why) or "it needs more memory than there is"
        return bytes(content)

    def _has_more(self) -> bool:
        """Whether bytes that were given already have more to say: few of them may be megabytes."""
        return not getattr(self._decoder, "needs_input", True) and not self._decoder.eof

    def _next_piece(self) -> bytes:
        if self._decoder.eof:
            return b""
        if self._at >= len(self._packed):
            self._packed, self._at = self._file.read(_SAMPLE), 0
        # The end of a file byte by byte: its last words matter most, and a checksum comes behind.
        size = _PIECE if len(self._packed) == _SAMPLE else 1
        piece = self._packed[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def _begin_next(self) -> bool:
        """Go on with what stands behind a packed part: another one; zeros are padding."""
        rest = self._decoder.unused_data + self._packed[self._at :]
        while True:
            rest = rest.lstrip(b"\0")
            if len(rest) >= len(self._magic) or not (more := self._file.read(_SAMPLE)):
                break
            rest += more
        if not rest.startswith(self._magic):
            self.fault = "what follows is not packed" if rest else ""
            return False
        self._packed, self._at, self._decoder = rest, 0, self._new()
        return True


def _blocks(read: Callable[[int], bytes], first: bytes) -> Iterator[bytes]:
    """Blocks of whole lines in UTF-8, or of ASCII's like."""
    if not first:
        raise _NotText(_EMPTY)
    decoder = _decoder(first)
    if decoder is None and _is_binary(first):
        raise _NotText("it is no text")
    rest, content = b"", first
    while content:
        if decoder is not None:
            content = decoder.decode(content).encode("utf-8", "replace")
        end = content.rfind(b"\n") + 1
        if end:
            yield rest + content[:end]
            rest = content[end:]
        else:
            rest += content
            if len(rest) > MOST_LINE:
                yield rest
                rest = b""
        content = read(BLOCK)
    if decoder is not None:
        rest += decoder.decode(b"", final=True).encode("utf-8", "replace")
    if rest:
        yield rest


def _decoder(first: bytes) -> codecs.IncrementalDecoder | None:
    """For UTF-16, by its mark or by every other byte being null; None for all else."""
    name = ""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        name = "utf-16"
    elif len(first) >= 8:  # noqa: PLR2004 - too short to tell
        half = len(first) // 2
        if first[1::2].count(0) > half * 0.7 and first[0::2].count(0) < half * 0.1:
            name = "utf-16-le"
        elif first[0::2].count(0) > half * 0.7 and first[1::2].count(0) < half * 0.1:
            name = "utf-16-be"
    return codecs.getincrementaldecoder(name)("replace") if name else None


def _is_binary(first: bytes) -> bool:
    """Whether much of it is control characters; holes of a network's disk are no sign."""
    sample = first.replace(b"\0" * 64, b"")
    if not sample:
        return False
    odd = sum(sample.count(bytes([code])) for code in range(9)) + sum(
        sample.count(bytes([code])) for code in range(14, 27)
    )
    return odd > BINARY_SHARE * len(sample)
