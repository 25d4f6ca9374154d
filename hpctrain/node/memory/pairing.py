"""Which node has the copies of which: on another switch, where the cluster's are known. Pure.

Nodes of one switch can go all at once, and so must not have each other's copies. Each node has the
copies of one other. Sorted by their switches, each takes the node that is as many places further as
the largest switch has nodes: no switch reaches so far. Where one has more than half of the nodes,
this still puts as many copies elsewhere as the others have room for. Where each node has a switch
of its own, or none is known, it is the next node. Node 0's agent asks, and its word is the ring of
all: nothing is derived twice. tests/unit/memory/test_pairing.py holds the promises.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hpctrain.core.base.text import fold_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence


def buddies_of(switches: Sequence[str]) -> tuple[int, ...]:
    """Of each node by its place, the place of the one that has its copies.

    Args:
        switches: Of each node; "" where it is not known. Nodes whose switch is not known are taken
            for those of one switch: nobody knows that they are not.
    """
    on: defaultdict[str, list[int]] = defaultdict(list)
    for place, switch in enumerate(switches):
        on[switch].append(place)
    groups = sorted(on.values(), key=len, reverse=True)  # those of one size as they come
    order = [place for group in groups for place in group]
    further = len(groups[0]) if len(groups) > 1 else 1
    buddies = dict(zip(order, order[further:] + order[:further], strict=True))
    return tuple(buddies[place] for place in range(len(switches)))


def next_nodes(nodes: int) -> tuple[int, ...]:
    """The ring where no switch is known."""
    return buddies_of([""] * nodes)


def beside(buddies: Sequence[int], switches: Sequence[str]) -> list[int]:
    """The places of those whose copies are on their own switch, as far as that is known."""
    return [
        place
        for place, buddy in enumerate(buddies)
        if switches[place] and switches[place] == switches[buddy]
    ]


def warning(names: Sequence[str], buddies: Sequence[int], switches: Sequence[str]) -> str:
    """Warn of a switch whose death takes a state and its copy; "" if none does or none is known."""
    together = beside(buddies, switches)
    if not together:
        return ""
    shared = sorted({switches[place] for place in together})
    on = fold_nodes([names[place] for place in together])
    return (
        f"copies of {on} stay on their own switch ({', '.join(shared)}): it has more than half of "
        "the round's nodes, and where it dies they are lost"
    )
