"""All copies in a node's memory, which its replica server owns: its ranks', and those of others.

A slot holds just what a rank's file of a checkpoint would hold: header, parts, and the proof of
them (`checkpoint.format.shard`), so that the readers of checkpoints read it. Behind the copy the
replica server takes the digests; a copy without them is none.
tests/unit/memory/test_in_memory_copies.py and test_replica_peer.py hold the promises.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.manifest import block_digest
from hpctrain.checkpoint.tensors.arena import Arena
from hpctrain.core.base.records import COPIES_PER_RANK
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError
from hpctrain.node.memory.copy_plan import blocks, is_whole
from hpctrain.node.memory.slots import HeldCopy, Mark, RankSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.node.memory.copy_plan import CopyPlan
    from hpctrain.node.memory.slots import Mark


@dataclass(frozen=True)
class ProvedCopy:
    """A whole copy.

    Attributes:
        plan: How it lies in its slot.
        digest: As a manifest has it.
    """

    mark: Mark
    plan: CopyPlan
    digest: str

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return self.plan.size

    @property
    def held(self) -> HeldCopy:
        """As it is logged."""
        return HeldCopy(*self.mark, self.plan.world_size, self.plan.rank)


class RankSlotMemory:
    """The slots of one rank of the node, with their memory. One thread at a time."""

    def __init__(self) -> None:
        """No memory is taken."""
        self.slots = RankSlots()
        self.copies: list[ProvedCopy | None] = [None] * COPIES_PER_RANK
        self.arenas = [Arena() for _ in range(COPIES_PER_RANK)]

    @property
    def nbytes(self) -> int:
        """Memory that is taken."""
        return sum(arena.size for arena in self.arenas)

    def take(self, nbytes: int) -> None:
        """Have memory for copies of so many bytes in each slot.

        Raises:
            CheckpointError: there is not so much.
        """
        for arena in self.arenas:
            arena.ensure(nbytes)

    def prove(self, number: int, mark: Mark, plan: CopyPlan) -> None:
        """Take the digests of what a rank has copied into a slot, and put them behind it.

        Raises:
            CheckpointError: it is not as long as the rank says.
        """
        if plan.size > self.arenas[number].size:
            raise CheckpointError(
                f"a copy of {plan.size:,} bytes in a slot of {self.arenas[number].size:,}"
            )
        points.reach("memory.digest", step=mark.step, rank=plan.rank, bytes=plan.size)
        view = self.arenas[number].view(0, plan.size)
        ends = shard.proof(bytes(view[: plan.head]), digests_of(view, plan))
        view[plan.size - len(ends) :] = ends
        fd = self.arenas[number].fd
        points.reach("memory.proved", fd=fd, step=mark.step, rank=plan.rank)
        self.copies[number] = ProvedCopy(mark, plan, shard.proof_digest(ends))

    def put(self, number: int, copy: ProvedCopy, *, whole: bool) -> bool:
        """A copy from elsewhere is in a slot that was given for it, or is not whole.

        Returns:
            Whether it counts: not where the slot was taken back meanwhile.
        """
        if not self.slots.copied(number, copy.mark):
            return False
        self.copies[number] = copy
        self.slots.proved(number, whole=whole)
        return whole

    def find(self, mark: Mark, rank: int) -> tuple[ProvedCopy, int] | None:
        """A whole copy, and the number of its slot."""
        number = self.slots.find(mark)
        copy = self.copies[number] if number is not None else None
        if number is None or copy is None or copy.plan.rank != rank:
            return None
        return copy, number

    def held(self) -> list[HeldCopy]:
        """All whole copies."""
        whole = set(self.slots.whole())
        return [copy.held for copy in self.copies if copy is not None and copy.mark in whole]

    def close(self) -> None:
        """Give the memory back."""
        for arena in self.arenas:
            arena.close()


def digests_of(view: memoryview, plan: CopyPlan) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Of all blocks of a copy, part after part: uint64 of shape [blocks]."""
    digests = [block_digest(view[low:high]) for low, high in islice(blocks(plan), 1, None)]
    return np.array(digests, np.uint64)


@dataclass(frozen=True)
class CopyInMemory:
    """A whole copy, and where it lies.

    Attributes:
        arena: Its memory, from the first byte on.
    """

    copy: ProvedCopy
    arena: Arena

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return self.arena.view(0, self.copy.size)


class NodeCopies:
    """The copies.

    Attributes:
        lock: For the states of slots, which several threads change.
        own: Of this node's ranks, by their number on it.
        guests: Of the ranks of the node before it in the ring, by their number there.
    """

    def __init__(self) -> None:
        """No memory is taken."""
        self.lock = threading.RLock()
        self.own: dict[int, RankSlotMemory] = {}
        self.guests: dict[int, RankSlotMemory] = {}
        self._fetched: dict[tuple[Mark, int], CopyInMemory] = {}
        self._fetching: dict[tuple[Mark, int], threading.Lock] = {}

    @property
    def nbytes(self) -> int:
        """Memory that is taken."""
        fetched = sum(there.arena.size for there in self._fetched.values())
        return fetched + sum(rank_memory.nbytes for rank_memory in self._rank_memories())

    def new_round(self, ranks: int) -> None:
        """Other ranks are about to start, so many on this node; what was not whole is none."""
        with self.lock:
            for rank_memory in self._rank_memories():
                rank_memory.slots.new_round()
            for local in range(ranks):
                self.own.setdefault(local, RankSlotMemory())

    def keep_only(self, mark: Mark | None) -> None:
        """Training resumes from this copy, or from none; what was fetched for it has been read."""
        with self.lock:
            for rank_memory in self._rank_memories():
                rank_memory.slots.keep_only(mark)
            for there in self._fetched.values():
                there.arena.close()
            self._fetched.clear()
            self._fetching.clear()

    def held(self) -> tuple[list[HeldCopy], list[HeldCopy]]:
        """All whole copies of this node's ranks, and of others'."""
        with self.lock:
            own = [copy for rank_memory in self.own.values() for copy in rank_memory.held()]
            guests = [copy for rank_memory in self.guests.values() for copy in rank_memory.held()]
            return own, guests + [there.copy.held for there in self._fetched.values()]

    def find(self, mark: Mark, rank: int) -> CopyInMemory | None:
        """A rank's whole copy of a step; None where it is not here."""
        with self.lock:
            if (fetched := self._fetched.get((mark, rank))) is not None:
                return fetched
            for rank_memory in self._rank_memories():
                if (there := rank_memory.find(mark, rank)) is not None:
                    return CopyInMemory(there[0], rank_memory.arenas[there[1]])
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
        rank_memory = self.guests.get(local)
        if rank_memory is None or copy.size > min(arena.size for arena in rank_memory.arenas):
            return f"there is no memory for {copy.size:,} bytes"
        with self.lock:
            number = rank_memory.slots.give(kept, settled)
        if number is None:
            return "the copies before it are still needed"
        whole = False
        try:
            view = rank_memory.arenas[number].view(0, copy.size)
            fill(view)
            whole = is_whole(view, copy.plan, copy.digest)
        finally:
            with self.lock:
                whole = rank_memory.put(number, copy, whole=whole)
        return "" if whole else "its bytes are not those that were proved"

    def take_guest(self, local: int, nbytes: int) -> None:
        """Have memory for the copies of another node's rank.

        Raises:
            CheckpointError: there is not so much.
        """
        with self.lock:
            rank_memory = self.guests.setdefault(local, RankSlotMemory())
        rank_memory.take(nbytes)

    def _into_slot(
        self,
        rank_memory: RankSlotMemory,
        number: int,
        copy: ProvedCopy,
        fill: Callable[[memoryview, ProvedCopy], bool],
    ) -> CopyInMemory | None:
        whole = False
        try:
            arena = rank_memory.arenas[number]
            arena.ensure(copy.size)
            whole = fill(arena.view(0, copy.size), copy)
        finally:
            with self.lock:
                whole = rank_memory.put(number, copy, whole=whole)
        return CopyInMemory(copy, arena) if whole else None

    def _rank_memories(self) -> list[RankSlotMemory]:
        return [*self.own.values(), *self.guests.values()]


def room_refused(error: CheckpointError) -> str:
    """What to say where there is no memory for copies."""
    why = str(error).replace("background saves need", "copies in memory need")
    return why.split("; ask for more memory")[0]
