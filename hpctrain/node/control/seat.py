"""A rank's connections to its node's process: the lease, and the values that ranks tell each other.

Each connection is used by one thread at a time and is waited on there; no thread is started. What
comes from other ranks was authenticated between the nodes, so that it may be unpickled.
tests/unit/control/test_seat.py holds the promises.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_CONTROL
from hpctrain.core.base.text import count
from hpctrain.errors import ControlLost, HpctrainError
from hpctrain.node.control.board import BOARD, SOCKET, Board
from hpctrain.node.control.collectives import Call, entries_of
from hpctrain.node.control.rank_lease import RankLease
from hpctrain.node.control.wire import Garbled, Splitter, framed, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.node.control.collectives import CallKind

CONNECT_S = 60.0
_PIECE = 1 << 16
_UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""What `pickle` raises of bytes that are no value of this program's."""


def why_none(folder: Path, rank: int, world_size: int) -> str:
    """Return why this process has no place at its node's process; "" if it has one.

    The same on all ranks of a program: how they were started makes the difference. `rank` and
    `world_size` are the program's.

    Raises:
        ControlLost: all ranks but this one may have one.
    """
    try:
        board = Board.open(folder / BOARD)
    except FileNotFoundError:
        return f"{folder} is not seen from here: is this a container with a /dev/shm of its own?"
    except OSError as error:
        raise ControlLost(f"{folder}: {error}") from error
    except HpctrainError as error:  # another version's
        return str(error)
    try:
        if board.ranks_in_all != world_size:
            return f"the agents have started {board.ranks_in_all} ranks, and these are {world_size}"
        if not board.first_rank <= rank < board.first_rank + board.ranks:
            raise ControlLost(
                f"this process is rank {rank}, and this node's agent has started ranks "
                f"{board.first_rank} to {board.first_rank + board.ranks - 1}: unset "
                f"{HPCTRAIN_CONTROL} where another launcher has numbered the ranks anew"
            )
        if board.process_of(rank) not in {0, os.getpid()}:
            return f"another process was rank {rank} before"
    finally:
        board.close()
    return ""


class Seat:
    """This process's place at its node's process, as one rank.

    Attributes:
        ranks_in_all: How many ranks the node's process knows of.
        lease: What this rank may do.
        rank: Which it is.
    """

    _taken: ClassVar[dict[Path, Seat]] = {}

    def __init__(self, folder: Path, rank: int) -> None:
        """See `take`."""
        self.rank = rank
        self._folder = folder
        self._pid = os.getpid()
        self._exchanges = 0
        self._waker = _SocketWaker(folder, rank)
        self._lines = [self._waker.line]
        self.ranks_in_all = self._waker.ranks_in_all
        self._board = Board.open(folder / BOARD)
        self._board.sit_down(rank)
        self.lease = RankLease(self._board, rank - self._board.first_rank, self._waker)

    @classmethod
    def take(cls, folder: Path, rank: int) -> Seat:
        """Return this process's seat as `rank`, made with the first call.

        Raises:
            ControlLost: the node's process cannot be reached.
            HpctrainError: another process is this rank.
        """
        seat = cls._taken.get(folder)
        if seat is None or seat._pid != os.getpid():  # noqa: SLF001 - a forked copy is no seat
            seat = cls._taken[folder] = Seat(folder, rank)
        if seat.rank != rank:
            raise HpctrainError(f"this process is rank {seat.rank} already, and not rank {rank}")
        return seat

    def exchange(self, timeout_s: float) -> TreeExchange:
        """Values of all ranks. Collective in that every rank makes its exchanges in one order.

        Args:
            timeout_s: Of each call.

        Raises:
            ControlLost: the node's process is gone.
        """
        channel, self._exchanges = str(self._exchanges), self._exchanges + 1
        return TreeExchange(self, channel, timeout_s)

    def connect(self, channel: str) -> _Line:
        """A connection for the calls of an exchange."""
        line = _Line(self._folder, {"rank": self.rank, "channel": channel})
        self._lines.append(line)
        line.welcome()
        return line

    def close(self) -> None:
        """Leave; nothing of this seat may be used any more."""
        for line in self._lines:
            line.close()
        self._board.close()
        if self._taken.get(self._folder) is self:
            del self._taken[self._folder]


class _Line:
    """A connection to the node's process."""

    def __init__(self, folder: Path, hello: dict[str, Any]) -> None:
        self._splitter = Splitter()
        self._heard: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_S)
        try:
            self._socket.connect(str(folder / SOCKET))
            self._socket.sendall(framed(packed(hello)))
        except OSError as error:
            self._socket.close()
            raise ControlLost(f"the node's control process cannot be reached: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def welcome(self) -> int:
        """Wait to be let in; how many ranks there are."""
        head, _ = self.hear(CONNECT_S)
        if why := head.get("why"):
            raise HpctrainError(str(why))
        return int(head["ranks"])

    def say(self, message: bytes) -> None:
        try:
            self._socket.sendall(framed(message))
        except TimeoutError:
            raise ControlLost("the node's control process takes nothing any more") from None
        except OSError as error:
            raise self._lost(str(error)) from error

    def hear(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """The next message.

        Raises:
            ControlLost: the round has failed, or the process is gone.
            TimeoutError: none came.
        """
        deadline_s = clock.monotonic() + timeout_s
        while not self._heard:
            left_s = deadline_s - clock.monotonic()
            if not self._is_readable(left_s):
                raise TimeoutError
            self._read()
        try:
            head, body = unpacked(self._heard.pop(0))
        except Garbled as error:
            raise ControlLost(f"the node's control process does not make sense: {error}") from error
        if head.get("is") == "lost":
            raise ControlLost(str(head.get("why")))
        return head, body

    def is_ready(self) -> bool:
        """Whether `hear` would not wait."""
        while not self._heard and self._is_readable(0):
            self._read()
        return bool(self._heard)

    def _is_readable(self, timeout_s: float) -> bool:
        waiter = select.poll()  # `select` cannot with descriptors above 1,023
        waiter.register(self._socket, select.POLLIN)
        return bool(waiter.poll(max(0.0, timeout_s) * 1000))

    def _read(self) -> None:
        try:
            piece = self._socket.recv(_PIECE)
        except ConnectionResetError:
            piece = b""
        except OSError as error:
            raise self._lost(str(error)) from error
        if not piece:
            raise self._lost("it has closed the connection")
        try:
            self._heard += self._splitter.feed(piece)
        except Garbled as error:
            raise self._lost(str(error)) from error

    @staticmethod
    def _lost(why: str) -> ControlLost:
        return ControlLost(f"the node's control process is gone: {why}")


class _SocketWaker:
    """How this rank and its node's process wake each other: a `Waker`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.line = _Line(folder, {"rank": rank})
        try:
            self.ranks_in_all = self.line.welcome()
        except HpctrainError:
            self.line.close()
            raise
        self._asking = threading.Lock()

    def ask(self) -> None:
        with self._asking:
            self.line.say(packed({"is": "ask"}))

    def wait(self, timeout_s: float) -> bool:
        try:
            self.line.hear(timeout_s)
            while self.line.is_ready():
                self.line.hear(0)
        except TimeoutError:
            return False
        return True


class TreeExchange:
    """Through the node's process and the tree of all nodes': one connection for each exchange.

    Attributes:
        seat: This rank's.
    """

    def __init__(self, seat: Seat, channel: str, timeout_s: float) -> None:
        """Not for others: see `Seat.exchange`. No other exchange has this `channel`."""
        self.seat = seat
        self._channel, self._timeout_s = channel, timeout_s
        self._line = seat.connect(channel)
        self._lost = ""
        self._calls = self._aparts = 0
        self._arrived: dict[Call, bytes] = {}

    def broadcast(self, value: Any) -> Any:
        """See `world.Exchange`; so below. `ControlLost` where the round fails."""
        is_first = self.seat.rank == 0
        call = self._give("broadcast", value, says=is_first)
        return value if is_first else self.values_of(call)[0]

    def gather(self, value: Any) -> list[Any]:  # noqa: D102
        return self.values_of(self._give("gather", value))

    def gather_on_0(self, value: Any) -> list[Any]:  # noqa: D102
        call = self._give("gather_on_0", value)
        return self.values_of(call) if self.seat.rank == 0 else []

    def send_to_0(self, row: Sequence[float]) -> TreeRows:  # noqa: D102
        return TreeRows(self, self._give("gather_on_0", [float(number) for number in row]))

    def apart(self, timeout_s: float) -> TreeExchange:  # noqa: D102
        self._aparts += 1
        return TreeExchange(self.seat, f"{self._channel}.{self._aparts}", timeout_s)

    def has_come(self, call: Call) -> bool:
        """Whether `values_of` would not wait."""
        while call not in self._arrived and self._line.is_ready():
            self._take(self._line.hear(0))
        return call in self._arrived

    def values_of(self, call: Call) -> list[Any]:
        """The values of a call, in order of their ranks.

        Raises:
            ControlLost: the round has failed, or not all of them came in time.
        """
        deadline_s = clock.monotonic() + self._timeout_s
        try:
            while call not in self._arrived:
                self._take(self._line.hear(deadline_s - clock.monotonic()))
        except TimeoutError:
            # Ranks that come later would take this one's next call for this one.
            self._lost = (
                f"not all ranks came to a {call.kind} within {self._timeout_s:g} s: "
                "is one of them stuck?"
            )
            raise ControlLost(self._lost) from None
        return self._values(call, self._arrived.pop(call))

    def _values(self, call: Call, entries: bytes) -> list[Any]:
        ranks = 1 if call.kind == "broadcast" else self.seat.ranks_in_all
        try:
            values = sorted(entries_of(entries))
            if [rank for rank, _ in values] != list(range(ranks)):
                raise ValueError(f"these are not the values of {count(ranks, 'rank')}")
            return [pickle.loads(value) for _, value in values]  # noqa: S301 - of this attempt's
        except _UNREADABLE as error:
            raise self._garbled(call.kind, error) from error

    def _give(self, kind: CallKind, value: Any, *, says: bool = True) -> Call:
        if self._lost:
            raise ControlLost(f"{self._lost} What was said after that has no answer")
        call = Call(self._channel, self._calls, kind)
        self._calls += 1
        if says:
            self._line.say(packed({"is": "values", "call": call}, pickle.dumps(value)))
        return call

    def _take(self, message: tuple[dict[str, Any], bytes]) -> None:
        head, entries = message
        try:
            call = Call.of_plain(head.get("call"))
        except ValueError as error:
            raise self._garbled("call", error) from error
        self._arrived[call] = entries

    def _garbled(self, what: str, why: Exception) -> ControlLost:
        said = f"what came of a {what} of the ranks cannot be read: {why}"
        self._lost = f"{said}."
        return ControlLost(said)


class TreeRows:
    """Rows of numbers on their way to rank 0: see `world.Pending`."""

    def __init__(self, exchange: TreeExchange, call: Call) -> None:
        """Not for others: see `TreeExchange.send_to_0`."""
        self._exchange, self._call = exchange, call
        self._is_first = exchange.seat.rank == 0

    def is_done(self) -> bool:
        """Whether `values` would not wait."""
        return not self._is_first or self._exchange.has_come(self._call)

    def values(self) -> list[list[float]]:
        """Every rank's in rank order, on rank 0; an empty list elsewhere."""
        return self._exchange.values_of(self._call) if self._is_first else []
