"""All copies in a node's memory: its own ranks', those of the node before it, and fetched ones.

It outlives the rounds of the ranks. What may be overwritten when is `slots`' to say, for copies of
another node's ranks as for those of one's own. tests/unit/memory/test_buddy.py holds the promises.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.checkpoint.tensors.arena import Arena
from hpctrain.node.memory.mending import bad_ranges
from hpctrain.node.memory.stock import ProvedCopy, RankStock

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.errors import CheckpointError
    from hpctrain.node.memory.slots import HeldCopy, Mark


@dataclass(frozen=True)
class CopyInMemory:
    """A whole copy, and where it lies.

    Attributes:
        copy: What it is.
        arena: Its memory, from the first byte on.
    """

    copy: ProvedCopy
    arena: Arena

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return self.arena.view(0, self.copy.size)


class NodeStock:
    """The copies.

    Attributes:
        lock: For the states of slots, which several threads change.
        own: Of this node's ranks, by their number on it.
        guests: Of the ranks of the node before it in the ring, by their number there.
    """

    def __init__(self) -> None:
        """No memory is taken."""
        self.lock = threading.RLock()
        self.own: dict[int, RankStock] = {}
        self.guests: dict[int, RankStock] = {}
        self._fetched: dict[tuple[Mark, int], CopyInMemory] = {}
        self._fetching: dict[tuple[Mark, int], threading.Lock] = {}

    @property
    def nbytes(self) -> int:
        """Memory that is taken."""
        fetched = sum(there.arena.size for there in self._fetched.values())
        return fetched + sum(stock.nbytes for stock in self._stocks())

    def new_round(self, ranks: int) -> None:
        """Other ranks are about to start, so many on this node; what was not whole is none."""
        with self.lock:
            for stock in self._stocks():
                stock.slots.new_round()
            for local in range(ranks):
                self.own.setdefault(local, RankStock())

    def keep_only(self, mark: Mark | None) -> None:
        """Training goes on from this copy, or from none; what was fetched for it has been read."""
        with self.lock:
            for stock in self._stocks():
                stock.slots.keep_only(mark)
            for there in self._fetched.values():
                there.arena.close()
            self._fetched.clear()
            self._fetching.clear()

    def held(self) -> tuple[list[HeldCopy], list[HeldCopy]]:
        """All whole copies of this node's ranks, and of others'."""
        with self.lock:
            own = [copy for stock in self.own.values() for copy in stock.held()]
            guests = [copy for stock in self.guests.values() for copy in stock.held()]
            return own, guests + [there.copy.held for there in self._fetched.values()]

    def find(self, mark: Mark, rank: int) -> CopyInMemory | None:
        """A rank's whole copy of a step; None where it is not here."""
        with self.lock:
            if (fetched := self._fetched.get((mark, rank))) is not None:
                return fetched
            for stock in self._stocks():
                if (there := stock.find(mark, rank)) is not None:
                    return CopyInMemory(there[0], stock.arenas[there[1]])
            return None

    def fetch(
        self,
        copy: ProvedCopy,
        local: int | None,
        fill: Callable[[memoryview, ProvedCopy], bool],
    ) -> CopyInMemory | None:
        """Have a copy that lies elsewhere brought here, once; None if it cannot be made complete.

        `local` is the rank's number on this node, in whose slots it then counts; None for another
        node's rank. `fill` writes the bytes, and returns whether they are complete.

        Raises:
            CheckpointError: there is no memory for it.
        """
        key = (copy.mark, copy.plan.rank)
        with self.lock:
            lock = self._fetching.setdefault(key, threading.Lock())
        with lock:
            if (there := self.find(*key)) is not None:
                return there
            with self.lock:
                number = self.own[local].slots.reserve() if local is not None else None
            if local is not None and number is not None:
                return self._into_slot(self.own[local], number, copy, fill)
            arena = Arena(copy.size)
            there = CopyInMemory(copy, arena)
            if not fill(there.view, copy):
                arena.close()
                return None
            with self.lock:
                self._fetched[key] = there
            return there

    def receive(
        self,
        local: int,
        copy: ProvedCopy,
        kept: Mark | None,
        settled: Mark,
        fill: Callable[[memoryview], None],
    ) -> str:
        """Take in a copy of another node's rank, number `local` there; return why not, or "".

        `kept` and `settled` are as for `RankSlots.give`; `fill` writes the bytes into memory.
        """
        stock = self.guests.get(local)
        if stock is None or copy.size > min(arena.size for arena in stock.arenas):
            return f"there is no memory for {copy.size:,} bytes"
        with self.lock:
            number = stock.slots.give(kept, settled)
        if number is None:
            return "the copies before it are still needed"
        whole = False
        try:
            view = stock.arenas[number].view(0, copy.size)
            fill(view)
            whole = not bad_ranges(view, copy.plan, copy.digest)
        finally:
            with self.lock:
                whole = stock.put(number, copy, whole=whole)
        return "" if whole else "its bytes are not those that were proved"

    def take_guest(self, local: int, nbytes: int) -> None:
        """Have memory for the copies of another node's rank.

        Raises:
            CheckpointError: there is not so much.
        """
        with self.lock:
            stock = self.guests.setdefault(local, RankStock())
        stock.take(nbytes)

    def _into_slot(
        self,
        stock: RankStock,
        number: int,
        copy: ProvedCopy,
        fill: Callable[[memoryview, ProvedCopy], bool],
    ) -> CopyInMemory | None:
        whole = False
        try:
            arena = stock.arenas[number]
            arena.ensure(copy.size)
            whole = fill(arena.view(0, copy.size), copy)
        finally:
            with self.lock:
                whole = stock.put(number, copy, whole=whole)
        return CopyInMemory(copy, arena) if whole else None

    def _stocks(self) -> list[RankStock]:
        return [*self.own.values(), *self.guests.values()]


def room_refused(error: CheckpointError) -> str:
    """What to say where there is no memory for copies."""
    why = str(error).replace("background saves need", "copies in memory need")
    return why.split("; ask for more memory")[0]
