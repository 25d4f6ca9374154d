"""Which memory holds which copy, which step all ranks have, and which is resumed from. Pure.

A rank has two slots. It writes into one while the other holds a step that all ranks have whole, so
at every moment one step is whole in memory that nobody writes (docs/staying-alive.md).
tests/unit/memory/test_slots.py and tests/unit/memory/test_choice.py hold the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpctrain.core.base.records import COPIES_PER_RANK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NEVER = -1
"""No step of this round."""


class Mark(NamedTuple):
    """A step of an attempt; of two marks, the later training is the greater one."""

    attempt: int
    step: int


class Coverage:
    """Which steps of a round all members have whole: a node's ranks, or all nodes.

    Attributes:
        settled: The newest step of which every member has spoken; NEVER before the first.
        covered: The newest step that every member has whole; NEVER before the first.
    """

    def __init__(self, members: Iterable[int]) -> None:
        """Start without reports; there is at least one member."""
        self.settled = self.covered = NEVER
        self._last = dict.fromkeys(members, NEVER)
        self._whole: dict[int, set[int]] = {}

    def hear(self, member: int, step: int, *, whole: bool) -> bool:
        """Take in a member's word on a step: that ends its word on all steps before.

        Returns:
            Whether `settled` or `covered` has changed.
        """
        if step <= self._last[member]:
            return False
        self._last[member] = step
        if whole:
            self._whole.setdefault(step, set()).add(member)
        before = self.settled
        self.settled = min(self._last.values())
        for ended in sorted(step for step in self._whole if step <= self.settled):
            if len(self._whole.pop(ended)) == len(self._last):
                self.covered = ended
        return self.settled != before


@dataclass
class Slot:
    """What is known of one slot.

    Attributes:
        state: Nobody's; given to a rank, which may be writing; copied, and being proved; whole.
        mark: Of the copy in it; None while it is free or given.
    """

    state: Literal["free", "given", "copied", "whole"] = "free"
    mark: Mark | None = None


@dataclass
class RankSlots:
    """The slots of a rank."""

    slots: list[Slot] = field(default_factory=lambda: [Slot() for _ in range(COPIES_PER_RANK)])

    def give(self, kept: Mark | None, settled: Mark) -> int | None:
        """Return a slot that the rank may write into from now on; None if there is none.

        `kept` is the newest covered step that is known here, `settled` the newest settled one.
        """
        if any(slot.state in {"given", "copied"} for slot in self.slots):
            return None
        for number, slot in enumerate(self.slots):
            if slot.state == "free" or not _is_needed(slot.mark, kept, settled):
                self.slots[number] = Slot("given")
                return number
        return None

    def reserve(self) -> int | None:
        """A slot for a copy from elsewhere; None unless all are free.

        Two copies of the step that training resumes from would leave no slot for a newer one.
        """
        if any(slot.state != "free" for slot in self.slots):
            return None
        self.slots[0] = Slot("given")
        return 0

    def copied(self, number: int, mark: Mark) -> bool:
        """The rank has written a copy into a slot; whether it was given that one."""
        if self.slots[number].state != "given":
            return False
        self.slots[number] = Slot("copied", mark)
        return True

    def proved(self, number: int, *, whole: bool) -> None:
        """Whether the copy in a slot is whole is known now."""
        slot = self.slots[number]
        self.slots[number] = Slot("whole", slot.mark) if whole else Slot()

    def new_round(self) -> None:
        """The rank is gone, and with it what was not whole."""
        for number, slot in enumerate(self.slots):
            if slot.state != "whole":
                self.slots[number] = Slot()

    def keep_only(self, mark: Mark | None) -> None:
        """Training resumes from this copy, or from none: the others are of no use any more."""
        for number, slot in enumerate(self.slots):
            if slot.state == "whole" and slot.mark != mark:
                self.slots[number] = Slot()

    def find(self, mark: Mark) -> int | None:
        """The slot that holds this copy whole; None where there is none."""
        for number, slot in enumerate(self.slots):
            if slot.state == "whole" and slot.mark == mark:
                return number
        return None

    def whole(self) -> list[Mark]:
        """Of all whole copies."""
        return [s.mark for s in self.slots if s.state == "whole" and s.mark is not None]


def _is_needed(mark: Mark | None, kept: Mark | None, settled: Mark) -> bool:
    """Whether a whole copy is the newest covered one, or may become it."""
    return mark is None or mark == kept or mark > settled


class HeldCopy(NamedTuple):
    """A whole copy of one rank's parts, as a node's replica server tells of it."""

    attempt: int
    step: int
    world_size: int
    rank: int

    @property
    def mark(self) -> Mark:
        """Its step and attempt."""
        return Mark(self.attempt, self.step)


def candidates(held: Iterable[Sequence[HeldCopy]], least_step: int) -> list[Mark]:
    """Return the steps of which all ranks' copies exist, newest first, from `least_step` on."""
    there: dict[tuple[Mark, int], set[int]] = {}
    for copies in held:
        for copy in copies:
            there.setdefault((copy.mark, copy.world_size), set()).add(copy.rank)
    whole = {
        mark for (mark, world), ranks in there.items() if ranks.issuperset(range(world)) and world
    }
    return sorted((mark for mark in whole if mark.step >= least_step), reverse=True)


PeerAddress = list[Any]
"""Address and port at which a replica server gives copies to other nodes, as JSON has them."""


class Inventory(NamedTuple):
    """What a node's replica server has.

    Attributes:
        own: Whole copies of this node's ranks.
        guests: Whole copies of other nodes' ranks.
        address: Where it gives them to others; None where it does not.
        nbytes: Memory that is taken for copies, of whatever rank.
    """

    own: Sequence[HeldCopy] = ()
    guests: Sequence[HeldCopy] = ()
    address: PeerAddress | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class CopyChoice:
    """A step that all parts can be had of.

    Attributes:
        world_size: Ranks that have made it.
        kept_by: `memory` where all nodes that have made it still have it; `peer` where one of them
            is gone, and its part lies in another node's memory.
        addresses: By rank, of all replica servers that have its part and give it to others.
    """

    mark: Mark
    world_size: int
    kept_by: str
    addresses: dict[int, list[PeerAddress]] = field(default_factory=dict)


def choose(inventories: Sequence[Inventory], least_step: int) -> list[CopyChoice]:
    """Return the steps all of whose parts living nodes have, newest first.

    `least_step` is of the newest checkpoint on disk: an older copy is of no use. If both are of one
    step, memory is taken.
    """
    plain = [
        node._replace(
            own=[HeldCopy(*copy) for copy in node.own],
            guests=[HeldCopy(*copy) for copy in node.guests],
        )
        for node in (Inventory(*of) for of in inventories)
    ]
    own = [node.own for node in plain]
    everything = [*own, *(node.guests for node in plain)]
    worlds = {copy.mark: copy.world_size for copies in everything for copy in copies}
    by_makers = set(candidates(own, least_step))
    return [
        CopyChoice(
            mark, worlds[mark], "memory" if mark in by_makers else "peer", _addresses(plain, mark)
        )
        for mark in candidates(everything, least_step)
    ]


def _addresses(inventories: Sequence[Inventory], mark: Mark) -> dict[int, list[PeerAddress]]:
    addresses: dict[int, list[PeerAddress]] = {}
    for node in inventories:
        if node.address is None:
            continue
        for copy in (*node.own, *node.guests):
            if copy.mark == mark:
                addresses.setdefault(copy.rank, []).append(node.address)
    return addresses
