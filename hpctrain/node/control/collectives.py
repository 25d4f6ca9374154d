"""A node's part in the gathers and broadcasts of all ranks, through a tree of nodes. Pure.

Calls differ by the channel of an `Exchange` and the how-manieth call of it this is; every
rank makes the same ones in one order. tests/unit/control/test_collectives.py holds the promises.

```
 ranks 4 5, node 2 --.
                     | up: the values of a subtree, once
 ranks 2 3, node 1 --+--> node 0, ranks 0 1
                     |
                     '<-- down: the same bytes to each child, and to each node's ranks
```
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from hpctrain.errors import ControlLost

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FANOUT = 32
"""Children of a node, so that three levels hold 33,825 nodes."""

CallKind = Literal["broadcast", "gather", "gather_on_0"]
CALL_KINDS: tuple[CallKind, ...] = get_args(CallKind)

_ENTRY = struct.Struct(">II")
"""In front of a rank's value: the rank, the length."""

UP, DOWN = "up", "down"


def parent_of(node: int) -> int | None:
    """The node to which one hands what it has; None for node 0."""
    return (node - 1) // FANOUT if node else None


def children_of(node: int, nodes: int) -> range:
    """The nodes that hand theirs to this one."""
    return range(min(nodes, FANOUT * node + 1), min(nodes, FANOUT * (node + 1) + 1))


class Call(NamedTuple):
    """Which call of the ranks.

    Attributes:
        number: The how-manieth of it.
    """

    channel: str
    number: int
    kind: CallKind

    @classmethod
    def of_plain(cls, plain: object) -> Call:
        """From a message.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(plain, list) or len(plain) != len(cls._fields):
            raise ValueError("not a call")
        channel, number, kind = plain
        if not isinstance(channel, str) or type(number) is not int or kind not in CALL_KINDS:
            raise ValueError("not a call")
        return cls(channel, number, kind)


class Delivery(NamedTuple):
    """What is to be sent.

    Attributes:
        to: `UP`, `DOWN` (to each child), or a rank of this node.
        entries: The values of some ranks, as `entries_of` reads them.
    """

    to: str | int
    call: Call
    entries: bytes


def entry(rank: int, value: bytes) -> bytes:
    """A rank's value, to be joined with others' by `+`."""
    return _ENTRY.pack(rank, len(value)) + value


def entries_of(joined: bytes) -> Iterator[tuple[int, bytes]]:
    """The values with their ranks.

    Raises:
        ValueError: these are none.
    """
    at, view = 0, memoryview(joined)
    while at < len(joined):
        if len(joined) < at + _ENTRY.size:
            raise ValueError("values cut off")
        rank, length = _ENTRY.unpack_from(joined, at)
        at += _ENTRY.size
        if len(joined) < at + length:
            raise ValueError("values cut off")
        yield rank, bytes(view[at : at + length])
        at += length


@dataclass
class _Gathered:
    """What has come of a subtree's values."""

    of: set[str | int] = field(default_factory=set)
    entries: list[bytes] = field(default_factory=list)


class Collectives:
    """What one node has heard of calls that are not whole yet."""

    def __init__(self, ranks: range, children: Iterable[int], *, is_root: bool) -> None:
        """Start without calls; `ranks` are this node's, and `children` hand theirs to it."""
        self._ranks = ranks
        self._is_root = is_root
        self._awaited: frozenset[str | int] = frozenset([*ranks, *map(_of_node, children)])
        self._gathered: dict[Call, _Gathered] = defaultdict(_Gathered)
        self._kinds: dict[tuple[str, int], CallKind] = {}

    def give(self, rank: int, call: Call, value: bytes) -> list[Delivery]:
        """A rank of this node calls. What is to be sent because of it.

        Raises:
            ControlLost: others have called something else.
        """
        if call.kind == "broadcast":
            return self.hear_down(call, entry(rank, value)) if rank == 0 else []
        return self._gather(rank, call, entry(rank, value))

    def hear_up(self, child: int, call: Call, entries: bytes) -> list[Delivery]:
        """A child hands over its subtree's values.

        Raises:
            ControlLost: others have called something else.
        """
        return self._gather(_of_node(child), call, entries)

    def hear_down(self, call: Call, entries: bytes) -> list[Delivery]:
        """What is for all ranks comes from above."""
        ranks = [rank for rank in self._ranks if call.kind == "gather" or rank != 0]
        return [Delivery(DOWN, call, entries), *(Delivery(rank, call, entries) for rank in ranks)]

    def _gather(self, sender: str | int, call: Call, entries: bytes) -> list[Delivery]:
        kind = self._kinds.setdefault((call.channel, call.number), call.kind)
        if kind != call.kind:
            who = f"rank {sender}" if isinstance(sender, int) else f"a rank of {sender}"
            raise ControlLost(f"{who} does a {call.kind} where another rank does a {kind}")
        gathered = self._gathered[call]
        if sender in gathered.of:
            return []
        gathered.of.add(sender)
        gathered.entries.append(entries)
        if gathered.of != self._awaited:
            return []
        del self._gathered[call], self._kinds[call.channel, call.number]
        joined = b"".join(gathered.entries)
        if not self._is_root:
            return [Delivery(UP, call, joined)]
        if call.kind == "gather":
            return self.hear_down(call, joined)
        return [Delivery(0, call, joined)]


def _of_node(node: int) -> str:
    return f"node {node}"
