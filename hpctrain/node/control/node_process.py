"""The process of a node that carries the control plane, as the node's agent handles it.

The agent itself could not do it: it waits in torch's and the scheduler's calls, and ranks would
wait with it. tests/unit/control/test_node_process.py holds the promises.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.locks import MEMORY, NodeFolder
from hpctrain.core.base.process import ForkedProcess, show_as
from hpctrain.errors import ControlLost
from hpctrain.node.control.node_server import NodeServer, TreePlace

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    Do = Callable[[dict[str, Any]], Awaitable[int]]


log = logging.getLogger("hpctrain.agent")

ANSWER_S = 60.0
"""Time the process may take for an order."""
BEGIN_S = 20.0
"""How long it may take to begin a round. After that the agent replaces it: it may be stopped."""
_LINE_BYTES = 1 << 20


class ServerSilent(ControlLost):
    """The process did not answer in time, or is gone."""


class ForkedServer(ForkedProcess):
    """The agent's side of a process that serves one round of ranks after another."""

    def __init__(
        self, make: Callable[[], Do], what: str, handed_over: str = "", *, loses: str = ""
    ) -> None:
        """Fork it, or take over one that is there; to fork, this process must have one thread.

        `make` is called in the forked process, with its event loop running. It returns what does an
        order and answers with a number. `handed_over` is what `hand_over` gave; "" to fork. What is
        lost with it is named by `loses`.
        """
        self._make, self._what, self._loses = make, what, loses
        self._ended = ""
        if handed_over:
            pid, line = map(int, handed_over.split(":"))
            self.adopt(pid, line)
        else:
            self._fork()

    def _fork(self) -> None:
        self._ended = ""
        super().__init__(partial(_serve_orders, self._make))

    def hand_over(self) -> str:
        """Leave the process to the program that takes this one's place (exec), as its child.

        Return what that makes its own `ForkedServer` of; "" if the process has ended.
        """
        if self.end():
            return ""
        pid, self.pid = self.pid, 0
        line = self._line.detach()
        os.set_inheritable(line, True)  # noqa: FBT003 - its own order
        return f"{pid}:{line}"

    def ask(self, order: dict[str, Any], answer_s: float | None = None) -> int:
        """Have it do an order within `answer_s` (None: `ANSWER_S`); return its answer.

        A late answer would be taken for the answer to the next order: stop it then.

        Raises:
            ServerSilent: it did not answer, or is gone.
            ControlLost: it could not.
        """
        answer, answer_s = b"", ANSWER_S if answer_s is None else answer_s
        self._line.settimeout(answer_s)
        try:
            self._line.sendall(json.dumps(order).encode() + b"\n")
            while not answer.endswith(b"\n"):
                piece = self._line.recv(_LINE_BYTES)
                if not piece:
                    raise ConnectionResetError("it is gone")
                answer += piece
        except TimeoutError:
            raise ServerSilent(f"{self._what} did not answer for {answer_s:g} s") from None
        except OSError as error:
            raise ServerSilent(f"{self._what}: {error}") from error
        said = json.loads(answer)
        if said.get("error"):
            raise ControlLost(said["error"])
        return int(said.get("port", 0))

    def ask_anew(self, order: Callable[[], dict[str, Any]]) -> int:
        """Have it begin to serve a round, within `BEGIN_S`; return its answer.

        If it is stopped or gone, another one takes its place, once. That may be forked between
        rounds only, as ranks are. `order` makes the order, for each of them anew.

        Raises:
            ServerSilent: the other one did not answer either.
            ControlLost: it could not.
        """
        try:
            return self.ask(order(), BEGIN_S)
        except ServerSilent as error:
            log.warning("%s; another one takes its place%s", error, self._loses)
            self.stop()
            self._fork()
            return self.ask(order(), BEGIN_S)

    def join(self, address: str, port: int) -> None:
        """Connect it to the node above, at the port that `begin` returned there; not on node 0.

        Raises:
            ControlLost: the node above cannot be reached, is another, or the process is gone.
        """
        self.ask({"join": [address, port]})

    def end(self) -> str:
        """How the process has ended by itself, in words; "" while it has not."""
        if self.pid > 0 and not self._ended:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
                self._ended = killed or f"ended with exit code {code}"
                self._is_reaped = True
        return self._ended


def _serve_orders(make: Callable[[], Do], line: socket.socket, _: int) -> None:
    asyncio.run(_serve(line, make))


async def _serve(line: socket.socket, make: Callable[[], Do]) -> None:
    do = make()
    reader, writer = await asyncio.open_connection(sock=line, limit=_LINE_BYTES)
    while order := await reader.readline():
        try:
            answer: dict[str, Any] = {"port": await do(json.loads(order))}
        except (OSError, TimeoutError, ControlLost) as error:
            answer = {"error": str(error) or type(error).__name__}
        writer.write(json.dumps(answer).encode() + b"\n")


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
            ControlLost: it cannot be served.
        """
        said = {"place": asdict(place), "secret": secret, "about": about, "address": address}
        return self.ask_anew(lambda: {"begin": {"folder": str(self._new_folder()), **said}})

    def _new_folder(self) -> Path:
        self._remove_folder()
        parent = MEMORY if os.access(MEMORY, os.W_OK) else None
        try:
            self._own = NodeFolder("control", parent or Path(tempfile.gettempdir()))
        except OSError as error:
            raise ControlLost(f"no folder for the ranks' agreement: {error}") from error
        self.folder = self._own.path
        return self.folder

    def stop(self) -> None:
        """End it. Harmless when repeated."""
        super().stop()
        self._remove_folder()

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
