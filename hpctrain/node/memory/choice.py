"""Which step ranks go on from, of the copies that the nodes have, and where its parts are. Pure.

tests/unit/memory/test_choice.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.node.memory.slots import HeldCopy, Mark, candidates

if TYPE_CHECKING:
    from collections.abc import Sequence

Door = list[Any]
"""Address and port at which a replica server gives copies to other nodes, as JSON has them."""


class Inventory(NamedTuple):
    """What a node's replica server has.

    Attributes:
        own: Whole copies of this node's ranks.
        guests: Whole copies of other nodes' ranks.
        door: Where it gives them to others; None where it does not.
    """

    own: Sequence[HeldCopy] = ()
    guests: Sequence[HeldCopy] = ()
    door: Door | None = None


@dataclass(frozen=True)
class CopyChoice:
    """A step that all parts can be had of.

    Attributes:
        mark: Which.
        world_size: Ranks that have made it.
        kept_by: `memory` where all nodes that have made it still have it; `buddy` where one of them
            is gone, and its part lies in another node's memory.
        doors: By rank, of all replica servers that have its part and give it to others.
    """

    mark: Mark
    world_size: int
    kept_by: str
    doors: dict[int, list[Door]] = field(default_factory=dict)


def choose(inventories: Sequence[Inventory], least_step: int) -> list[CopyChoice]:
    """Return the steps all of whose parts living nodes have, newest first.

    `least_step` is of the newest checkpoint on disk: an older copy is of no use. If both are of one
    step, memory is taken.
    """
    plain = [
        Inventory(
            [HeldCopy(*copy) for copy in node.own],
            [HeldCopy(*copy) for copy in node.guests],
            node.door,
        )
        for node in (Inventory(*of) for of in inventories)
    ]
    own = [node.own for node in plain]
    everything = [*own, *(node.guests for node in plain)]
    worlds = {copy.mark: copy.world_size for copies in everything for copy in copies}
    by_makers = set(candidates(own, least_step))
    return [
        CopyChoice(
            mark, worlds[mark], "memory" if mark in by_makers else "buddy", _doors(plain, mark)
        )
        for mark in candidates(everything, least_step)
    ]


def _doors(inventories: Sequence[Inventory], mark: Mark) -> dict[int, list[Door]]:
    doors: dict[int, list[Door]] = {}
    for node in inventories:
        if node.door is None:
            continue
        for copy in (*node.own, *node.guests):
            if copy.mark == mark:
                doors.setdefault(copy.rank, []).append(node.door)
    return doors
