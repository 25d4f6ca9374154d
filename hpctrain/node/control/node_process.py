"""The process of a node that carries the control plane, as the node's agent handles it.

It is forked from the agent, while that has one thread, and serves one round of ranks after another
(`node_server.py`), as it is told over a line. It ends with the agent. The agent itself could not do
it: it waits in torch's and the scheduler's calls, and ranks would wait with it.
tests/unit/control/test_node_process.py holds the promises.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.locks import MEMORY, NodeFolder
from hpctrain.core.base.process import show_as
from hpctrain.errors import ControlLost
from hpctrain.node.control.forked import BEGIN_S, ForkedServer
from hpctrain.node.control.node_server import NodeServer, TreePlace

if TYPE_CHECKING:
    from typing import Self

    from hpctrain.node.control.forked import Do


class NodeProcess(ForkedServer):
    """The agent's side: tells the process what to serve.

    Attributes:
        folder: Of the newest round: `HPCTRAIN_CONTROL` of its ranks.
        pid: Of the process; 0 after `stop`.
    """

    def __init__(self) -> None:
        """Fork it; nothing is served yet. To be made while this process has one thread."""
        super().__init__(_make, "the process that carries the ranks' agreement")
        self.folder = Path()
        self._own: NodeFolder | None = None

    def begin(self, place: TreePlace, *, secret: str, about: str, address: str) -> int:
        """Serve a new round of ranks, end the one before; return the port for children, 0 for none.

        All nodes give the same `secret`, the attempt's, and the same `about`, which names the
        round. The children reach this node at `address`.

        Raises:
            ServerSilent: the process does not answer, or is gone.
            ControlLost: it cannot be served.
        """
        self._remove_folder()
        parent = MEMORY if os.access(MEMORY, os.W_OK) else None
        try:
            self._own = NodeFolder("control", parent or Path(tempfile.gettempdir()))
        except OSError as error:
            raise ControlLost(f"no folder for the ranks' agreement: {error}") from error
        self.folder = self._own.path
        order = {"folder": str(self.folder), "place": asdict(place), "secret": secret}
        return self.ask({"begin": {**order, "about": about, "address": address}}, BEGIN_S)

    def join(self, address: str, port: int) -> None:
        """Connect it to the parent, at the port that the parent's `begin` returned; not on node 0.

        Raises:
            ControlLost: the parent cannot be reached, is another, or the process is gone.
        """
        self.ask({"join": [address, port]})

    def fail(self, why: str) -> None:
        """Tell all ranks, on all nodes, that the round has failed.

        Raises:
            ControlLost: the process is gone.
        """
        self.ask({"fail": why})

    def stop(self) -> None:
        """End it. Harmless when repeated."""
        super().stop()
        self._remove_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _remove_folder(self) -> None:
        if self._own is not None:
            self._own.remove()
            self._own, self.folder = None, Path()


def _make() -> Do:
    show_as("hpctrain-control")
    return _Rounds().do


class _Rounds:
    """What the process does: one round after another."""

    def __init__(self) -> None:
        self._server: NodeServer | None = None

    async def do(self, order: dict[str, Any]) -> int:
        """An order; the port where children are awaited, for one to begin."""
        if begin := order.get("begin"):
            return await self._begin(**begin)
        if self._server is None:
            raise ControlLost("no round was begun")
        if join := order.get("join"):
            await self._server.join(*join)
        if why := order.get("fail"):
            self._server.fail(why)
        return 0

    async def _begin(
        self, folder: str, place: dict[str, Any], *, secret: str, about: str, address: str
    ) -> int:
        if self._server is not None:
            self._server.close()
            self._server = None
        server = NodeServer(Path(folder), TreePlace(**place), secret=secret, about=about)
        self._server = server
        return await server.start(address)
