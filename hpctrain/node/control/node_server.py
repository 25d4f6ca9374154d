"""What a node's process serves during a round of ranks: leases and calls, up and down the tree.

Connections between nodes last as long as the round: where one breaks, or the other end is silent
for `PATIENCE_S`, the round has failed, and every rank gets that once. Nothing is tried again: a
value that went up twice, or never, would be worse. tests/unit/control/test_node_server.py and
tests/unit/control/test_node_leases.py hold the promises.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.core.base import clock
from hpctrain.errors import ControlLost
from hpctrain.node.control.board import BOARD, SOCKET, Board, RootClock
from hpctrain.node.control.collectives import DOWN, UP, Call, Collectives, Delivery, children_of
from hpctrain.node.control.endpoint import ChildrenListener, Endpoint, join_parent
from hpctrain.node.control.lease import Lease, Report, Root, Subtree
from hpctrain.node.control.wire import Garbled, Greeting, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PATIENCE_S = 60.0
"""So long may the other end of a connection between nodes be silent."""
JOIN_S = 20.0
_LONGEST_LOOK_S = 0.25
"""So much of a pause between two looks counts as another's silence: where it was longer, this
process itself was stopped."""
_CREDENTIALS = struct.Struct("3i")
LOOK_S = 0.05
"""So often the board is looked at though nobody asks; the root grants ticks further ahead."""
FORWARD_S = 0.01
"""So long a child's report may wait for others before this node's own goes up."""
SAY_S = 2.0
"""So often a report or a lease is said again, as a sign of life."""


class ToSend(NamedTuple):
    """What a look has brought.

    Attributes:
        report: For the parent; None for nothing new.
        lease: For the children; None for nothing new.
        is_urgent: Somebody waits for the answer to that report.
        is_new: The lease was not said before: it is no mere sign of life.
    """

    report: Report | None = None
    lease: Lease | None = None
    is_urgent: bool = False
    is_new: bool = False


class NodeLeases:
    """What one node knows of where its subtree's ranks are, and how far they may go.

    Attributes:
        lease: The newest.
    """

    def __init__(self, board: Board, ranks_in_all: int | None) -> None:
        """Start without reports; `ranks_in_all` is for node 0, which grants, and None elsewhere."""
        self._board = board
        self._root = Root(ranks_in_all) if ranks_in_all is not None else None
        self._subtree = Subtree()
        self._version = 0
        self.lease: Lease | None = None
        self._lease_said_s = 0.0
        self._report: Report | None = None
        self._report_said_s = 0.0
        self._look_at_s = 0.0
        self._is_urgent = False

    def ask(self) -> None:
        """A rank of this node waits, or wishes something: look at once."""
        self._is_urgent, self._look_at_s = True, 0.0

    def hear_child(self, child: int, report: Report, now_s: float, *, is_urgent: bool) -> None:
        """Take in the report of a child's subtree; `is_urgent` if somebody below waits."""
        if not self._subtree.hear(child, report, now_s):
            return
        self._look_at_s = min(self._look_at_s, now_s + FORWARD_S)
        if is_urgent:
            self.ask()

    def hear_parent(self, lease: Lease, now_s: float) -> bool:
        """Let the ranks read a lease. Whether it is a new one, and the children's too."""
        if not self._board.put_lease(lease):
            return False
        self.lease, self._lease_said_s = lease, now_s
        return True

    def meet_parent(self) -> None:
        """There is a parent now, which has heard nothing."""
        self._report, self._look_at_s = None, 0.0

    def next_look_s(self) -> float:
        """When to look again, by this node's clock; it may have passed."""
        due_s = self._root.due_s() if self._root is not None else None
        return self._look_at_s if due_s is None else min(due_s, self._look_at_s)

    def look(self, now_s: float) -> ToSend:
        """Read the board, and decide what is to be sent."""
        is_urgent, self._is_urgent = self._is_urgent, False
        self._look_at_s = now_s + LOOK_S
        self._version += 1
        self._subtree.hear("board", self._board.report(self._version), now_s)
        report = self._subtree.merged(now_s)
        if self._root is not None:
            self._root.hear(report, now_s)
            lease = self._root.lease(now_s)
            if self._board.put_lease(lease):
                self.lease, self._lease_said_s = lease, now_s
                return ToSend(lease=lease, is_new=True)
            return ToSend(lease=self._lease_again(now_s))
        is_new = self._report is None or not _same(report, self._report)
        if is_new or now_s - self._report_said_s >= SAY_S:
            self._report, self._report_said_s = report, now_s
            return ToSend(report, self._lease_again(now_s), is_urgent)
        return ToSend(lease=self._lease_again(now_s))

    def _lease_again(self, now_s: float) -> Lease | None:
        """As a sign of life."""
        if now_s - self._lease_said_s < SAY_S:
            return None
        self._lease_said_s = now_s
        return self.lease or Lease(0, -1)


def _same(report: Report, other: Report) -> bool:
    """Whether they differ in nothing but their age."""
    return replace(report, version=0, began_ago_s=0, lease_ago_s=0) == replace(
        other, version=0, began_ago_s=0, lease_ago_s=0
    )


@dataclass(frozen=True)
class TreePlace:
    """Where a node stands in a round of ranks.

    Attributes:
        node: Its number; 0 is the root.
        first_rank: The number of its first rank.
        ranks_in_all: How many all nodes have.
    """

    node: int
    nodes: int
    first_rank: int
    ranks: int
    ranks_in_all: int
    name: str


class _Outbox:
    """What is to be said to those that may come later than it is said, and who have not left."""

    def __init__(self, receivers: Iterable[Any]) -> None:
        self._peers: dict[Any, Endpoint] = {}
        self._kept: dict[Any, list[bytes]] = {receiver: [] for receiver in receivers}
        self._gone: set[Any] = set()

    def connect(self, receiver: Any, peer: Endpoint) -> None:
        self._peers[receiver] = peer
        self._gone.discard(receiver)
        for message in self._kept.pop(receiver, []):
            peer.say(message)

    def say(self, receiver: Any, message: bytes) -> None:
        peer = self._peers.get(receiver)
        if peer is not None:
            peer.say(message)
        elif receiver not in self._gone:  # else all that others say would be kept for nobody
            self._kept.setdefault(receiver, []).append(message)

    def forget(self, receiver: Any, peer: Endpoint) -> None:
        if self._peers.get(receiver) is peer:
            del self._peers[receiver]
            self._gone.add(receiver)

    def peers(self) -> list[Endpoint]:
        return list(self._peers.values())

    def get(self, receiver: Any) -> Endpoint | None:
        return self._peers.get(receiver)


class NodeServer:
    """One round of ranks, on one node. Everything happens on the thread of its event loop.

    Attributes:
        lost: Why the round has failed; "" while it has not.
    """

    def __init__(self, folder: Path, place: TreePlace, *, secret: str, about: str) -> None:
        """Make the board in `folder`, which only the user can enter; nothing is served yet."""
        self.lost = ""
        self._folder, self._place = folder, place
        self._greeting = partial(Greeting, secret, about)
        self._children = children_of(place.node, place.nodes)
        ranks = range(place.first_rank, place.first_rank + place.ranks)
        is_root = place.node == 0
        self._board = Board.create(
            folder / BOARD, place.first_rank, place.ranks, place.ranks_in_all
        )
        self._leases = NodeLeases(self._board, place.ranks_in_all if is_root else None)
        self._clock = RootClock(is_root=is_root)
        self._clock.show(self._board)
        self._collectives = Collectives(ranks, self._children, is_root=is_root)
        self._ranks = ranks
        self._below = _Outbox(self._children)
        self._above = _Outbox(["parent"])
        self._callers = _Outbox([])
        self._wakers: dict[int, Endpoint] = {}
        self._names: dict[Endpoint, str] = {}
        """Of the nodes that were let in or have let this one in, before they say anything, too."""
        self._listener = ChildrenListener(self._children, self._greeting, self._greet_child)
        self._servers: list[asyncio.Server] = []
        self._look_timer: asyncio.TimerHandle | None = None
        self._looked_s = clock.monotonic()

    async def start(self, address: str) -> int:
        """Serve the ranks, and any children at `address`; return the port for those, 0 without any.

        Raises:
            OSError: there is no such address, or no port.
        """
        loop, port = asyncio.get_running_loop(), 0
        here = await loop.create_unix_server(
            self._rank_endpoint, self._folder / SOCKET, backlog=4096
        )
        self._servers.append(here)
        if self._children:
            port = self._listener.open(address)
        self._look()
        return port

    async def join(self, address: str, port: int) -> None:
        """Connect to the parent.

        Raises:
            OSError: it cannot be reached, or says nothing.
            ControlLost: something else is there, or the parent knows this node and refuses it.
        """
        place = self._place
        parent = await join_parent(address, port, self._greeting, place.node, JOIN_S)
        parent.on_message, parent.on_end = self._hear_parent, self._lose
        self._names[parent] = f"the node above ({address})"
        parent.say(packed({"is": "here", "name": place.name}))
        self._above.connect("parent", parent)
        if self.lost:
            parent.say(packed({"is": "lost", "why": self.lost}))
        self._leases.meet_parent()
        self._look_in_time()

    def close(self) -> None:
        """Serve no more. What was said before is still sent while the loop runs."""
        self.lost = self.lost or "the round is over"
        if self._look_timer is not None:
            self._look_timer.cancel()
        for server in self._servers:
            server.close()
        self._listener.close()
        for peer in self._peers():
            peer.close()
        self._board.close()

    def fail(self, why: str) -> None:
        """The round has failed: all ranks, here and on all other nodes, hear why, once."""
        if self.lost:
            return
        self.lost = why
        for peer in self._peers():
            peer.say(packed({"is": "lost", "why": why}))

    def _peers(self) -> list[Endpoint]:
        outboxes = (self._above, self._below, self._callers)
        lines = [peer for outbox in outboxes for peer in outbox.peers()]
        return [*lines, *self._wakers.values()]

    def _lose(self, peer: Endpoint, why: str) -> None:
        self.fail(f"{self._place.name} has lost {self._names[peer]}: {why}")

    # ---- nodes

    def _greet_child(self, child: int, peer: Endpoint) -> None:
        self._names[peer] = f"node {child}"
        peer.on_message = partial(self._hear_child, child)
        peer.on_end = self._lose

    def _hear_child(self, child: int, peer: Endpoint, message: bytes) -> None:
        head, body = unpacked(message)
        match head.get("is"):
            case "here":
                self._names[peer] = _text(head, "name")
                self._below.connect(child, peer)
                if self._leases.lease is not None:
                    peer.say(self._said(self._leases.lease))
                if self.lost:
                    peer.say(packed({"is": "lost", "why": self.lost}))
            case "report":
                report, is_urgent = Report.of_plain(head.get("report")), bool(head.get("urgent"))
                self._leases.hear_child(child, report, clock.monotonic(), is_urgent=is_urgent)
                self._look_in_time()
            case "values":
                call = Call.of_plain(head.get("call"))
                self._deliver(partial(self._collectives.hear_up, child, call, body))
            case "lost":
                self.fail(_text(head, "why"))
            case _:
                raise Garbled("a message of no known kind")

    def _hear_parent(self, peer: Endpoint, message: bytes) -> None:
        del peer
        head, body = unpacked(message)
        match head.get("is"):
            case "lease":
                self._board.beat()
                self._hear_clock(head.get("now_ns"))
                lease = Lease.of_plain(head.get("lease"))
                if self._leases.hear_parent(lease, clock.monotonic()):
                    self._send_lease(lease, is_new=True)
            case "values":
                call = Call.of_plain(head.get("call"))
                self._deliver(partial(self._collectives.hear_down, call, body))
            case "lost":
                self.fail(_text(head, "why"))
            case _:
                raise Garbled("a message of no known kind")

    # ---- ranks

    def _rank_endpoint(self) -> Endpoint:
        return Endpoint(self._greet_rank, lambda _peer, _why: None)

    def _greet_rank(self, peer: Endpoint, message: bytes) -> None:
        credentials = peer.option(socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        head = unpacked(message)[0]
        rank, channel = head.get("rank"), head.get("channel")
        if uid not in {os.getuid(), 0} or type(rank) is not int or rank not in self._ranks:
            raise Garbled("no rank of this node")
        if not isinstance(channel, str | None):
            raise Garbled("no channel")
        peer.trust(None)
        if channel is None and rank in self._wakers:
            why = f"another process is rank {rank} already"
            peer.say(packed({"is": "refused", "why": why}))
            peer.close()
            return
        peer.say(packed({"is": "welcome", "ranks": self._place.ranks_in_all}))
        if self.lost:
            peer.say(packed({"is": "lost", "why": self.lost}))
        if channel is None:
            self._wakers[rank] = peer
            peer.on_message = self._hear_asking
            peer.on_end = partial(self._forget_waker, rank)
        else:
            peer.on_message = partial(self._hear_call, rank)
            peer.on_end = lambda line, _: self._callers.forget((rank, channel), line)
            self._callers.connect((rank, channel), peer)

    def _forget_waker(self, rank: int, peer: Endpoint, why: str) -> None:
        del peer, why  # the agent sees how a rank ends
        del self._wakers[rank]

    def _hear_asking(self, peer: Endpoint, message: bytes) -> None:
        del peer, message
        self._leases.ask()
        self._look_in_time()

    def _hear_call(self, rank: int, peer: Endpoint, message: bytes) -> None:
        del peer
        head, body = unpacked(message)
        call = Call.of_plain(head.get("call"))
        self._deliver(partial(self._collectives.give, rank, call, body))

    # ---- calls

    def _deliver(self, hear: Any) -> None:
        """Send what comes of something that was heard."""
        deliveries: list[Delivery] = []
        try:
            deliveries = hear()
        except ControlLost as error:
            self.fail(str(error))
        for to, call, entries in deliveries:
            message = packed({"is": "values", "call": call}, entries)
            if to == UP:
                self._above.say("parent", message)
            elif to == DOWN:
                for child in self._children:
                    self._below.say(child, message)
            else:
                self._callers.say((to, call.channel), message)

    # ---- leases

    def _look_in_time(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
        wait_s = self._leases.next_look_s() - clock.monotonic()
        if wait_s <= 0:
            self._look()
        else:
            self._look_timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        now_s = clock.monotonic()
        self._watch_silence(now_s)
        if self.lost:
            return
        sent = self._leases.look(now_s)
        parent = self._above.get("parent")
        if sent.report is not None and parent is not None:
            said = {"is": "report", "report": sent.report.to_plain(), "urgent": sent.is_urgent}
            parent.say(packed(said))
        if sent.lease is not None:
            self._send_lease(sent.lease, is_new=sent.is_new)
        if self._place.node == 0:
            self._board.beat()
        self._look_in_time()

    def _send_lease(self, lease: Lease, *, is_new: bool) -> None:
        for child in self._below.peers():
            child.say(self._said(lease))
        if not is_new:  # a rank that is woken takes its node for one that hears the root
            return
        for local_rank in self._board.waiting():
            waker = self._wakers.get(self._place.first_rank + local_rank)
            if waker is not None:
                waker.say(packed({"is": "lease"}))

    def _said(self, lease: Lease) -> bytes:
        return packed({"is": "lease", "lease": lease.to_plain(), "now_ns": self._clock.now_ns()})

    def _hear_clock(self, said_ns: object) -> None:
        if said_ns is None:  # the node above does not know it yet
            return
        if type(said_ns) is not int or not 0 <= said_ns < 1 << 62:
            raise Garbled("a moment that is none")
        self._clock.hear(said_ns)
        self._clock.show(self._board)

    def _watch_silence(self, now_s: float) -> None:
        passed_s, self._looked_s = min(_LONGEST_LOOK_S, now_s - self._looked_s), now_s
        for peer in self._names:
            peer.silent_s += passed_s
            if peer.silent_s > PATIENCE_S:
                self._lose(peer, f"it was silent for {PATIENCE_S:.0f} s")
                return


def _text(head: dict[str, Any], name: str) -> str:
    text = head.get(name)
    if not isinstance(text, str):
        raise Garbled(f"a message without a {name}")
    return text
