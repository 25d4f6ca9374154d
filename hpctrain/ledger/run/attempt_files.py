"""Read what a running attempt writes: rank logs with their times, and the heartbeat.

Nothing here waits or watches: inotify does not see what other nodes write over NFS. Rank logs have
no times; the node's agent notes `T SIZE` lines in rank-00007.times (`agent/log_index.py`), and a
line's time is estimated between two of them.

The heartbeat's length is constant: a reader on another node never sees it empty, and a full disk
has room.
tests/unit/cli/test_logs.py, tests/unit/agent/test_log_index.py and
tests/unit/runtime/test_step_log.py hold the promises.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hpctrain.core.base.files import data_extents, open_plain, read_plain, skip_hole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpctrain.ledger.run.layout import RunDir


_BLOCK = 1 << 16
_AT_ONCE = 1 << 22
_LONGEST = 1 << 16
LATE_S = 60.0
"""A log that was changed later than this after its attempt's end was copied, not written then."""


class LogFile:
    """Reads a log line by line as it grows; one that is not there yet has no lines.

    `at` is where the line that was given last ends.
    """

    def __init__(self, path: Path, offset: int = 0, *, longest_bytes: int = _LONGEST) -> None:
        self.path = path
        self._longest_bytes = longest_bytes
        self.at = offset
        self._offset = offset
        self._partial = b""

    def lines(self, at_once: int = _AT_ONCE) -> Iterator[bytes]:
        """The lines that were completed since the last call, without their newlines.

        A file that has become shorter was begun anew and is read from its start. `at_once` bytes
        are read at once.
        """
        while content := self._more(at_once):
            *whole, partial = (self._partial + content).split(b"\n")
            self._partial = partial
            for line in whole:
                self.at += len(line) + 1
                yield line
            if len(self._partial) > self._longest_bytes:  # a progress bar that never ends its line
                self.at += len(self._partial)
                yield self._partial
                self._partial = b""

    def rest(self) -> list[bytes]:
        """The last line where it has no newline; for a log that nobody writes any more."""
        partial, self._partial = self._partial, b""
        self.at += len(partial)
        return [partial] if partial else []

    def _more(self, at_once: int) -> bytes:
        try:
            with open_plain(self.path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._partial, self.at = 0, b"", 0
                file.seek(self._offset)
                content: bytes = file.read(at_once)
                while content and not self._partial and not content.strip(b"\0"):
                    skip_hole(file)
                    self.at += file.tell() - self._offset
                    self._offset = file.tell()
                    content = file.read(at_once)
        except FileNotFoundError:
            return b""
        self._offset += len(content)
        return content


def line_start(path: Path, offset: int) -> int:
    """Where the line begins that has the byte before `offset`; only a block before it is read."""
    start = max(0, offset - _BLOCK)
    try:
        with open_plain(path) as file:
            block = os.pread(file.fileno(), offset - start, start)
    except FileNotFoundError:
        return offset
    if block.endswith(b"\n") or not block:
        return offset  # it ends there: the next one begins
    newline = block.rfind(b"\n")
    return start + newline + 1 if newline >= 0 else offset


def tail_offset(path: Path, count: int) -> tuple[int, int]:
    """Where the last `count` lines begin, and how many there are; only the end is read."""
    try:
        with open_plain(path) as file:
            end = file.seek(0, os.SEEK_END)
            seen = 0
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                seen = 1  # a last line without its newline
            for start, block in _backwards(file.fileno(), end if count > 0 else 0):
                at = len(block)
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    if start + at + 1 == end:
                        seen = 1
                        continue
                    if seen == count:
                        return start + at + 1, count
                    seen += 1
    except FileNotFoundError:
        return 0, 0
    return (0, seen) if count > 0 else (end, 0)


def _backwards(descriptor: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Blocks from the end to the beginning, each with its place; holes have no lines."""
    for first, after in reversed(data_extents(descriptor, end)):
        position = after
        while position > first:
            start = max(first, position - _BLOCK)
            yield start, os.pread(descriptor, position - start, start)
            position = start


@dataclass(frozen=True, slots=True)
class LogMark:
    """At time `t`, seconds since the epoch, the log had `size` bytes."""

    t: float
    size: int


def times_path(log: Path) -> Path:
    """Where the marks of a rank's log are."""
    return log.with_suffix(".times")


def mark_line(mark: LogMark) -> bytes:
    """A mark as it is written; whole seconds, since the agent looks every few seconds."""
    return b"%d %d\n" % (math.ceil(mark.t), mark.size)


class LogTimes:
    """The marks of one log, read as they grow; a log without a clock has none."""

    def __init__(self, log: Path) -> None:
        self._file = LogFile(times_path(log))
        self.marks: list[LogMark] = []

    def read(self) -> Sequence[LogMark]:
        """All marks so far. One that is torn or goes back (another clock, another file) is left."""
        for line in self._file.lines():
            t, _, size = line.partition(b" ")
            if not (t.isdigit() and size.isdigit()):
                continue
            mark = LogMark(float(t), int(size))
            if not self.marks or (mark.t >= self.marks[-1].t and mark.size >= self.marks[-1].size):
                self.marks.append(mark)
        return self.marks


def first_offset(marks: Sequence[LogMark], since: float) -> int:
    """All that was written before this offset was written before `since`; 0 where unknown."""
    place = bisect_left(marks, since, key=lambda mark: mark.t)
    return marks[place - 1].size if place else 0


class Guess:
    """About when each byte of a log was written.

    By its marks (where clocks differ the later one counts); before `begin` nothing was written, and
    at `end` the log had that size.
    """

    def __init__(self, marks: Sequence[LogMark], begin: float, end: LogMark) -> None:
        ordered = sorted((*marks, end), key=lambda mark: (mark.size, mark.t))
        times = accumulate((mark.t for mark in ordered), max)
        ordered = [LogMark(t, mark.size) for t, mark in zip(times, ordered, strict=True)]
        self._marks = [LogMark(min(begin, ordered[0].t), 0), *ordered]
        self._sizes = [mark.size for mark in self._marks]

    def at(self, offset: int) -> float:
        """About when the log became that long, seconds since the epoch; never goes back."""
        place = bisect_left(self._sizes, offset)
        if place == 0:
            return self._marks[0].t
        if place == len(self._marks):
            return self._marks[-1].t
        low, high = self._marks[place - 1], self._marks[place]
        part = (offset - low.size) / (high.size - low.size)
        return low.t + part * (high.t - low.t)


LENGTH = 64
"""Of the line in bytes, padded with spaces."""


@dataclass(frozen=True)
class Heartbeat:
    """At `t`, seconds since the epoch by rank 0's clock, an attempt's last step was done."""

    t: float
    step: int


def write_heartbeat(run: RunDir, attempt: int, beat: Heartbeat) -> None:
    """Replace the attempt's heartbeat. Rank 0 alone calls it.

    Raises:
        OSError: it could not be written.
    """
    line = json.dumps({"t": round(beat.t, 3), "step": beat.step}).ljust(LENGTH - 1) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(run.heartbeat(attempt), flags, 0o666)
    try:
        os.pwrite(descriptor, line.encode(), 0)
    finally:
        os.close(descriptor)  # which hands it to the server


def read_heartbeat(run: RunDir, attempt: int) -> Heartbeat | None:
    """The attempt's last heartbeat; None without one, or where half of one is seen."""
    try:
        raw = json.loads(read_plain(run.heartbeat(attempt)))
        t, step = float(raw["t"]), int(raw["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return Heartbeat(t, step) if math.isfinite(t) else None
