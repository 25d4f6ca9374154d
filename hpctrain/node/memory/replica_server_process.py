"""The process that keeps a node's copies, as the node's agent handles it.

tests/unit/memory/test_replica_server_process.py holds the promises.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.process import show_as
from hpctrain.node.control.node_process import BEGIN_S, ForkedServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from hpctrain.node.control.node_server import TreePlace

NICE = 10
"""How much it steps back behind training."""


class ReplicaServerProcess(ForkedServer):
    """The agent's side: tells the replica server of each round."""

    def __init__(self, handed_over: str = "") -> None:
        """Fork it, with nothing kept, or take over one that is there; see `ForkedServer`."""
        super().__init__(_make, "the process that keeps copies of the state", handed_over)

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
        `address`; they reach it as `shown`, "" if no copies go on to another node. On node 0,
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


def _make() -> Callable[[dict[str, Any]], Awaitable[int]]:
    """In the process: numpy's threads would only be in the way of training."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    from hpctrain.node.memory.replica_server import ReplicaServer

    show_as("hpctrain-replica-server")
    with suppress(OSError):  # a refusal costs training a little speed
        os.nice(NICE)
    return ReplicaServer().do
