"""What the process beside an agent does that keeps copies of the state: it owns their memory.

If a replica server is lost, no more copies are made in the round, and training continues; the
copies that were made are there at the ranks' next start. tests/unit/memory/test_replica_server.py
holds the promises.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, ControlLost, HpctrainError
from hpctrain.node.control.endpoint import ChildrenListener, join_parent
from hpctrain.node.control.node_server import TreePlace
from hpctrain.node.control.wire import Greeting, packed, unpacked
from hpctrain.node.memory.copy_plan import CopyPlan
from hpctrain.node.memory.in_memory_copies import CopyInMemory, NodeCopies, room_refused
from hpctrain.node.memory.replica_client import (
    COVERED,
    COVERED_NS,
    FIRST_FREE,
    MOST_RANKS,
    OFF,
    SETTLED,
    SOCKET,
    WORDS_BYTES,
    ReplicaServerLost,
    receive,
    send,
    text_fd,
    text_of,
    words_of,
)
from hpctrain.node.memory.replica_peer import PeerRing, next_nodes
from hpctrain.node.memory.slots import NEVER, Coverage, Mark, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.node.control.endpoint import Endpoint

log = logging.getLogger("hpctrain.agent")

_CREDENTIALS = struct.Struct("3i")
BACKLOG = 256
JOIN_S = 20.0


class ReplicaServer:
    """A node's copies, round after round."""

    def __init__(self) -> None:
        """Nothing is held. To be made where its event loop runs."""
        self._copies = NodeCopies()
        self._round: ReplicaRound | None = None

    async def do(self, order: dict[str, Any]) -> int:
        """Carry out an agent's order; return the port for other replica servers, for one to begin.

        Raises:
            OSError: no room or no port for it.
            ControlLost: the replica server above cannot be reached, or is another.
        """
        if begin := order.get("begin"):
            return await self._begin(**begin)
        if self._round is None:
            raise ControlLost("no round was begun")
        if join := order.get("join"):
            await self._round.join(*join)
        return 0

    async def _begin(
        self,
        folder: str,
        place: dict[str, Any],
        *,
        secret: str,
        about: str,
        address: str,
        shown: str = "",
        peers: Sequence[int] = (),
    ) -> int:
        if self._round is not None:
            self._round.close()
        at = TreePlace(**place)
        if at.ranks > MOST_RANKS:
            raise ControlLost(f"{at.ranks} ranks on a node, {MOST_RANKS} are the most")
        self._copies.new_round(at.ranks)
        self._round = ReplicaRound(Path(folder), at, self._copies, partial(Greeting, secret, about))
        if shown and at.nodes > 1:
            said = partial(Greeting, secret, f"{about}/copies")
            self._round.copy_on(address, shown, said, peers or next_nodes(at.nodes))
        return await self._round.start(address)


class ReplicaRound:
    """One round of ranks, on one node.

    Words between replica servers and all that follows from them are the event loop's; each rank's
    packets are those of a thread. They share what `_lock` guards.
    """

    def __init__(
        self,
        folder: Path,
        place: TreePlace,
        node_copies: NodeCopies,
        greeting: Callable[[], Greeting],
    ) -> None:
        """Serve nobody yet; only the user can enter the round's `folder`."""
        self._folder, self._place, self._copies = folder, place, node_copies
        self._greeting = greeting
        self._lock = node_copies.lock
        self._ring: PeerRing | None = None
        self._words_fd = os.memfd_create("hpctrain-words", os.MFD_CLOEXEC)
        os.ftruncate(self._words_fd, WORDS_BYTES)
        self._words = words_of(self._words_fd)
        self._loop = asyncio.get_running_loop()
        self._here = Coverage(range(place.ranks))
        self._all = Coverage(range(place.nodes))
        self._attempt = 0
        self._chosen: Mark | None = None
        self._has_chosen = False
        self._why_off = ""
        self._is_over = False
        self._rank_listener: socket.socket | None = None
        self._ranks: set[socket.socket] = set()
        self._below: dict[int, Endpoint] = {}
        self._above: Endpoint | None = None
        self._listener = ChildrenListener(range(1, place.nodes), greeting, self._let_in)

    def copy_on(
        self,
        address: str,
        shown: str,
        greeting: Callable[[], Greeting],
        peers: Sequence[int],
    ) -> None:
        """Have copies on another node, too. Before `start`.

        This one listens at `address`, which others reach as `shown`. `peers` gives by place the
        node that has each one's copies; node 0's counts.

        Raises:
            OSError: there is no such address, or no port.
        """
        self._ring = PeerRing(self._place, self._copies, self, greeting, peers)
        self._ring.open(address, shown)

    def needed(self) -> tuple[Mark | None, Mark] | None:
        """See `replica_peer.RoundNeeds`."""
        with self._lock:
            if self._is_over:
                raise ControlLost("the round is over")
            if not self._has_chosen:
                return None
            covered, settled = self._words[COVERED] - 1, self._words[SETTLED] - 1
            kept = Mark(self._attempt, covered) if covered != NEVER else self._chosen
            return kept, Mark(self._attempt, settled)

    async def start(self, address: str) -> int:
        """Serve the ranks, and on node 0 other replica servers; return the port for those, or 0.

        Raises:
            OSError: there is no such address, or no port.
        """
        rank_listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank_listener.bind(str(self._folder / SOCKET))
        rank_listener.listen(BACKLOG)
        self._rank_listener = rank_listener
        threading.Thread(target=self._welcome, args=(rank_listener,), daemon=True).start()
        if self._place.node or self._place.nodes == 1:
            return 0
        return self._listener.open(address)

    async def join(self, address: str, port: int) -> None:
        """Go to the replica server of node 0.

        Raises:
            OSError: it cannot be reached, or says nothing.
            ControlLost: something else is there.
        """
        above = await join_parent(address, port, self._greeting, self._place.node, JOIN_S)
        above.on_message = self._hear_above
        above.on_end = lambda _, why: self._turn_off(f"the replica server of node 0 is lost: {why}")
        self._above = above
        at = self._ring.at if self._ring is not None else None
        above.say(self._off_news() if self._why_off else packed({"is": "here", "at": at}))

    def close(self) -> None:
        """Serve no more; what ranks have not finished is none. Harmless when repeated."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            ranks = [*self._ranks, *([self._rank_listener] if self._rank_listener else [])]
        for peer in ranks:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._ring is not None:
            self._ring.close()
        for replica_server in [*self._below.values(), *([self._above] if self._above else [])]:
            replica_server.close()
        os.close(self._words_fd)

    # ---- between replica servers, on the event loop

    def _let_in(self, node: int, child: Endpoint) -> None:
        self._below[node] = child
        child.on_message = partial(self._hear_below, node)
        child.on_end = lambda _, why: self._turn_off(
            f"the replica server of node {node} is lost: {why}"
        )

    def _hear_below(self, node: int, child: Endpoint, message: bytes) -> None:
        head = unpacked(message)[0]
        if head.get("is") == "off":
            self._turn_off(str(head.get("why")))
        elif head.get("is") == "settled":
            self._node_settled(node, int(head["step"]), whole=bool(head["whole"]))
        elif head.get("is") == "here":  # the first word is the child's: it waits for its greeting
            child.say(self._off_news() if self._why_off else self._news())
            self._hear_place(node, head.get("at"))

    def _hear_above(self, _: Endpoint, message: bytes) -> None:
        head = unpacked(message)[0]
        if head.get("is") == "off":
            self._turn_off(str(head.get("why")))
        elif head.get("is") == "news":
            self._publish(int(head["covered"]), int(head["settled"]))
        elif head.get("is") == "ring" and self._ring is not None:
            self._ring.meet_at(head["at"])

    def _hear_place(self, node: int, at: list[Any] | None) -> None:
        """On node 0: where a node keeps others' copies; with the last all hear of their peers."""
        if self._ring is None or at is None:
            return
        self._ring.addresses[node] = at
        if len(self._ring.addresses) == self._place.nodes:
            for number, child in self._below.items():
                child.say(packed({"is": "ring", "at": self._ring.of_peer(number)}))
            self._ring.meet_at(self._ring.of_peer(0))

    def _node_settled(self, node: int, step: int, *, whole: bool) -> None:
        """On node 0: a node's word on a step."""
        if self._all.hear(node, step, whole=whole):
            points.reach("memory.publish", step=step)
            for child in self._below.values():
                child.say(self._news())
            self._publish(self._all.covered, self._all.settled)

    def _news(self) -> bytes:
        news = {"is": "news", "covered": self._all.covered, "settled": self._all.settled}
        return packed(news)

    def _off_news(self) -> bytes:
        return packed({"is": "off", "why": self._why_off})

    def _publish(self, covered: int, settled: int) -> None:
        """Let this node's ranks know, and give them what is free by that."""
        with self._lock:
            if self._is_over:
                return
            if covered + 1 > self._words[COVERED]:
                self._words[COVERED_NS] = clock.monotonic_ns()
            self._words[COVERED], self._words[SETTLED] = covered + 1, settled + 1
            for local in range(self._place.ranks):
                self._offer(local)

    def _turn_off(self, why: str) -> None:
        """No copies any more, on any node: one that is not made everywhere is of no use."""
        with self._lock:
            if self._is_over or self._why_off:
                return
            self._why_off = why
            self._words[OFF] = 1
        if self._ring is not None:
            self._ring.meet_at(None)
        for replica_server in [*self._below.values(), *([self._above] if self._above else [])]:
            replica_server.say(self._off_news())

    def _on_loop(self, act: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop ends with this process
            self._loop.call_soon_threadsafe(act)

    # ---- ranks, each on a thread of its own

    def _welcome(self, rank_listener: socket.socket) -> None:
        with suppress(OSError), rank_listener:
            while True:
                peer, _ = rank_listener.accept()
                with self._lock:
                    if self._is_over or not _is_own(peer):
                        peer.close()
                        continue
                    self._ranks.add(peer)
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        local = NEVER
        try:
            while (packet := receive(peer)) is not None:
                head, fds = packet
                try:
                    if head.get("is") == "hello":
                        local = self._hello(peer, head)
                    elif local != NEVER:
                        self._hear(peer, local, head, fds)
                    else:
                        raise ReplicaServerLost("it has not said who it is")
                finally:
                    for fd in fds:
                        os.close(fd)
        except (OSError, HpctrainError, ValueError, KeyError, TypeError, IndexError) as error:
            with suppress(OSError):
                send(peer, {"error": f"{type(error).__name__}: {error}"[:1000]})
        finally:
            with self._lock:
                self._ranks.discard(peer)
            peer.close()

    def _hello(self, peer: socket.socket, head: dict[str, Any]) -> int:
        local = int(head["rank"]) - self._place.first_rank
        if not 0 <= local < self._place.ranks:
            raise ReplicaServerLost(f"rank {head['rank']} is none of this node's")
        with self._lock:
            self._attempt = int(head["attempt"])
            send(peer, {"ranks": self._place.ranks, "local": local}, (self._words_fd,))
        return local

    def _hear(self, peer: socket.socket, local: int, head: dict[str, Any], fds: list[int]) -> None:
        acts: dict[str, Callable[[], None]] = {
            "room": lambda: self._room(peer, local, int(head["bytes"])),
            "copied": lambda: self._copied(local, int(head["slot"]), int(head["step"]), fds),
            "left": lambda: self._left(local, int(head["step"]), head["slot"]),
            "chosen": lambda: self._choose(Mark(*head["mark"]) if head["mark"] else None),
            "held": lambda: self._send_held(peer),
            "facts": lambda: self._send_facts(peer, Mark(*head["mark"]), head["ranks"]),
            "open": lambda: self._open(peer, Mark(*head["mark"]), head["rank"], head["at"]),
            "why": lambda: send(peer, {"why": self._why_off[:1000]}),
        }
        acts[str(head.get("is"))]()

    def _choose(self, mark: Mark | None) -> None:
        """Training resumes from this copy, or from none of them; the first rank's word counts."""
        with self._lock:
            if self._has_chosen:
                return
            self._has_chosen, self._chosen = True, mark
            self._copies.keep_only(mark)

    def _send_held(self, peer: socket.socket) -> None:
        at = self._ring.at if self._ring is not None else None
        _send_text(peer, {"held": [*self._copies.held(), at, self._copies.nbytes]})

    def _room(self, peer: socket.socket, local: int, nbytes: int) -> None:
        """Memory for a rank's copies; where there is too little of it, no rank makes any."""
        rank_memory, why = self._copies.own[local], ""
        try:
            rank_memory.take(nbytes)
        except CheckpointError as error:
            why = f"{self._place.name}: {room_refused(error)}"
        if not why and self._ring is not None:
            why = self._ring.room(local, rank_memory.arenas[0].size)
        if why:
            self._on_loop(partial(self._turn_off, why))
            send(peer, {"why": why})
            return
        fds = tuple(arena.fd for arena in rank_memory.arenas)
        send(peer, {"sizes": [arena.size for arena in rank_memory.arenas]}, fds)
        with self._lock:
            self._offer(local)

    def _copied(self, local: int, slot: int, step: int, fds: list[int]) -> None:
        rank_memory, whole = self._copies.own[local], False
        plan = CopyPlan.parse(text_of(os.dup(fds[0])))
        mark = Mark(self._attempt, step)
        with self._lock:
            if self._is_over or not rank_memory.slots.copied(slot, mark):
                raise ReplicaServerLost(f"slot {slot} was not given to rank {plan.rank}")
        try:
            rank_memory.prove(slot, mark, plan)
            whole = True
        finally:
            with self._lock:
                if not self._is_over:
                    rank_memory.slots.proved(slot, whole=whole)
            if whole and self._ring is not None:
                threading.Thread(target=self._send_on, args=(local, mark), daemon=True).start()
            else:
                self._settle(local, step, whole=whole)

    def _send_on(self, local: int, mark: Mark) -> None:
        """A rank's copy to the peer, behind training; it counts when the peer has it."""
        there = self._copies.own[local].find(mark, self._place.first_rank + local)
        why, is_lost = "it is gone", False
        if there is not None and self._ring is not None:
            arena = self._copies.own[local].arenas[there[1]]
            why, is_lost = self._ring.send(local, CopyInMemory(there[0], arena))
        if why and not self._is_over:
            log.warning("%s: step %d is not on another node: %s", self._place.name, mark.step, why)
            if is_lost:
                self._on_loop(partial(self._turn_off, f"{self._place.name}: {why}"))
        self._settle(local, mark.step, whole=not why)

    def _left(self, local: int, step: int, slot: int | None) -> None:
        with self._lock:
            if slot is not None:
                slots = self._copies.own[local].slots.slots
                if slots[slot].state == "given":
                    slots[slot] = Slot()
        self._settle(local, step, whole=False)

    def _settle(self, local: int, step: int, *, whole: bool) -> None:
        """A rank's word on a step; with the last one of the node, the node's."""
        with self._lock:
            if self._is_over:
                return
            self._offer(local)
            if not self._here.hear(local, step, whole=whole):
                return
            settled, is_whole = self._here.settled, self._here.covered == self._here.settled
        self._on_loop(partial(self._report, settled, whole=is_whole))

    def _report(self, step: int, *, whole: bool) -> None:
        if self._place.node == 0:
            self._node_settled(0, step, whole=whole)
        elif self._above is not None:
            self._above.say(packed({"is": "settled", "step": step, "whole": whole}))

    def _offer(self, local: int) -> None:
        """Give a rank a slot to write, if it has none and one is free. Within the lock."""
        rank_memory, at = self._copies.own[local], FIRST_FREE + local
        if self._words[at] or not rank_memory.nbytes or (needed := self.needed()) is None:
            return
        number = rank_memory.slots.give(*needed)
        if number is not None:
            self._words[at] = number + 1

    def _send_facts(self, peer: socket.socket, mark: Mark, ranks: list[int]) -> None:
        facts: dict[int, Any] = {}
        for rank in ranks:
            if (there := self._copies.find(mark, rank)) is not None:
                copy = there.copy
                facts[rank] = [copy.size, copy.digest, copy.plan.head, copy.plan.facts]
        _send_text(peer, {"facts": facts})

    def _open(self, peer: socket.socket, mark: Mark, rank: int, at: list[Any]) -> None:
        """A copy's memory; what is on other nodes alone is brought here first."""
        there, why = self._copies.find(mark, rank), ""
        if there is None and self._ring is not None:
            try:
                there = self._ring.fetch(mark, rank, at)
            except CheckpointError as error:
                why = room_refused(error)
        if there is None:
            send(peer, {"is": "none", "why": why})
        else:
            send(peer, {"is": "copy"}, (there.arena.fd,))


def _send_text(peer: socket.socket, value: dict[str, Any]) -> None:
    handle = text_fd(json.dumps(value, separators=(",", ":")).encode())
    try:
        send(peer, {"is": "text"}, (handle,))
    finally:
        os.close(handle)


def _is_own(peer: socket.socket) -> bool:
    said = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.getuid())
