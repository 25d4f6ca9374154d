"""Copies on another node: each replica server sends its ranks' copies on to that of its buddy.

Who is whose buddy is `pairing`'s. A rank's copy that is proved is sent on behind training, one
connection for each rank; the buddy proves the bytes it has by the copy's own digests before it says
that it has them. The same connections serve other nodes what they lack at a restart.
tests/unit/memory/test_buddy.py holds the promises.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.core.base import clock
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, ControlLost
from hpctrain.node.control.wire import Garbled
from hpctrain.node.memory.copy_line import PIECE_BYTES, CopyLine, meet
from hpctrain.node.memory.copy_plan import CopyPlan
from hpctrain.node.memory.mending import mend, merged
from hpctrain.node.memory.node_stock import room_refused
from hpctrain.node.memory.slots import Mark
from hpctrain.node.memory.stock import ProvedCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.node.control.wire import Greeting
    from hpctrain.node.memory.mending import Range
    from hpctrain.node.memory.node_stock import CopyInMemory, NodeStock

Address = tuple[str, int]

RING_S = 60.0
"""So long may it take until a node hears where its buddy is: the slowest node joins last."""


class RoundNeeds(Protocol):
    """What a round knows that a copy of another node has to obey."""

    def needed(self) -> tuple[Mark | None, Mark] | None:
        """What is kept and what is settled; None while it is not known what training goes on from.

        Raises:
            ControlLost: the round is over.
        """


class BuddyLines:
    """A node's connections to its buddy, one for each of its ranks."""

    def __init__(self, node: int, greeting: Callable[[], Greeting]) -> None:
        """Know no replica peer yet; `greeting` makes a greeting for each connection."""
        self._node, self._greeting = node, greeting
        self._address: Address | None = None
        self._is_known = threading.Event()
        self._lock = threading.Lock()
        self._lines: dict[int, CopyLine] = {}
        self._turns: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._is_over = False

    def meet_at(self, address: Address | None) -> None:
        """The buddy is there; None where it will not be."""
        self._address = address
        self._is_known.set()

    def room(self, local: int, nbytes: int) -> str:
        """Have the peer take memory, slots of `nbytes`, for a rank's copies; return why not, or "".

        `local` is the rank's number on this node.

        Raises:
            OSError: the connection is lost.
            Garbled: the peer's answer cannot be understood.
            ControlLost: the peer cannot be met.
        """
        with self._turns[local]:
            said, _ = self._line(local).ask({"is": "room", "local": local, "bytes": nbytes})
        return str(said["why"])

    def send(self, local: int, there: CopyInMemory) -> str:
        """Send a copy on; return "" once the peer has all of it, else why not.

        `local` is the rank's number on this node.

        Raises:
            OSError: the connection is lost.
            Garbled: the peer's answer cannot be understood.
            ControlLost: the peer cannot be met.
        """
        copy, view = there.copy, there.view
        head = {"is": "copy", "local": local, "mark": copy.mark, "digest": copy.digest}
        points.reach("memory.send", step=copy.mark.step, rank=copy.plan.rank)
        with self._turns[local]:
            line = self._line(local)
            said, _ = line.ask(head, copy.plan.dump())
            if said["why"]:
                return str(said["why"])
            for low, high in merged([(0, copy.size)], PIECE_BYTES):
                line.say({"at": low}, bytes(view[low:high]))
            said, _ = line.hear()
        return str(said["why"])

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            self._is_over = True
            lines = list(self._lines.values())
        self.meet_at(None)
        for line in lines:
            line.close()

    def _line(self, local: int) -> CopyLine:
        if local in self._lines:
            return self._lines[local]
        if not clock.wait(self._is_known, RING_S) or self._address is None:
            raise ControlLost("its buddy is not there")
        line = meet(self._address, self._greeting, self._node)
        with self._lock:
            if not self._is_over:
                self._lines[local] = line
                return line
        line.close()
        raise ControlLost("the round is over")


class CopyServer:
    """What a node's replica server does for others: keeps their copies, and gives what it has."""

    def __init__(self, stock: NodeStock, needs: RoundNeeds) -> None:
        """Serve nobody yet."""
        self._stock, self._needs = stock, needs

    def serve(self, node: int, line: CopyLine) -> None:
        """Do what another node asks for on its connection, until it leaves.

        Raises:
            OSError: it has left.
            Garbled: its message cannot be understood.
        """
        del node
        acts: dict[str, Callable[[CopyLine, dict[str, Any], bytes], None]] = {
            "room": self._room,
            "copy": self._copy,
            "look": self._look,
            "read": self._read,
        }
        while True:
            head, body = line.hear(wait_s=None)
            try:
                acts[str(head.get("is"))](line, head, body)
            except (KeyError, ValueError, TypeError, IndexError, ControlLost) as error:
                raise Garbled(f"{type(error).__name__}: {error}") from error

    def _room(self, line: CopyLine, head: dict[str, Any], body: bytes) -> None:
        del body
        why = ""
        try:
            self._stock.take_guest(int(head["local"]), int(head["bytes"]))
        except CheckpointError as error:
            why = room_refused(error)
        line.say({"why": why})

    def _copy(self, line: CopyLine, head: dict[str, Any], body: bytes) -> None:
        plan = CopyPlan.parse(body)
        copy = ProvedCopy(Mark(*head["mark"]), plan, plan.size, str(head["digest"]))
        if (needed := self._needs.needed()) is None:
            line.say({"why": "nothing was chosen to go on from"})
            return

        def fill(view: memoryview) -> None:
            line.say({"why": ""})
            for low, high in merged([(0, copy.size)], PIECE_BYTES):
                said, piece = line.hear()
                if said["at"] != low or len(piece) != high - low:
                    raise Garbled("another piece of a copy than was awaited")
                with self._stock.lock:
                    self._needs.needed()  # the slot is another's once the round is over
                    view[low:high] = piece
            points.reach("memory.received", step=copy.mark.step, rank=plan.rank)

        why = self._stock.receive(int(head["local"]), copy, *needed, fill)
        if not why:
            points.reach("memory.acknowledge", step=copy.mark.step, rank=plan.rank)
        line.say({"why": why})

    def _look(self, line: CopyLine, head: dict[str, Any], body: bytes) -> None:
        del body
        there = self._stock.find(Mark(*head["mark"]), int(head["rank"]))
        if there is None:
            line.say({"digest": ""})
        else:
            line.say({"digest": there.copy.digest}, there.copy.plan.dump())

    def _read(self, line: CopyLine, head: dict[str, Any], body: bytes) -> None:
        del body
        low, high = int(head["low"]), int(head["high"])
        there = self._stock.find(Mark(*head["mark"]), int(head["rank"]))
        if there is None or not 0 <= low < high <= min(there.copy.size, low + PIECE_BYTES):
            raise Garbled("bytes that are not here")
        line.say({}, bytes(there.view[low:high]))


class CopyFetcher:
    """Brings what other nodes have to this one, and mends with it what is bad here."""

    def __init__(self, stock: NodeStock, node: int, greeting: Callable[[], Greeting]) -> None:
        """Fetch nothing yet; `greeting` makes a greeting for each connection."""
        self._stock, self._node, self._greeting = stock, node, greeting

    def fetch(
        self, mark: Mark, rank: int, local: int | None, where: Sequence[Address]
    ) -> CopyInMemory | None:
        """Return a rank's copy from the replica server that has it; None if none has it complete.

        `where` lists those that have it; `local` is as for `NodeStock.fetch`.

        Raises:
            CheckpointError: there is no memory for it.
        """
        points.reach("memory.fetch", step=mark.step, rank=rank)
        for number, address in enumerate(where):
            awaited = self._asked(mark, rank, address)
            if awaited is not None:
                fill = partial(self.mend, where=where[number:])
                return self._stock.fetch(awaited, local, fill)
        return None

    def mend(self, view: memoryview, copy: ProvedCopy, where: Sequence[Address]) -> bool:
        """Read what is bad in a copy from these replica servers; whether it is whole then."""
        others = (partial(self._read, copy, address) for address in where)
        return mend(view, copy.plan, copy.digest, others)

    def _asked(self, mark: Mark, rank: int, address: Address) -> ProvedCopy | None:
        try:
            with closing(meet(address, self._greeting, self._node)) as line:
                said, plan = line.ask({"is": "look", "mark": mark, "rank": rank})
            if not said["digest"]:
                return None
            parsed = CopyPlan.parse(plan)
        except (OSError, Garbled, ControlLost, ValueError, KeyError):
            return None
        return ProvedCopy(mark, parsed, parsed.size, str(said["digest"]))

    def _read(
        self, copy: ProvedCopy, address: Address, ranges: Sequence[Range]
    ) -> Iterator[tuple[int, bytes]]:
        """Ranges of the copy that this replica server has; fewer where it is lost."""
        asked = {"is": "read", "mark": copy.mark, "rank": copy.plan.rank}
        try:
            with closing(meet(address, self._greeting, self._node)) as line:
                for low, high in merged(ranges, PIECE_BYTES):
                    content = line.ask(asked | {"low": low, "high": high})[1]
                    if len(content) != high - low:
                        return
                    yield low, content
        except (OSError, Garbled, ControlLost):
            return
