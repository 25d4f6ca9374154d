"""A rank's connections to its node's process: the lease, and the values that ranks tell each other.

Each connection is used by one thread at a time and is waited on there; no thread is started. What
comes from other ranks was authenticated between the nodes, so that it may be unpickled.
tests/unit/control/test_control_client.py holds the promises.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_CONTROL
from hpctrain.core.base.text import count
from hpctrain.errors import ControlLost, HpctrainError
from hpctrain.node.control.board import (
    ARRIVED,
    BOARD,
    FIRST_WISH,
    FREE_TICKS,
    SOCKET,
    STEP,
    TICK,
    WAITS,
    Board,
    put_count,
    ticks_apart,
)
from hpctrain.node.control.collectives import Call, entries_of
from hpctrain.node.control.lease import Lease, Wishes, most_ahead
from hpctrain.node.control.wire import Garbled, Splitter, framed, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpctrain.node.control.collectives import CallKind
    from hpctrain.node.control.lease import Decision

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


class ControlClient:
    """This process's place at its node's process, as one rank.

    Attributes:
        ranks_in_all: How many ranks the node's process knows of.
        lease: What this rank may do.
    """

    _taken: ClassVar[dict[Path, ControlClient]] = {}

    def __init__(self, folder: Path, rank: int) -> None:
        """See `take`."""
        self.rank = rank
        self._folder = folder
        self._pid = os.getpid()
        self._exchanges = 0
        self._waker = SocketWaker(folder, rank)
        self._lines = [self._waker.line]
        self.ranks_in_all = self._waker.ranks_in_all
        self._board = Board.open(folder / BOARD)
        self._board.sit_down(rank)
        self.lease = RankLease(self._board, rank - self._board.first_rank, self._waker)

    @classmethod
    def take(cls, folder: Path, rank: int) -> ControlClient:
        """Return this process's client as `rank`, made with the first call.

        Raises:
            ControlLost: the node's process cannot be reached.
            HpctrainError: another process is this rank.
        """
        client = cls._taken.get(folder)
        if client is None or client._pid != os.getpid():  # noqa: SLF001 - a forked copy is no client
            client = cls._taken[folder] = ControlClient(folder, rank)
        if client.rank != rank:
            raise HpctrainError(f"this process is rank {client.rank} already, and not rank {rank}")
        return client

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
        """Leave; nothing of this client may be used any more."""
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


class SocketWaker:
    """How this rank and its node's process wake each other; from any thread of the rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.line = _Line(folder, {"rank": rank})
        try:
            self.ranks_in_all = self.line.welcome()
        except HpctrainError:
            self.line.close()
            raise
        self._asking = threading.Lock()

    def ask(self) -> None:
        """Have the node's process look at the board now.

        Raises:
            ControlLost: it is gone.
        """
        with self._asking:
            self.line.say(packed({"is": "ask"}))

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process reports a changed lease, or has since the last wait; else False.

        Raises:
            ControlLost: it is gone.
        """
        try:
            self.line.hear(timeout_s)
            while self.line.is_ready():
                self.line.hear(0)
        except TimeoutError:
            return False
        return True


class TreeExchange:
    """Through the node's process and the tree of all nodes': one connection for each exchange."""

    def __init__(self, client: ControlClient, channel: str, timeout_s: float) -> None:
        """Not for others: see `ControlClient.exchange`. No other exchange has this `channel`."""
        self.client = client
        self._channel, self._timeout_s = channel, timeout_s
        self._line = client.connect(channel)
        self._lost = ""
        self._calls = self._aparts = 0
        self._arrived: dict[Call, bytes] = {}

    def broadcast(self, value: Any) -> Any:
        """See `world.Exchange`; so below. `ControlLost` where the round fails."""
        is_first = self.client.rank == 0
        call = self._give("broadcast", value, says=is_first)
        return value if is_first else self.values_of(call)[0]

    def gather(self, value: Any) -> list[Any]:  # noqa: D102
        return self.values_of(self._give("gather", value))

    def gather_on_0(self, value: Any) -> list[Any]:  # noqa: D102
        call = self._give("gather_on_0", value)
        return self.values_of(call) if self.client.rank == 0 else []

    def send_to_0(self, row: Sequence[float]) -> TreeRows:  # noqa: D102
        return TreeRows(self, self._give("gather_on_0", [float(number) for number in row]))

    def apart(self, timeout_s: float) -> TreeExchange:  # noqa: D102
        self._aparts += 1
        return TreeExchange(self.client, f"{self._channel}.{self._aparts}", timeout_s)

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
        ranks = 1 if call.kind == "broadcast" else self.client.ranks_in_all
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
        self._is_first = exchange.client.rank == 0

    def is_done(self) -> bool:
        """Whether `values` would not wait."""
        return not self._is_first or self._exchange.has_come(self._call)

    def values(self) -> list[list[float]]:
        """Every rank's in rank order, on rank 0; an empty list elsewhere."""
        return self._exchange.values_of(self._call) if self._is_first else []


PATIENCE_S = 60.0
"""So long may the node's process give no sign of life while a rank waits for it."""
LOOK_S = 1.0
_WISHES = tuple(field.name for field in fields(Wishes))
_NONE = Lease(0, -1)


class RankLease:
    """What a rank may do and has to do, tick by tick.

    Attributes:
        done: Up to which numbers wishes were decided at the ticks that this rank has begun; to
            begin with, what it had asked for.
        collectives_called: How many collectives of all ranks this one has called; None for nobody
            is to know.
    """

    def __init__(self, board: Board, local_rank: int, waker: SocketWaker) -> None:
        """Stand before the first tick, as rank `local_rank` of this node's board."""
        self._board, self._local_rank, self._waker = board, local_rank, waker
        # Where a program comes twice in one round (a script that starts it again), it continues:
        # with numbers that its first time has used up, nothing that it wishes would be decided.
        self.done = self.wished
        self._words, at = board.words, board.at(local_rank)
        self._at_tick, self._at_arrived, self._at_step = at + TICK, at + ARRIVED, at + STEP
        self._at_waits, self._at_wish = at + WAITS, at + FIRST_WISH
        self._tick = self._words[at + TICK] - 1
        self.collectives_called: Callable[[], int] | None = None
        self._uncounted = 0
        self._began_ns = 0
        self._step_ns = 0
        self._lease, self._stamp = _NONE, 0
        self._horizon = -1
        self._wishing = threading.RLock()

    def wish(self, **wishes: int) -> None:
        """Ask for something, by fields of `Wishes`; a value not above the last changes nothing.

        From any thread, but not from a handler of signals. The node's process hears of it at once,
        also while another thread of this rank is in the middle of a long step.

        Raises:
            ControlLost: the node's process is gone.
        """
        grown = False
        with self._wishing:
            for name, value in wishes.items():
                at = self._at_wish + _WISHES.index(name)
                if value > self._words[at]:
                    self._words[at] = value
                    grown = True
        if grown:
            self._waker.ask()

    def tick(self) -> tuple[Decision, ...]:
        """Begin the next tick as soon as that is granted, and learn what is to be done at it.

        Every rank calls it equally often, from one thread. Behind a stop it returns that stop, and
        waits for nobody.

        Raises:
            ControlLost: the node's process is gone, or silent for `PATIENCE_S`, and this tick was
                not granted.
        """
        now_ns, words = clock.monotonic_ns(), self._words
        tick = self._tick = self._tick + 1
        if self._began_ns:
            step_ns = now_ns - self._began_ns
            self._step_ns += (3 * (step_ns - self._step_ns)) // 10 if self._step_ns else step_ns
            words[self._at_step] = self._step_ns
        words[self._at_arrived] = self._began_ns = now_ns
        if not tick & self._uncounted:
            self._count(tick)
        words[self._at_tick] = tick + 1
        if tick > self._horizon and not self._is_covered(tick):
            self._wait(tick)
        decisions = self._lease.at(tick) if self._lease.decisions else ()
        if decisions:
            self.done = replace(self.done, **{one.kind: one.value for one in decisions})
        return decisions

    @property
    def wished(self) -> Wishes:
        """What this rank has asked for so far."""
        return self._board.wishes(self._local_rank)

    @property
    def ticks_ahead(self) -> int:
        """What is first wished in the next tick is done at most so many ticks after that one.

        Where all ranks are in step: one that is further on was granted more.
        """
        return 1 + (most_ahead(self._step_ns / 1e9) if self._step_ns else 0)

    @property
    def stop_ahead(self) -> int:
        """The code of the stop that all ranks come to, as far as this node knows; 0 for none."""
        newest = self._board.newer_lease(0)
        decisions = newest[1].decisions if newest is not None else ()
        return max((one.value for one in decisions if one.kind == "stop"), default=0)

    def _count(self, tick: int) -> None:
        """Show how many collectives this rank has called."""
        if self.collectives_called is not None:
            power = ticks_apart(self._step_ns)
            self._uncounted = (1 << power) - 1
            at = self._at_tick - TICK
            put_count(self._words, at, tick, self.collectives_called(), power)

    def _is_covered(self, tick: int) -> bool:
        if tick < (free := self._words[FREE_TICKS]):
            self._lease, self._stamp, self._horizon = _NONE, 0, free - 1
            return True
        newer = self._board.newer_lease(self._stamp)
        if newer is not None:
            self._stamp, self._lease = newer
            self._horizon = self._lease.horizon
        return self._lease.covers(tick)

    def _wait(self, tick: int) -> None:
        """Until the lease covers a tick. A step begins when this ends: it is none of its time."""
        words = self._words
        words[self._at_waits] = tick + 1
        self._waker.ask()
        beat, silent_s = self._board.server_beat, 0.0
        while not self._is_covered(tick):
            if self._waker.wait(LOOK_S):
                silent_s = 0.0
                continue
            # Only what this process has seen pass counts: the whole node may have been stopped.
            silent_s = silent_s + LOOK_S if beat == self._board.server_beat else 0.0
            beat = self._board.server_beat
            if silent_s >= PATIENCE_S:
                raise ControlLost(
                    f"the node's control process was silent for {silent_s:.0f} s, and this rank "
                    f"may not begin tick {tick} by itself: is the node stopped or overloaded?"
                )
            self._waker.ask()
        words[self._at_waits] = 0
        words[self._at_arrived] = self._began_ns = clock.monotonic_ns()
