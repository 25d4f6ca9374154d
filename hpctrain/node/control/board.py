"""A node's board: memory by which its ranks and the process beside its agent see each other.

Each word has one writer and is one store of 64 bits, so it is never torn; a value of several words
lies there twice, with a checksum, and is written where nobody reads.
tests/unit/control/test_board.py and tests/unit/control/test_root_clock.py hold the promises.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.files import plain_descriptor
from hpctrain.errors import HpctrainError
from hpctrain.node.control.lease import KINDS, MOST, Lease, Report, Wishes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BOARD, SOCKET = "board", "socket"
"""In the folder of a round: this, and where the node's process is met."""
_MAGIC = int.from_bytes(b"hpcboard", "little") >> 1
_VERSION = 5
_WORD = 8
_HEAD = 16
_ROW = 32
"""In words: a row has cache lines of its own, so that ranks do not slow each other."""
_LEASE_BYTES = 4096

MAGIC, VERSION, FIRST_RANK, RANKS, SERVER_BEAT, FREE_TICKS, RANKS_IN_ALL, CLOCK = range(8)
"""Words of the head. FREE_TICKS: so many ticks from the first on are granted, and a rank that has
not begun them yet has nothing to do at them. Nearly always that is all that a rank has to know.
CLOCK: see `shown`."""
TICK, ARRIVED, STEP, WAITS, PROCESS, FIRST_WISH = range(6)
"""Words of a row. Ticks are written one higher, since fresh memory is zero."""
HEARTBEAT_PROCESS, HEARTBEAT_STEP, HEARTBEAT_PHASE, HEARTBEAT_SINCE = range(12, 16)
"""Of a row too, behind the wishes: the rank's heartbeat (`heartbeat.py`)."""
COUNTS = 16
"""And eight words of how many collectives it had called at which tick, each a tick and a count in
one store: the last four ticks that were counted, and the last multiples of powers of two. A count
takes 40 us, so short ticks are counted twice a second, at ticks that are the same for all ranks.
tests/unit/control/test_tick_counts.py holds the promises."""
_COUNT_BITS = 32
_COUNT = (1 << _COUNT_BITS) - 1
_MOST_TICKS = 1 << 30
_EACH, _SHORT, _LONG = 64, 1024, 16384
APART_NS, _MOST_APART = 500_000_000, 10
"""So far apart ticks are counted at most, in nanoseconds; and the longest power of two."""
HEARTBEAT_IN_DATA = 24
"""How long it has waited for its data so far, in nanoseconds (`heartbeat.py`)."""

_FRAME = struct.Struct("@qqq")
"""In front of the bytes of a cell: stamp, length, checksum."""
_TRIES = 100


class Board:
    """The board of a node, mapped into this process.

    Attributes:
        folder: Of the round, in which the board lies.
        first_rank: The number of the first rank of this node among all ranks.
        ranks: How many there are on this node.
        ranks_in_all: How many all nodes have.
        words: The memory as words of 64 bits.
    """

    def __init__(self, folder: Path, memory: mmap.mmap, first_rank: int, ranks: int) -> None:
        """Not for others: see `create` and `open`."""
        self.folder = folder
        self._memory = memory
        self._bytes = memoryview(memory)
        self.words = self._bytes.cast("q")
        self.first_rank, self.ranks = first_rank, ranks
        self.ranks_in_all = self.words[RANKS_IN_ALL]
        self._put = (0, clock.monotonic_ns())
        at = (_HEAD + ranks * _ROW) * _WORD
        self._lease = _Cell(self._bytes, at, _LEASE_BYTES)

    @classmethod
    def create(cls, path: Path, first_rank: int, ranks: int, ranks_in_all: int = 0) -> Board:
        """Make a board that only this user can open: a new file in /dev/shm or on the node's disk.

        `ranks_in_all` is 0 if this node has all ranks.

        Raises:
            OSError: there is something, or no room: reported here, where it would else be a SIGBUS.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _size(ranks))
            memory = mmap.mmap(descriptor, _size(ranks))
            board = cls(path.parent, memory, first_rank, ranks)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)
        board.beat()
        board.ranks_in_all = board.words[RANKS_IN_ALL] = ranks_in_all or ranks
        for word, value in ((VERSION, _VERSION), (FIRST_RANK, first_rank), (RANKS, ranks)):
            board.words[word] = value
        board.words[MAGIC] = _MAGIC
        return board

    @classmethod
    def open(cls, path: Path) -> Board:
        """The board that another process of this version has made.

        Raises:
            OSError: it is not there or may not be read and written.
            HpctrainError: it is something else.
        """
        descriptor = plain_descriptor(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            if size < _size(0):
                raise HpctrainError(f"{path}: not a board: {size} bytes")
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        magic, version, first_rank, ranks = struct.unpack_from("@4q", memory)
        if magic == _MAGIC and version == _VERSION and ranks >= 0 and size == _size(ranks):
            return cls(path.parent, memory, first_rank, ranks)
        memory.close()
        raise HpctrainError(f"{path}: not a board of version {_VERSION}")

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self._lease.close()
        self.words.release()
        self._bytes.release()
        self._memory.close()

    def at(self, local_rank: int) -> int:
        """Where the words of a rank begin."""
        return _HEAD + local_rank * _ROW

    def report(self, version: int) -> Report:
        """Return this node's ranks as one report; count `version` up. The node's process alone."""
        now_ns, wishes = clock.monotonic_ns(), Wishes()
        pace, behind, ranks = (-1, 0.0, 0.0), MOST, 0
        for local_rank in range(self.ranks):
            wishes = wishes.joined(self.wishes(local_rank))
            at = self.at(local_rank)
            tick = self.words[at + TICK] - 1
            if tick < 0:
                continue
            ranks += 1
            behind = min(behind, tick)
            # The clock of all processes of a node is one; a row may be a tick older than its time.
            began_ago_s = max(0, now_ns - self.words[at + ARRIVED]) / 1e9
            pace = max(pace, (tick, began_ago_s, max(0, self.words[at + STEP]) / 1e9))
        number, put_ns = self._put
        arrived, began_ago_s, step_s = pace
        seen = (number, (now_ns - put_ns) / 1e9)
        return Report(version, arrived, behind, began_ago_s, step_s, wishes, ranks, *seen)

    def process_of(self, rank: int) -> int:
        """The number of the first process that has sat down as a rank of this node; 0 for none."""
        return self.words[self.at(rank - self.first_rank) + PROCESS]

    def sit_down(self, rank: int) -> None:
        """This process is that rank of this node."""
        self.words[self.at(rank - self.first_rank) + PROCESS] = os.getpid()

    def wishes(self, local_rank: int) -> Wishes:
        """What a rank wishes."""
        at = self.at(local_rank) + FIRST_WISH
        return Wishes(*self.words[at : at + len(KINDS)].tolist())

    def waiting(self) -> list[int]:
        """The local ranks that wait to begin a tick."""
        return [rank for rank in range(self.ranks) if self.words[self.at(rank) + WAITS]]

    def put_lease(self, lease: Lease) -> bool:
        """Let the ranks read a lease; False if it is not newer. Node's process only."""
        if lease.number <= self._put[0]:
            return False
        self._lease.write(json.dumps(lease.to_plain()).encode())
        ticks = (decision.tick for decision in lease.decisions)
        self.words[FREE_TICKS] = min(ticks, default=lease.horizon + 1)
        self._put = (lease.number, clock.monotonic_ns())
        return True

    def newer_lease(self, stamp: int) -> tuple[int, Lease] | None:
        """The lease and its stamp; None where its stamp is the one given, or there is none yet."""
        read = self._lease.read(stamp)
        return (read[0], Lease.of_plain(json.loads(read[1]))) if read is not None else None

    def beat(self) -> None:
        """The node's process is alive, and hears the root. To be said every few seconds."""
        self.words[SERVER_BEAT] = clock.monotonic_ns()

    @property
    def server_beat(self) -> int:
        """Another number after each `beat`."""
        return self.words[SERVER_BEAT]


class _Cell:
    """Bytes with one writer: the next ones are written beside those that are read."""

    def __init__(self, memory: memoryview, at: int, most_bytes: int) -> None:
        size = self.size(most_bytes)
        self._memory = memory[at : at + size]
        self._stamp = self._memory[:_WORD].cast("q")
        self._most_bytes = most_bytes

    @staticmethod
    def size(most_bytes: int) -> int:
        return _WORD + 2 * (_FRAME.size + most_bytes)

    def close(self) -> None:
        self._stamp.release()
        self._memory.release()

    def write(self, value: bytes) -> None:
        if len(value) > self._most_bytes:
            raise ValueError(f"{len(value)} bytes where there is room for {self._most_bytes}")
        stamp = self._stamp[0] + 1
        at = self._place(stamp)
        self._memory[at + _FRAME.size : at + _FRAME.size + len(value)] = value
        _FRAME.pack_into(self._memory, at, stamp, len(value), zlib.crc32(value))
        self._stamp[0] = stamp

    def read(self, last: int) -> tuple[int, bytes] | None:
        """The newest bytes; None where their stamp is `last`, or they could not be read whole.

        That their writer came round twice meanwhile, or that a processor shows stores in another
        order, is seen by the checksum. A reader tries again later: it does not wait here.
        """
        for _ in range(_TRIES):
            stamp = self._stamp[0]
            if stamp == last:
                return None
            at = self._place(stamp)
            written, length, checksum = _FRAME.unpack_from(self._memory, at)
            if written == stamp and 0 <= length <= self._most_bytes:
                value = bytes(self._memory[at + _FRAME.size : at + _FRAME.size + length])
                if zlib.crc32(value) == checksum:
                    return stamp, value
        return None

    def _place(self, stamp: int) -> int:
        return _WORD + (stamp & 1) * (_FRAME.size + self._most_bytes)


def _size(ranks: int) -> int:
    words = (_HEAD + ranks * _ROW) * _WORD
    return words + _Cell.size(_LEASE_BYTES)


def ticks_apart(step_ns: int) -> int:
    """Return the exponent: multiples of 2**exponent are counted. `step_ns` is 0 for not known."""
    return min(_MOST_APART, max(1, APART_NS // max(1, step_ns)).bit_length() - 1) if step_ns else 0


def put_count(words: memoryview[int], at: int, tick: int, count: int, power: int = 0) -> None:
    """Show how much this rank has called at a tick, from 0 on; -1 if nobody says. The rank alone.

    `at` is where the rank's row begins in `words`; `power` comes from `ticks_apart`.
    """
    if count < 0 or tick >= _MOST_TICKS:
        return
    word = (tick + 1) << _COUNT_BITS | count & _COUNT
    at += COUNTS
    words[at + (tick >> power & 3)] = word
    if not tick % _EACH:
        words[at + 4 + (tick // _EACH & 1)] = word
        if not tick % _SHORT:
            words[at + 6] = word
            if not tick % _LONG:
                words[at + 7] = word


def read_counts(board: Board) -> list[dict[int, int]]:
    """Of each rank of a node, its counts by tick."""
    rows = []
    for local_rank in range(board.ranks):
        at = board.at(local_rank) + COUNTS
        shown = board.words[at : at + 8].tolist()
        rows.append({(word >> _COUNT_BITS) - 1: word & _COUNT for word in shown if word})
    return rows


KEPT_S = 60.0
"""Clocks drift by some millionths: what was heard longer ago does not count."""
FEWEST = 8
"""The first trips may be long ones: all of them are those of nodes that start."""


class RootClock:
    """How far this node's clock is ahead of the root's.

    Attributes:
        ahead_ns: In nanoseconds, negative where it is behind; None while it is not known.
    """

    def __init__(self, *, is_root: bool, clock: Callable[[], int] = clock.now_ns) -> None:
        """Hear nothing yet; `clock` is this node's, in nanoseconds since the epoch."""
        self._clock = clock
        self._trips: deque[tuple[int, int]] = deque()
        self._is_root = is_root
        self.ahead_ns: int | None = 0 if is_root else None

    def hear(self, said_ns: int) -> None:
        """Take in a message from the node above, sent at `said_ns` by the root's clock."""
        if self._is_root:
            return
        now_ns = self._clock()
        self._trips.append((now_ns, now_ns - said_ns))
        while self._trips[0][0] < now_ns - KEPT_S * 1e9:
            self._trips.popleft()
        if len(self._trips) >= FEWEST:
            self.ahead_ns = min(ahead for _, ahead in self._trips)

    def now_ns(self) -> int | None:
        """What the root's clock shows now; None for not known."""
        return None if self.ahead_ns is None else self._clock() - self.ahead_ns

    def show(self, board: Board) -> None:
        """Let this node's agent read it. The node's process alone."""
        board.words[CLOCK] = 0 if self.ahead_ns is None else self.ahead_ns << 1 | 1


def shown(board: Board) -> int | None:
    """How far this node's clock is ahead of the root's, in nanoseconds; None for not known."""
    word = board.words[CLOCK]
    return word >> 1 if word & 1 else None
