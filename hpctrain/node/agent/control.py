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
from functools import partial
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
from hpctrain.node.control.node_process import BEGIN_S, ForkedServer, NodeProcess, ServerSilent
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
        address, shown = addresses(self._master_addr, place.node)
        begin = {"secret": self._secret, "about": key("control"), "address": address}
        if self.failure() is not None:
            self._renew()
        self._place, self._failure = place, None
        try:
            port = self._process.begin(place, **begin)
        except ServerSilent as error:
            log.warning("%s; another one takes its place", error)
            self._renew()
            port = self._process.begin(place, **begin)
        if port:
            store.set(key(f"control/{place.node}"), [shown, port])
        if self._memory is not None:
            self._memory.begin(
                place, self._process.folder, store, key, (address, shown), peers=peers
            )
        os.environ[HPCTRAIN_CONTROL] = str(self._process.folder)

    def _renew(self) -> None:
        self._process.stop()
        self._process = NodeProcess()

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
            self._memory.join(store, key, timeout_s)

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


class NodeMemory:
    """This node's replica server, round after round; its memory lives as long as the agent.

    Attributes:
        to_peer: Each copy is on another node, too.
    """

    def __init__(self, secret: str, *, to_peer: bool = False, handed_over: str = "") -> None:
        """Fork the process while this one has one thread; `secret` is the same on all nodes.

        `handed_over` comes from the agent whose place this one takes, with its copies; "" for
        nothing.
        """
        self.to_peer = to_peer
        self._secret = secret
        self._process = ReplicaServerProcess(handed_over)
        self._place: TreePlace | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 once it has ended."""
        return self._process.pid

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
        self._place, port = place, 0
        begin = partial(
            self._begin,
            place,
            folder=folder,
            about=key("memory"),
            address=addresses[0],
            shown=addresses[1] if self.to_peer else "",
            peers=peers,
        )
        try:
            if self._process.end():
                self._renew(f"their process {self._process.end()}")
            try:
                port = begin()
            except ServerSilent as error:
                self._renew(str(error))
                port = begin()
        except ControlLost as error:
            log.warning("no copies in memory on %s: %s", place.name, error)
        if place.node == 0:
            store.set(key("memory"), [addresses[1], port])

    def _begin(self, place: TreePlace, **round_: Any) -> int:
        return self._process.begin(place, secret=self._secret, **round_)

    def _renew(self, why: str) -> None:
        log.warning("copies in memory are lost: %s", why)
        self._process.stop()
        self._process = ReplicaServerProcess()

    def join(self, store: SignedStore, key: Callable[[str], str], timeout_s: float) -> None:
        """Connect to the replica server of node 0 before the ranks start.

        Raises:
            TimeoutError: node 0's agent has not published its address within `timeout_s`.
        """
        if self._place is None or self._place.node == 0:
            return
        address, port = store.wait(key("memory"), timeout_s)
        if not port:
            return  # nothing is settled then, and no copy is asked for
        try:
            self._process.join(address, port)
        except ControlLost as error:
            log.warning("no copies in memory: %s", error)

    def hand_over(self) -> str:
        """Leave the process and its copies to the program that takes this one's place."""
        return self._process.hand_over()

    def stop(self) -> None:
        """End the process. Harmless when repeated."""
        self._process.stop()


class ReplicaServerProcess(ForkedServer):
    """The agent's side: tells the replica server of each round."""

    def __init__(self, handed_over: str = "") -> None:
        """Fork it, with nothing kept, or take over one that is there; see `ForkedServer`."""
        super().__init__(_serve_copies, "the process that keeps copies of the state", handed_over)

    def begin(
        self,
        place: TreePlace,
        *,
        folder: Path,
        secret: str,
        about: str,
        address: str,
        shown: str = "",
        peers: Sequence[int] = (),
    ) -> int:
        """Serve a new round of ranks, end the one before; return node 0's port for others, else 0.

        All nodes give the same `secret`, the attempt's, and the same `about`, which names the
        round. Only the user can enter `folder`. Other nodes' replica servers are awaited at
        `address`; they reach it as `shown`, "" if no copies continue to another node. On node 0,
        `peers` gives by place the node that has each one's copies; () for the next one.

        Raises:
            ServerSilent: the process does not answer, or is gone.
            ControlLost: it cannot be served.
        """
        order: dict[str, Any] = {"folder": str(folder), "place": asdict(place), "secret": secret}
        order |= {"about": about, "address": address, "shown": shown, "peers": list(peers)}
        return self.ask({"begin": order}, BEGIN_S)

    def join(self, address: str, port: int) -> None:
        """Have it go to the replica server of node 0; not on node 0.

        Raises:
            ControlLost: that replica server cannot be reached, is another, or the process is gone.
        """
        self.ask({"join": [address, port]})


def _serve_copies() -> Callable[[dict[str, Any]], Awaitable[int]]:
    """In the process: numpy's threads would only be in the way of training."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    from hpctrain.node.memory.replica_server import ReplicaServer

    show_as("hpctrain-replica-server")
    with suppress(OSError):  # a refusal costs training a little speed
        os.nice(NICE)
    return ReplicaServer().do
