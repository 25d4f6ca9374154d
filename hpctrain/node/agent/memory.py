"""The agent's part in copies of the state: it starts the replica server and reports each round.

Where it cannot serve a round, the ranks make no copies in it, and train on.
tests/engines/test_memory.py holds the promises.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ControlLost
from hpctrain.node.control.forked import ServerSilent
from hpctrain.node.memory.replica_server_process import ReplicaServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpctrain.node.agent.rendezvous import SignedStore
    from hpctrain.node.control.node_server import TreePlace

log = logging.getLogger("hpctrain.agent")


class NodeMemory:
    """This node's replica server, round after round; its memory lives as long as the agent.

    Attributes:
        to_buddy: Each copy is on another node, too.
    """

    def __init__(self, secret: str, *, to_buddy: bool = False, handed_over: str = "") -> None:
        """Fork the process while this one has one thread; `secret` is the same on all nodes.

        `handed_over` comes from the agent whose place this one takes, with its copies; "" for
        nothing.
        """
        self.to_buddy = to_buddy
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
        buddies: Sequence[int] = (),
    ) -> None:
        """Serve a round of this node's ranks, which find the replica server in the folder.

        `addresses`: where the process listens, and how other nodes reach that. `buddies`: see
        `NodeControl.begin`.
        """
        self._place, port = place, 0
        begin = partial(
            self._begin,
            place,
            folder=folder,
            about=key("memory"),
            address=addresses[0],
            shown=addresses[1] if self.to_buddy else "",
            buddies=buddies,
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
