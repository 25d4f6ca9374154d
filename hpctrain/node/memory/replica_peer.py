"""Copies on another node: a replica server sends its ranks' copies on to its replica peer's.

Who is whose peer node 0's agent says (`replica_peers_of`): nodes of one switch can go all at once,
and must not have each other's copies.

A rank's copy that is proved is sent on behind training, one connection for each rank; the peer
proves the bytes it has by the copy's own digests before it says that it has them.
tests/unit/memory/test_peer_assignment.py and test_replica_peer.py hold the promises.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.core.base import clock
from hpctrain.core.base.text import fold_nodes
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, ControlLost
from hpctrain.node.control.wire import Garbled
from hpctrain.node.memory.copy_line import PIECE_BYTES, CopyLine, CopyListener, meet
from hpctrain.node.memory.copy_plan import CopyPlan, is_whole, pieces
from hpctrain.node.memory.in_memory_copies import ProvedCopy, room_refused
from hpctrain.node.memory.slots import Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.node.control.node_server import TreePlace
    from hpctrain.node.control.wire import Greeting
    from hpctrain.node.memory.in_memory_copies import CopyInMemory, NodeCopies
    from hpctrain.node.memory.slots import PeerAddress

Address = tuple[str, int]

RING_S = 60.0
"""So long may it take until a node hears where its peer is: the slowest node joins last."""
LOST = (OSError, Garbled, ControlLost, KeyError, TypeError, ValueError)
"""The connection, or the sense of what is said on it."""
HINT = 'alive.memory_peer = "no" needs half of it, and survives no lost node'


class RoundNeeds(Protocol):
    """What a round knows that a copy of another node has to obey."""

    def needed(self) -> tuple[Mark | None, Mark] | None:
        """What is kept and what is settled; None while it is not known what training resumes from.

        Raises:
            ControlLost: the round is over.
        """


class CopyServer:
    """What a node's replica server does for others: keeps their copies, and gives what it has."""

    def __init__(self, node_copies: NodeCopies, needs: RoundNeeds) -> None:
        """Serve nobody yet."""
        self._copies, self._needs = node_copies, needs

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
            self._copies.take_guest(int(head["local"]), int(head["bytes"]))
        except CheckpointError as error:
            why = room_refused(error)
        line.say({"why": why})

    def _copy(self, line: CopyLine, head: dict[str, Any], body: bytes) -> None:
        plan = CopyPlan.parse(body)
        copy = ProvedCopy(Mark(*head["mark"]), plan, str(head["digest"]))
        if (needed := self._needs.needed()) is None:
            line.say({"why": "nothing was chosen to go on from"})
            return

        def fill(view: memoryview) -> None:
            line.say({"why": ""})
            for low, high in pieces(copy.size, PIECE_BYTES):
                said, piece = line.hear()
                if said["at"] != low or len(piece) != high - low:
                    raise Garbled("another piece of a copy than was awaited")
                with self._copies.lock:
                    self._needs.needed()  # the slot is another's once the round is over
                    view[low:high] = piece
            points.reach("memory.received", step=copy.mark.step, rank=plan.rank)

        why = self._copies.receive(int(head["local"]), copy, *needed, fill)
        if not why:
            points.reach("memory.acknowledge", step=copy.mark.step, rank=plan.rank)
        line.say({"why": why})

    def _look(self, line: CopyLine, head: dict[str, Any], body: bytes) -> None:
        del body
        there = self._copies.find(Mark(*head["mark"]), int(head["rank"]))
        if there is None:
            line.say({"digest": ""})
        else:
            line.say({"digest": there.copy.digest}, there.copy.plan.dump())

    def _read(self, line: CopyLine, head: dict[str, Any], body: bytes) -> None:
        del body
        low, high = int(head["low"]), int(head["high"])
        there = self._copies.find(Mark(*head["mark"]), int(head["rank"]))
        if there is None or not 0 <= low < high <= min(there.copy.size, low + PIECE_BYTES):
            raise Garbled("bytes that are not here")
        line.say({}, bytes(there.view[low:high]))


class PeerRing:
    """One node's part, in one round: connections to its peer, one for each of its ranks.

    Attributes:
        at: Where this node's replica server lets others in.
        addresses: On node 0: those of all nodes that are known, by number.
    """

    def __init__(
        self,
        place: TreePlace,
        node_copies: NodeCopies,
        needs: RoundNeeds,
        greeting: Callable[[], Greeting],
        peers: Sequence[int],
    ) -> None:
        """Accept nobody yet; `peers`: by place, the node with its copies, as node 0 says."""
        self.at: PeerAddress = []
        self.addresses: dict[int, PeerAddress] = {}
        self._place, self._copies, self._peers = place, node_copies, peers
        self._greeting = greeting
        self._listener = CopyListener(
            range(place.nodes), greeting, CopyServer(node_copies, needs).serve
        )
        self._address: Address | None = None
        self._is_known = threading.Event()
        self._lock = threading.Lock()
        self._lines: dict[int, CopyLine] = {}
        self._turns: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._is_over = False

    def open(self, address: str, shown: str) -> None:
        """Listen at `address`, which others reach as `shown`.

        Raises:
            OSError: there is no such address, or no port.
        """
        self.at = [shown, self._listener.open(address)]
        if self._place.node == 0:
            self.addresses[0] = self.at

    def of_peer(self, node: int) -> PeerAddress:
        """On node 0, once all are known: the address of a node's peer."""
        return self.addresses[self._peers[node]]

    def meet_at(self, peer: PeerAddress | None) -> None:
        """Where this node's peer lets others in; None where copies are off."""
        self._address = (str(peer[0]), int(peer[1])) if peer is not None else None
        self._is_known.set()

    def room(self, local: int, nbytes: int) -> str:
        """Have the peer take memory, slots of `nbytes`, for a rank's copies; return why not, or "".

        `local` is the rank's number on this node; so below.
        """
        try:
            with self._turns[local]:
                said, _ = self._line(local).ask({"is": "room", "local": local, "bytes": nbytes})
            why = str(said["why"])
        except LOST as error:
            return f"{self._place.name}: copies cannot be sent to another node: {error}"
        return f"the node for copies of {self._place.name}: {why}; {HINT}" if why else ""

    def send(self, local: int, there: CopyInMemory) -> tuple[str, bool]:
        """Send a copy to the peer; return why it has none, or "", and whether it is unreachable."""
        copy, view = there.copy, there.view
        head = {"is": "copy", "local": local, "mark": copy.mark, "digest": copy.digest}
        try:
            points.reach("memory.send", step=copy.mark.step, rank=copy.plan.rank)
            with self._turns[local]:
                line = self._line(local)
                said, _ = line.ask(head, copy.plan.dump())
                if not said["why"]:
                    for low, high in pieces(copy.size, PIECE_BYTES):
                        line.say({"at": low}, bytes(view[low:high]))
                    said, _ = line.hear()
            return str(said["why"]), False
        except LOST as error:
            return f"copies cannot be sent to another node: {error}", True

    def fetch(self, mark: Mark, rank: int, addresses: Sequence[PeerAddress]) -> CopyInMemory | None:
        """A rank's copy, from replica servers that have it; None where none has it whole.

        Raises:
            CheckpointError: there is no memory for it.
        """
        points.reach("memory.fetch", step=mark.step, rank=rank)
        local = rank - self._place.first_rank
        own = local if 0 <= local < self._place.ranks else None
        for address in addresses:
            if list(address) == self.at:
                continue
            try:
                where = str(address[0]), int(address[1])
                with closing(meet(where, self._greeting, self._place.node)) as line:
                    said, plan = line.ask({"is": "look", "mark": mark, "rank": rank})
                    if not said["digest"]:
                        continue
                    copy = ProvedCopy(mark, CopyPlan.parse(plan), str(said["digest"]))
                    there = self._copies.fetch(copy, own, partial(_read, line))
            except LOST:
                continue
            if there is not None:
                return there
        return None

    def close(self) -> None:
        """Let nobody in any more, and send nothing."""
        self._listener.close()
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
            raise ControlLost("its peer is not there")
        line = meet(self._address, self._greeting, self._place.node)
        with self._lock:
            if not self._is_over:
                self._lines[local] = line
                return line
        line.close()
        raise ControlLost("the round is over")


def _read(line: CopyLine, view: memoryview, copy: ProvedCopy) -> bool:
    """Write another node's copy into memory; return whether it is whole then."""
    asked = {"is": "read", "mark": copy.mark, "rank": copy.plan.rank}
    try:
        for low, high in pieces(copy.size, PIECE_BYTES):
            view[low:high] = line.ask(asked | {"low": low, "high": high})[1]
    except LOST:  # also where it says another number of bytes
        return False
    return is_whole(view, copy.plan, copy.digest)


def replica_peers_of(switches: Sequence[str]) -> tuple[int, ...]:
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
    peers = dict(zip(order, order[further:] + order[:further], strict=True))
    return tuple(peers[place] for place in range(len(switches)))


def next_nodes(nodes: int) -> tuple[int, ...]:
    """The ring where no switch is known."""
    return replica_peers_of([""] * nodes)


def beside(peers: Sequence[int], switches: Sequence[str]) -> list[int]:
    """The places of those whose copies are on their own switch, as far as that is known."""
    return [
        place
        for place, peer in enumerate(peers)
        if switches[place] and switches[place] == switches[peer]
    ]


def warning(names: Sequence[str], peers: Sequence[int], switches: Sequence[str]) -> str:
    """Warn of a switch whose death takes a state and its copy; "" if none does or none is known."""
    together = beside(peers, switches)
    if not together:
        return ""
    shared = sorted({switches[place] for place in together})
    on = fold_nodes([names[place] for place in together])
    return (
        f"copies of {on} stay on their own switch ({', '.join(shared)}): it has more than half of "
        "the round's nodes, and where it dies they are lost"
    )
