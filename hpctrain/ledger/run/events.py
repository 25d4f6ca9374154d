"""The ledger: append-only events of a run, one JSON object a line. Standard library only.

    {"t": 1763700000.123, "kind": "saved", "attempt": 2, "step": 400, ...}

Written by several processes on several nodes. Each event is one `os.write` on a descriptor opened
with O_APPEND, which the kernel keeps whole among the processes of one machine. NFS has no atomic
append (each client writes where it believes the end to be), so writers hold `events.lock` for the
moment of the write (not the ledger itself: a reader of a file could keep its lock). Where
there are no locks, or a dead client's is not released in time, the event is written all the same.
Closing the file hands it to the server, where the next reader on any node sees it. Nothing is
fsync'ed: a node that loses its power may take the last seconds of events with it, never a
checkpoint.

Readers take the lines that are whole and leave out the rest: a torn last line is an event that was
never written. They read block by block, so that no line and no hole costs much memory.
tests/unit/run/test_events.py and test_untrusted_ledgers.py hold the promises.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.core.base import clock, locks
from hpctrain.core.base.files import open_plain, plain_descriptor, skip_hole
from hpctrain.ledger.run import event_types  # noqa: F401 - it fills KINDS
from hpctrain.ledger.run.event_fields import (
    KINDS,
    LedgerFact,
    attempt_number,
    moment,
    typed,
    whole_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO
    from pathlib import Path

    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.run")

BLOCK_BYTES = 1 << 20
LONGEST_BYTES = 1 << 20
"""A fact takes a few hundred bytes; one that names 16,384 ranks 100 KiB."""
LOCK_WAIT_S = 1.0
"""Longest wait for another writer: one that hangs must not keep a fact from being written."""
KEPT_EVERY = 256
"""Of a row of step marks one in so many is read in any case."""
NEWEST_BYTES = 64 * 1024
"""The end of a ledger, which is read whole: how fast the run is now is in it."""
_MARK = re.compile(rb'\{"t": [0-9.]+(, "kind": "steps", "attempt": [0-9]+, )')
"""How `append` begins a step mark. A mark in another form is read like every other line."""
_HEAD = 80
"""Bytes of a line in which that stands."""
_AT_SAVE = b'"at_save": true'
_NO_EXTRA: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the ledger.

    Attributes:
        t: Seconds since the epoch, by the clock of the node that wrote it.
        attempt: Number of the attempt it belongs to; None for facts about the run.
        extra: Fields that this version does not know.
    """

    t: float
    attempt: int | None
    fact: LedgerFact
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What happened, as the ledger names it."""
        return self.fact.kind


def append(
    run: RunDir, fact: LedgerFact, *, attempt: int | None = None, t: float | None = None
) -> None:
    """Add one event, whole or not at all for every reader, also beside other writers.

    The run's directory exists. `t` is in seconds since the epoch; None is now.

    Raises:
        OSError: the event could not be written, e.g. the disk is full; names the file.
    """
    when = round(clock.now(), 3) if t is None else t
    plain = {"t": when, "kind": fact.kind, "attempt": attempt} | fact.fields_set()
    line = _dumps(plain).encode() + b"\n"
    with _locked(run):  # before it is opened: what a client knows of a file's end is from then
        descriptor = plain_descriptor(run.events, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            text = line if _ends_whole(descriptor) else b"\n" + line
            written = os.write(descriptor, text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(run.events)) from None
        finally:
            os.close(descriptor)  # hands it to the server, before another node may write
    if written != len(text):
        raise OSError(errno.ENOSPC, "event written in part; is the disk full?", str(run.events))


def record(run: RunDir, fact: LedgerFact, *, attempt: int | None = None) -> bool:
    """Add one event, or say on stderr that it is missing; return whether it was written.

    A disk that is full must not keep a job from being requeued nor a user from cancelling one.
    """
    try:
        append(run, fact, attempt=attempt)
    except OSError as error:
        log.warning("the ledger misses %s: %s: %s", fact.kind, run.events, error.strerror or error)
        return False
    return True


def read(run: RunDir, *, marks: Literal["all", "few"] = "all") -> list[Event]:
    """The facts in the order they were written; empty for a run without a ledger.

    With `marks` "few" most step marks are left out, unread, which is nearly all of a long ledger:
    of a row of marks of one attempt the last is kept, those before a save, one in `KEPT_EVERY`, and
    the newest of the whole ledger.
    """
    return Tail(run.events, marks).new()


def read_marked(run: RunDir, *markers: bytes) -> list[Event]:
    """The facts whose lines hold one of these markers; the others are not parsed.

    Raises:
        OSError: the ledger cannot be read.
    """
    marked = (line for line in _lines(run) if any(marker in line for marker in markers))
    return [event for line in marked if (event := parse(line))]


def first_fact(run: RunDir) -> Event | None:
    """The first fact that can be read; None without one.

    Raises:
        OSError: the ledger cannot be read.
    """
    return next((event for line in _lines(run) if (event := parse(line))), None)


def _lines(run: RunDir) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), open_plain(run.events) as file:
        reader = LineReader(file)
        while (lines := reader.block()) is not None:
            yield from lines
        yield reader.rest


def parse(line: bytes) -> Event | None:
    """One line as an event; None for what is no whole event.

    What its fields are is certain from here on: see `event_fields.typed`.
    """
    # NFS may show zeros where another client's bytes are still under way.
    line = line.strip(b"\0\r\n\t ")
    if not line.startswith(b"{"):
        return None
    try:
        raw = json.loads(line.decode(errors="surrogatepass"))
    except (ValueError, RecursionError):  # torn, not UTF-8, or not ours
        return None
    raw = whole_text(line, raw)
    if raw is None:
        return None
    t, kind, attempt = raw.pop("t", None), raw.pop("kind", None), raw.pop("attempt", None)
    t = moment(t)
    if t is None or not isinstance(kind, str):
        return None
    fact = typed(kind, raw)
    if fact is None:
        return None
    extra = raw if raw and kind in KINDS else _NO_EXTRA
    return Event(float(t), attempt_number(attempt), fact, extra)


class Tail:
    """Reads a ledger that grows: each call of `new` gives the facts since the last."""

    def __init__(self, path: Path, marks: Literal["all", "few"] = "all") -> None:
        self._path = path
        self._thin = marks == "few"
        self._offset = 0

    def new(self) -> list[Event]:
        """The facts since the last call; all of them if a shorter file has replaced the old."""
        try:
            with open_plain(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                if size >= self._offset:
                    file.seek(self._offset)
                reader = LineReader(file)
                lines = _thinned(reader, size - NEWEST_BYTES if self._thin else 0)
                events = [event for line in lines if (event := parse(line))]
                self._offset = reader.end
                rest = parse(reader.rest)
                if rest is not None:  # whole but for its newline, which the next writer adds
                    events.append(rest)
                    self._offset = file.tell()
        except FileNotFoundError:
            return []
        return events


class LineReader:
    """Reads a file block by block.

    Attributes:
        rest: What follows the last newline so far; empty where it is longer than a line may be.
        end: Where the last line that was handed out ended, in bytes from the file's beginning.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._dropping = False
        self.rest = b""
        self.end = file.tell()

    def tell(self) -> int:
        """How far the file has been read, in bytes."""
        return self._file.tell()

    def block(self, most_bytes: int = BLOCK_BYTES) -> list[bytes] | None:
        """The lines that the next bytes complete, without newlines; None at the file's end.

        Of a line that is longer than `LONGEST_BYTES`, an empty one is left. Zeros before a line, as
        NFS shows them where bytes of another client are under way, count as no length.
        """
        block = self._file.read(most_bytes)
        if not block:
            return None
        if block[0] == 0 and not block.strip(b"\0"):
            skip_hole(self._file)
            block = b"" if not self.rest else block
        *lines, rest = (self.rest + block).split(b"\n")
        if lines:
            self.end = self._file.tell() - len(rest)
            if self._dropping:
                lines[0], self._dropping = b"", False
        rest = rest.lstrip(b"\0")
        if self._dropping or len(rest) > LONGEST_BYTES:
            self._dropping, rest = True, b""
        self.rest = rest
        return lines


def _thinned(reader: LineReader, until: int) -> Iterator[bytes]:
    """Whole lines without most of the step marks before `until`; what is no mark comes through.

    A line is looked at and not parsed: that would take longer than all that follows from it.
    """
    before = last = b""
    same, count = b"\n", 0
    while (left := until - reader.tell()) > 0:
        lines = reader.block(min(BLOCK_BYTES, left))
        if lines is None:
            break
        for line in lines:
            if line.find(same, 0, _HEAD) > 0 and line[-1:] == b"}":
                before, last = last, line
                count += 1
                if count % KEPT_EVERY and _AT_SAVE not in line:
                    continue
            else:
                yield from _ends(before, last)
                mark = _MARK.match(line)
                if mark is not None and line[-1:] == b"}":
                    same, count, before, last = mark[1], 1, b"", line
                    if _AT_SAVE not in line:
                        continue
                else:
                    same = b"\n"
            before = last = b""
            yield line
    yield from _ends(before, last)
    while (lines := reader.block()) is not None:
        yield from lines


def _ends(before: bytes, last: bytes) -> list[bytes]:
    """The last mark of a row; where it is not whole, the one before it too."""
    if not last:
        return []
    return [before, last] if before and b"\0" in last else [last]


@contextlib.contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Hold the writers' lock, or continue without it after a while or where there are no locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(locks.held(run.events_lock, LOCK_WAIT_S, insist=False))
        yield


def _ends_whole(descriptor: int) -> bool:
    """Whether the file is empty or ends with a newline; else a writer was cut off in its line."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _dumps(fact: dict[str, Any]) -> str:
    try:
        return json.dumps(fact, default=_plain, allow_nan=False)
    except ValueError:  # a loss of NaN: JSON has no word for it; float("nan") reads what is written
        plain = json.loads(json.dumps(fact, default=_plain))
        return json.dumps(_finite(plain), allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"an event holds JSON values; {value!r} ({type(value).__name__}) is none")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
