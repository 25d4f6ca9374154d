"""The memory that a node's replica server owns, with proved copies of its ranks' parts in it.

A slot holds just what a rank's file of a checkpoint would hold: header, parts, and the proof of
them (`checkpoint.format.shard`), so that the readers of checkpoints read it. Behind the copy the
replica server takes the digests; a copy without them is none. tests/unit/memory/test_stock.py holds
the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.manifest import block_digest
from hpctrain.checkpoint.tensors.arena import Arena
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError
from hpctrain.node.memory.mending import blocks
from hpctrain.node.memory.slots import SLOTS, HeldCopy, Mark, RankSlots

if TYPE_CHECKING:
    from hpctrain.node.memory.copy_plan import CopyPlan


@dataclass(frozen=True)
class ProvedCopy:
    """A whole copy.

    Attributes:
        mark: Its step.
        plan: How it lies in its slot.
        size: Its bytes.
        digest: As a manifest has it.
    """

    mark: Mark
    plan: CopyPlan
    size: int
    digest: str

    @property
    def held(self) -> HeldCopy:
        """As it is told."""
        return HeldCopy(*self.mark, self.plan.world_size, self.plan.rank)


class RankStock:
    """The slots of one rank of the node, with their memory. One thread at a time."""

    def __init__(self) -> None:
        """No memory is taken."""
        self.slots = RankSlots()
        self.copies: list[ProvedCopy | None] = [None] * SLOTS
        self.arenas = [Arena() for _ in range(SLOTS)]

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
        self.copies[number] = ProvedCopy(mark, plan, plan.size, shard.proof_digest(ends))

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
