"""The process that serves torch's TCPStore, in which the agents and the ranks of a job meet.

torch's server looks up the name of everyone who connects, in a thread. A rank forked from the
serving process during such a lookup inherits glibc's resolver lock as taken, and waits for ever in
its own first connect. So the agent serves nothing: it forks this process while it has one thread,
and is a client afterwards, which needs no thread. tests/engines/test_store_process.py holds that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from typing import Any, NoReturn

from hpctrain.core.base.listener import is_loopback, listen
from hpctrain.core.base.process import ForkedProcess, die_with_parent, show_as
from hpctrain.errors import ClusterError
from hpctrain.node.agent import signals

SERVE_S = 20.0
"""How long the process may take to serve a store. After that the agent replaces it."""
KEPT = 2
"""Stores that are served at once: others may still be reading the last round's verdict."""


class StoreProcess(ForkedProcess):
    """Serves one store after another, until `stop` or the end of the process that made it.

    Make it while this process has one thread and has imported torch, whose pages it then shares.
    """

    def __init__(self) -> None:
        """Fork it; nothing is served yet."""
        super().__init__(_serve_until_killed)

    def serve(self, address: str, port: int) -> None:
        """Serve an empty store on a port; the store before the last one ends.

        Clients reach this node under `address`; with the loopback nobody else can connect. If the
        process was killed or stopped, another is forked: between rounds that is as safe as forking
        ranks.

        Raises:
            ClusterError: the port is taken, or the process is gone at once.
        """
        if not (answer := self._asked(address, port)):
            self.stop()
            super().__init__(_serve_until_killed)
            answer = self._asked(address, port)
        if answer != "served":
            raise ClusterError(
                f"the ranks cannot meet on port {port} of {socket.gethostname()}: "
                f"{answer or 'the process that serves them is gone'}; start the run again"
            )

    def _asked(self, address: str, port: int) -> str:
        """What the process says to an order; "" where it is gone, or stopped."""
        self._line.settimeout(SERVE_S)
        with suppress(ConnectionError, TimeoutError):
            self._line.sendall(json.dumps([address, port]).encode() + b"\n")
            return self._line.recv(1 << 16).decode()
        return ""


def _serve_until_killed(line: socket.socket, parent: int) -> NoReturn:
    """The forked process: never comes back into its parent's code."""
    try:
        signals.ignore_all()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(parent)
        show_as("hpctrain-store")
        stores: list[Any] = []
        with line.makefile("r") as orders:
            for order in orders:
                try:
                    stores = [*stores[1 - KEPT :], _store(*json.loads(order))]
                    answer = "served"
                except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
                    answer = str(error) or type(error).__name__
                line.sendall(answer.encode())
    finally:
        os._exit(0)


def _store(address: str, port: int) -> Any:
    from torch._C._distributed_c10d import TCPStore

    # torch would listen on all of the machine's addresses.
    host = address if is_loopback(address) else ""
    listening = listen(address, port)
    return TCPStore(
        host or "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
