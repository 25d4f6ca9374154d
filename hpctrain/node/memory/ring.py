"""A round's part in copies on other nodes: the door, the lines to the buddy, and what is fetched.

tests/unit/memory/test_buddy.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import ControlLost
from hpctrain.node.control.wire import Garbled
from hpctrain.node.memory.buddy import BuddyLines, CopyFetcher, CopyServer
from hpctrain.node.memory.copy_line import CopyDoor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.node.control.node_server import TreePlace
    from hpctrain.node.control.wire import Greeting
    from hpctrain.node.memory.buddy import RoundNeeds
    from hpctrain.node.memory.choice import Door
    from hpctrain.node.memory.node_stock import CopyInMemory, NodeStock
    from hpctrain.node.memory.slots import Mark

LOST = (OSError, Garbled, ControlLost, KeyError, TypeError, ValueError)
"""The connection, or the sense of what is said on it."""
HINT = 'alive.memory_buddy = "no" needs half of it, and survives no lost node'


class BuddyRing:
    """One node's part, in one round.

    Attributes:
        at: Where this node's replica server lets others in.
        doors: On node 0: those of all nodes that are known, by number.
    """

    def __init__(
        self,
        place: TreePlace,
        stock: NodeStock,
        needs: RoundNeeds,
        greeting: Callable[[], Greeting],
        buddies: Sequence[int],
    ) -> None:
        """Accept nobody yet; `buddies`: by place, the node with its copies, as node 0 says."""
        self.at: Door = []
        self.doors: dict[int, Door] = {}
        self._place, self._buddies = place, buddies
        self._lines = BuddyLines(place.node, greeting)
        self._door = CopyDoor(range(place.nodes), greeting, CopyServer(stock, needs).serve)
        self._fetcher = CopyFetcher(stock, place.node, greeting)

    def open(self, address: str, shown: str) -> None:
        """Listen at `address`, which others reach as `shown`.

        Raises:
            OSError: there is no such address, or no port.
        """
        self.at = [shown, self._door.open(address)]
        if self._place.node == 0:
            self.doors[0] = self.at

    def of_buddy(self, node: int) -> Door:
        """On node 0, once all are known: the door of a node's buddy."""
        return self.doors[self._buddies[node]]

    def meet_at(self, buddy: Door | None) -> None:
        """Where this node's buddy lets others in; None where copies are off."""
        self._lines.meet_at((str(buddy[0]), int(buddy[1])) if buddy is not None else None)

    def room(self, local: int, nbytes: int) -> str:
        """Have the buddy take memory for a rank's copies; why it does not, or ""."""
        try:
            why = self._lines.room(local, nbytes)
        except LOST as error:
            return f"{self._place.name}: copies cannot be sent to another node: {error}"
        return f"the node for copies of {self._place.name}: {why}; {HINT}" if why else ""

    def send(self, local: int, there: CopyInMemory) -> tuple[str, bool]:
        """Send a copy to the peer; return why it has none, or "", and whether it is unreachable."""
        try:
            return self._lines.send(local, there), False
        except LOST as error:
            return f"copies cannot be sent to another node: {error}", True

    def fetch(self, mark: Mark, rank: int, doors: Sequence[Door]) -> CopyInMemory | None:
        """A rank's copy, from replica servers that have it; None where none has it whole.

        Raises:
            CheckpointError: there is no memory for it.
        """
        local = rank - self._place.first_rank
        own = local if 0 <= local < self._place.ranks else None
        return self._fetcher.fetch(mark, rank, own, self._others(doors))

    def mend(self, there: CopyInMemory, doors: Sequence[Door]) -> bool:
        """Read what is bad in a copy from others that have it; return whether it is whole then."""
        return self._fetcher.mend(there.view, there.copy, self._others(doors))

    def close(self) -> None:
        """Let nobody in any more, and send nothing."""
        self._door.close()
        self._lines.close()

    def _others(self, doors: Sequence[Door]) -> list[tuple[str, int]]:
        return [(str(door[0]), int(door[1])) for door in doors if list(door) != self.at]
