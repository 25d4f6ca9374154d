"""Which nodes look for which others, and who stands apart by what they saw. Pure.

Up to `ALL_UP_TO` nodes each looks for all others. Beyond that the looks of all would grow with the
square of the nodes, at one file server. So each looks for the first node, which commits what all
save, and for those at distances 1, 2, 4, 8, ... to both sides; the first looks for all. Every look
has one back, and who stands apart from most is missed by all who look for it.
tests/unit/preflight/test_sight.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    Sights = Mapping[str, Collection[str]]

ALL_UP_TO = 32


def neighbours(rank: int, size: int) -> list[int]:
    """Other ranks at distances of powers of two, and the first; all where nodes are few."""
    if size <= ALL_UP_TO:
        return [other for other in range(size) if other != rank]
    distances = [1 << power for power in range((size - 1).bit_length())]
    ranks = {(rank + sign * one) % size for one in distances for sign in (1, -1)} | {0}
    return sorted(ranks - {rank})


def looked_for(rank: int, size: int) -> list[int]:
    """The ranks whose files a node looks for: its neighbours; the first node looks for all."""
    return list(range(1, size)) if rank == 0 else neighbours(rank, size)


def missed(heard: Sequence[str], unseen: Sights) -> dict[str, tuple[str, ...]]:
    """Node to those of the others that it has not seen; without the nodes that saw all.

    Args:
        heard: Who is to be judged.
        unseen: Node to the names that it looked for in vain.
    """
    judged = set(heard)
    lost = {node: tuple(name for name in unseen[node] if name in judged) for node in heard}
    return {node: others for node, others in lost.items() if others}


def standing_apart(heard: Sequence[str], looked: Sights, blind: Sights) -> list[str]:
    """The nodes that miss, or are missed by, most of those who see each other; in order.

    None where no set of nodes that see each other, however many others lie between, is more than
    half of all: then nobody can say who is right.

    Args:
        heard: Who is to be judged.
        looked: Node to the names that it looked for.
        blind: `missed`.
    """
    judged = set(heard)
    lines = {node: [n for n in looked[node] if n in judged and n != node] for node in heard}
    most = _largest(lines, {node: set(others) for node, others in blind.items()})
    if 2 * len(most) <= len(heard):
        return []
    lookers = dict.fromkeys(heard, 0)
    missers = dict.fromkeys(heard, 0)
    for node in most:
        for name in lines[node]:
            lookers[name] += 1
        for name in blind.get(node, ()):
            missers[name] += 1
    apart = []
    for node in heard:
        mates = sum(name in most for name in lines[node])
        lost = sum(name in most for name in blind.get(node, ()))
        if 2 * lost > mates or 2 * missers[node] > lookers[node]:
            apart.append(node)
    return apart


def _largest(lines: Sights, blind: Mapping[str, set[str]]) -> set[str]:
    """The largest set of nodes between which there are ways of mutual sight."""
    left, largest = set(lines), set[str]()
    for start in lines:
        if start not in left:
            continue
        left.discard(start)
        group, todo = {start}, [start]
        while todo:
            node = todo.pop()
            for other in lines[node]:
                sees = other not in blind.get(node, ()) and node not in blind.get(other, ())
                if sees and other in left:
                    left.discard(other)
                    group.add(other)
                    todo.append(other)
        largest = max(largest, group, key=len)
    return largest
