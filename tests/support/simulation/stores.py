"""Torch's stores, of a simulated job: what agents use of them, and what goes wrong there."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ClusterError
from hpctrain.node.agent.rendezvous import ANSWER_S
from tests.support.simulation.kernel import Bell

if TYPE_CHECKING:
    from tests.support.simulation.job import Job, Node

KEPT = 2
"""As `hpctrain.node.agent.rendezvous.KEPT`."""


class StoreServer:
    """What a store's process holds.

    Attributes:
        words: By key.
        changed: Rings at every change.
        is_up: Else its machine says that nobody is there.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.words: dict[str, bytes] = {}
        self.changed = Bell()
        self.is_up = True
        self.is_stopped = False

    def end(self, job: Job) -> None:
        """Its process has ended."""
        self.is_up = False
        job.simulation.ring(self.changed)


class StoreProcess:
    """As `hpctrain.node.agent.rendezvous.StoreProcess`: ends with the agent that made it."""

    def __init__(self, job: Job) -> None:
        self.pid = 1
        self._job, self._node = job, job.here()
        self._served: list[StoreServer] = []
        self._node.children.append(self.stop)

    def serve(self, address: str, port: int) -> None:
        """Serve an empty store; the one before the last ends."""
        del address
        there = self._job.ports.get(port)
        if there is not None and there.is_up:
            raise ClusterError(f"port {port} is taken")
        server = self._job.ports[port] = StoreServer(self._node)
        for old in self._served[: 1 - KEPT or None]:
            old.end(self._job)
        self._served = [*self._served[1 - KEPT :], server]
        self._job.simulation.ring(self._job.served)

    def stop(self) -> None:
        """End all."""
        for server in self._served:
            server.end(self._job)


class Store:
    """A client of one; as torch's TCPStore."""

    def __init__(
        self, job: Job, address: str, port: int, timeout: timedelta = timedelta(seconds=300)
    ) -> None:
        del address
        self._job, self._node = job, job.here()
        self._timeout_s = timeout.total_seconds()
        self._is_cut, self._cut = False, Bell()
        simulation, until_s = job.simulation, job.simulation.now_s + self._timeout_s
        while True:
            simulation.sleep(simulation.random.expovariate(1 / job.network.delay_s))
            server = job.ports.get(port)
            if server is not None and server.is_up and self._is_reached(server):
                break
            if simulation.now_s >= until_s:
                raise RuntimeError(f"no store at port {port}")
            waits = (job.served, job.network.changed)
            simulation.wait(waits, min(1.0, until_s - simulation.now_s))
        self._server = server
        self._node.connections.append(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Of later calls."""
        self._timeout_s = timeout.total_seconds()

    def cut(self) -> None:
        """What `shutdown` of its socket does."""
        self._is_cut = True
        self._job.simulation.ring(self._cut)

    def set(self, key: str, value: str | bytes) -> None:
        """As torch's; so below."""
        self._ask()
        self._server.words[key] = value.encode() if isinstance(value, str) else value
        self._job.simulation.ring(self._server.changed)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=self._timeout_s))
        return self._server.words[key]

    def check(self, keys: list[str]) -> bool:
        self._ask()
        return all(key in self._server.words for key in keys)

    def add(self, key: str, more: int) -> int:
        self._ask()
        count = int(self._server.words.get(key, b"0")) + more
        if more or key not in self._server.words:
            self._server.words[key] = str(count).encode()
            self._job.simulation.ring(self._server.changed)
        return count

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        simulation = self._job.simulation
        until_s = simulation.now_s + timeout.total_seconds()
        while True:
            self._ask()
            if all(key in self._server.words for key in keys):
                return
            if simulation.now_s >= until_s:
                raise RuntimeError("wait timeout")
            left_s = until_s - simulation.now_s
            simulation.wait((self._server.changed, self._cut), min(left_s, 5.0))

    def _ask(self) -> None:
        """A question to the server goes out; returns as it answers.

        Raises:
            RuntimeError: as torch does, the connection has ended.
        """
        simulation = self._job.simulation
        simulation.may_switch(self._job.switch_share)
        until_s = simulation.now_s + ANSWER_S
        while not self._is_cut and not self._is_reached(self._server):
            if simulation.now_s >= until_s:
                raise RuntimeError("Socket Timeout")
            waits = (self._cut, self._server.changed, self._job.network.changed)
            simulation.wait(waits, 0.5)
        if self._is_cut or not self._server.is_up:
            raise RuntimeError("Broken pipe")
        if self._server.is_stopped:
            simulation.wait((self._cut,), ANSWER_S)
            raise RuntimeError("Socket Timeout")

    def _is_reached(self, server: StoreServer) -> bool:
        return self._job.network.reaches(self._node.machine, server.node.machine)


class PrefixStore:
    """As torch's."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._of = prefix, store

    def set(self, key: str, value: str | bytes) -> None:
        """As torch's; so below."""
        self._of.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        got: bytes = self._of.get(f"{self._prefix}/{key}")
        return got

    def check(self, keys: list[str]) -> bool:
        return bool(self._of.check([f"{self._prefix}/{key}" for key in keys]))

    def add(self, key: str, more: int) -> int:
        return int(self._of.add(f"{self._prefix}/{key}", more))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._of.wait([f"{self._prefix}/{key}" for key in keys], timeout)
