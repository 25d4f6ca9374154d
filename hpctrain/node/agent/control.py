"""The agent's part in its ranks' agreement: before each round the nodes' processes join to a tree.

tests/engines/test_agent_control.py, tests/engines/test_memory.py and
tests/unit/memory/test_replica_server_process.py hold the promises.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_CONTROL
from hpctrain.core.base.listener import is_loopback
from hpctrain.core.base.process import show_as
from hpctrain.core.base.records import FailureReport
from hpctrain.core.base.secret import code
from hpctrain.errors import ControlLost
from hpctrain.node.agent.rounds import RoundPart
from hpctrain.node.control.collectives import parent_of
from hpctrain.node.control.node_process import ForkedServer, NodeProcess
from hpctrain.node.memory.replica_client import ReplicaClient, ReplicaServerLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from hpctrain.node.agent.rendezvous import SignedStore
    from hpctrain.node.control.node_server import TreePlace

log = logging.getLogger("hpctrain.agent")

EVERYWHERE = "0.0.0.0"  # noqa: S104 - who connects has to prove that he knows the run's secret
NICE = 10
"""How much it steps back behind training."""


class NodeControl(RoundPart):
    """This node's process, round after round."""

    def __init__(
        self,
        master_addr: str,
        secret: str,
        *,
        keeps_copies: bool = False,
        copies_to_peer: bool = False,
        replica_server: str = "",
    ) -> None:
        """Fork the process; call this while the calling process has one thread.

        All nodes can connect to `master_addr`, node 0's, and get the same `secret` of this start.
        `replica_server` is what the former agent of this node handed over.
        """
        self._master_addr = master_addr
        self._secret = code(secret, "control")
        self._process = NodeProcess()
        self._memory: NodeMemory | None = None
        if keeps_copies:
            self._memory = NodeMemory(
                self._secret, to_peer=copies_to_peer, handed_over=replica_server
            )
        self._place: TreePlace | None = None
        self._failure: FailureReport | None = None

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [self._process.pid, *([self._memory.pid] if self._memory is not None else [])]

    @property
    def folder(self) -> Path:
        """Of the newest round: where its ranks, their board and their witnesses meet."""
        return self._process.folder

    @property
    def copies_to_peer(self) -> bool:
        """Whether copies lie on another node, too."""
        return self._memory is not None and self._memory.to_peer

    def begin(
        self,
        place: TreePlace,
        store: SignedStore,
        key: Callable[[str], str],
        peers: Sequence[int] = (),
    ) -> None:
        """Serve a round of this node's ranks, which find their way by the environment.

        On node 0, `peers` gives by place the node that has each one's copies; () for the next
        one.

        Raises:
            ControlLost: there is no room or no port for it.
        """
        where = addresses(self._master_addr, place.node)
        self._place, self._failure = place, None
        port = self._process.begin(
            place, secret=self._secret, about=key("control"), address=where[0]
        )
        if port:
            store.set(key(f"control/{place.node}"), [where[1], port])
        if self._memory is not None:
            self._memory.begin(place, self._process.folder, store, key, where, peers=peers)
        os.environ[HPCTRAIN_CONTROL] = str(self._process.folder)

    def join(self, store: SignedStore, key: Callable[[str], str], timeout_s: float) -> None:
        """Connect to the node above before the ranks start.

        Raises:
            ControlLost: it cannot be reached.
            TimeoutError: its agent has not published its address within `timeout_s`.
        """
        parent = parent_of(self._place.node) if self._place is not None else None
        if parent is not None:
            address, port = store.wait(key(f"control/{parent}"), timeout_s)
            self._process.join(address, port)
        if self._memory is not None:
            self._memory.meet(store, key, timeout_s)

    def memory_line(self, attempt: int) -> ReplicaClient | None:
        """Connect to this node's replica server after the ranks; None if there is none."""
        if self._memory is None or self._place is None:
            return None
        try:
            return ReplicaClient(self.folder, self._place.first_rank, attempt)
        except ReplicaServerLost as error:
            log.warning("copies in memory: %s", error)
            return None

    def tick(self) -> None:
        """Say at once that the process has ended, also where no rank minds."""
        self.failure()

    def failure(self) -> FailureReport | None:
        """That the process has ended by itself; None while it lives. Its ranks leave by that."""
        if self._failure is None and self._place is not None and (end := self._process.end()):
            place = self._place
            why = f"the process that carries the ranks' agreement on {place.name} {end}"
            log.warning("%s", why)
            self._failure = FailureReport(
                place.first_rank, place.name, "signal", why, time=clock.now()
            )
        return self._failure

    def hand_over(self) -> str:
        """Leave the copies to the program that takes this one's place; "" where there are none."""
        return self._memory.hand_over() if self._memory is not None else ""

    def stop(self) -> None:
        """End the process. Harmless when repeated."""
        self._process.stop()
        if self._memory is not None:
            self._memory.stop()
        os.environ.pop(HPCTRAIN_CONTROL, None)


def addresses(master_addr: str, node: int) -> tuple[str, str]:
    """Return where this node's process listens, and how the nodes below it reach that."""
    if is_loopback(master_addr):
        local = "::1" if ":" in master_addr else "127.0.0.1"
        return local, local
    own = _own_address(master_addr)
    if node == 0 and is_loopback(own):  # its own name, as /etc/hosts of this node alone has it
        return EVERYWHERE, master_addr
    return own, own


def _own_address(master_addr: str) -> str:
    """From which this node speaks to node 0; nothing is sent to find it out."""
    family, kind, proto, _, target = socket.getaddrinfo(master_addr, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


class NodeMemory(ForkedServer):
    """This node's replica server, round after round; its memory lives as long as the agent.

    Attributes:
        to_peer: Each copy is on another node, too.
    """

    def __init__(self, secret: str, *, to_peer: bool = False, handed_over: str = "") -> None:
        """Fork the process while this one has one thread; `secret` is the same on all nodes.

        `handed_over` comes from the agent whose place this one takes, with its copies; "" for
        nothing.
        """
        what = "the process that keeps copies of the state"
        super().__init__(_serve_copies, what, handed_over, loses=", and copies in memory are lost")
        self.to_peer, self._secret = to_peer, secret
        self._node = 0

    def begin(
        self,
        place: TreePlace,
        folder: Path,
        store: SignedStore,
        key: Callable[[str], str],
        addresses: tuple[str, str],
        *,
        peers: Sequence[int] = (),
    ) -> None:
        """Serve a round of this node's ranks, which find the replica server in the folder.

        `addresses`: where the process listens, and how other nodes reach that. `peers`: see
        `NodeControl.begin`.
        """
        self._node, port = place.node, 0
        order: dict[str, Any] = {
            "folder": str(folder),
            "place": asdict(place),
            "secret": self._secret,
        }
        order |= {"about": key("memory"), "address": addresses[0], "peers": list(peers)}
        order |= {"shown": addresses[1] if self.to_peer else ""}
        try:
            port = self.ask_anew(lambda: {"begin": order})
        except ControlLost as error:
            log.warning("no copies in memory on %s: %s", place.name, error)
        if place.node == 0:
            store.set(key("memory"), [addresses[1], port])

    def meet(self, store: SignedStore, key: Callable[[str], str], timeout_s: float) -> None:
        """Connect to the replica server of node 0 before the ranks start.

        Raises:
            TimeoutError: node 0's agent has not published its address within `timeout_s`.
        """
        if self._node == 0:
            return
        address, port = store.wait(key("memory"), timeout_s)
        if not port:
            return  # nothing is settled then, and no copy is asked for
        try:
            self.join(address, port)
        except ControlLost as error:
            log.warning("no copies in memory: %s", error)


def _serve_copies() -> Callable[[dict[str, Any]], Awaitable[int]]:
    """In the process: numpy's threads would only be in the way of training."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    from hpctrain.node.memory.replica_server import ReplicaServer

    show_as("hpctrain-replica-server")
    with suppress(OSError):  # a refusal costs training a little speed
        os.nice(NICE)
    return ReplicaServer().do
