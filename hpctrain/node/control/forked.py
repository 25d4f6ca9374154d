"""A process beside an agent that does what it is told over a line, as the agent handles it.

It is forked from the agent, while that has one thread, and ends with it. What it does is a
coroutine's: an order comes as a line of JSON and is answered by one.
tests/unit/control/test_node_process.py and tests/unit/memory/test_replica_server_process.py hold
the promises.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from hpctrain.core.base.process import ForkedProcess, die_with_parent
from hpctrain.errors import ControlLost

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    Do = Callable[[dict[str, Any]], Awaitable[int]]

ANSWER_S = 60.0
"""Time the process may take for an order."""
BEGIN_S = 20.0
"""How long it may take to begin a round. After that the agent replaces it: it may be stopped."""
_LINE_BYTES = 1 << 20


class ServerSilent(ControlLost):
    """The process did not answer in time, or is gone."""


class ForkedServer(ForkedProcess):
    """The agent's side."""

    def __init__(self, make: Callable[[], Do], what: str, handed_over: str = "") -> None:
        """Fork it, or take over one that is there; to fork, this process must have one thread.

        `make` is called in the forked process, with its event loop running. It returns what does an
        order and answers with a number. `handed_over` is what `hand_over` gave; "" to fork.
        """
        self._what = what
        self._ended = ""
        if handed_over:
            pid, line = map(int, handed_over.split(":"))
            self.adopt(pid, line)
        else:
            super().__init__(partial(_serve_until_killed, make))

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


def _serve_until_killed(make: Callable[[], Do], line: socket.socket, parent: int) -> NoReturn:
    """The forked process: never comes back into its parent's code."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for signum in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGHUP,
        ):
            signal.signal(signum, signal.SIG_IGN)  # SLURM's reach every process of the step
        die_with_parent(parent)
        asyncio.run(_serve(line, make))
    except BaseException:  # noqa: BLE001 - the agent and the ranks see that it is gone, not why
        traceback.print_exc()
    finally:
        os._exit(1)


async def _serve(line: socket.socket, make: Callable[[], Do]) -> None:
    do = make()
    reader, writer = await asyncio.open_connection(sock=line, limit=_LINE_BYTES)
    while order := await reader.readline():
        try:
            answer: dict[str, Any] = {"port": await do(json.loads(order))}
        except (OSError, TimeoutError, ControlLost) as error:
            answer = {"error": str(error) or type(error).__name__}
        writer.write(json.dumps(answer).encode() + b"\n")
