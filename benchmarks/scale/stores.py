"""Real points of the rendezvous: agents' side of it, two thousand times, at one store of torch's.

The clients are the agents' own class in a few processes, one after another in each: an agent is
200 MB of torch. So their connections are all there at once, and their calls come eight at a time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PROCESSES = 8
ADDRESS = "127.0.0.1"
TIMEOUT_S = 300
ASK_S = 3.0
ROLE, RANKS = "torchelastic/role_info/", "torchelastic/assigned_ranks/"


@dataclass(frozen=True)
class Meeting:
    """What so many agents at one store have shown."""

    agents: int
    meet_s: float
    """From the open port to node 0's knowing that all are there."""
    ranks_s: float
    """Then until all know their ranks, as torch's agents tell each other."""
    server_cpu_s: float
    """Of the store's process, for both."""
    asks_per_s: float
    """Then: looks for news that is not there, as all agents do ten times a second; in all."""
    ask_cpu_s: float
    """Of the store's process, for each."""


def meeting(agents: int) -> Meeting:
    """So many agents meet, learn their ranks, and ask for news."""
    import hpctrain.node.agent.rendezvous  # noqa: F401 - with torch, which all forks then share

    port = _free_port()
    with _Clients(agents, port) as clients:
        here = _agent(0, agents, port)
        try:
            server = here._server.pid  # noqa: SLF001 - the agent itself needs no name for it
            began = time.monotonic()
            clients.go()
            store = here.next_rendezvous().store
            met = time.monotonic()
            _give_ranks(store, agents)
            clients.wait()
            told, cpu = time.monotonic(), _cpu_s(server)
            clients.go()
            asked, took_s = clients.wait(), time.monotonic() - told
            return Meeting(
                agents,
                met - began,
                told - met,
                cpu,
                asked / took_s,
                (_cpu_s(server) - cpu) / asked,
            )
        finally:
            here.close()


def _agent(number: int, agents: int, port: int) -> Any:
    from hpctrain.node.agent.rendezvous import Rendezvous

    names = [f"n{node}" for node in range(agents)]
    return Rendezvous(ADDRESS, port, number, names, run_id="scale", timeout_s=TIMEOUT_S)


def _give_ranks(store: Any, agents: int) -> None:
    """Node 0's part of `SimpleElasticAgent._assign_worker_ranks`."""
    store.set(f"{ROLE}0", _role(0))
    said = [json.loads(one) for one in store.multi_get([f"{ROLE}{n}" for n in range(agents)])]
    values = [json.dumps([8 * n, 8 * len(said), 8 * n, 8 * len(said)]) for n in range(agents)]
    store.multi_set([f"{RANKS}{n}" for n in range(agents)], values)


def _role(number: int) -> str:
    return json.dumps({"role": "default", "rank": number, "local_world_size": 8})


class _Clients:
    """Processes that are the other agents; each begins its parts as it is told."""

    def __init__(self, agents: int, port: int) -> None:
        self._agents, self._port = agents, port

    def __enter__(self) -> Self:
        self._lines, self._pids = [], []
        for number in range(PROCESSES):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                try:
                    mine = range(1 + number, self._agents, PROCESSES)
                    _be_agents(theirs, mine, self._agents, self._port)
                finally:
                    os._exit(0)
            theirs.close()
            self._lines.append(ours)
            self._pids.append(pid)
        return self

    def go(self) -> None:
        for line in self._lines:
            line.sendall(b"go")

    def wait(self) -> int:
        """The sum of what they say."""
        return sum(int(line.recv(64)) for line in self._lines)

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_agents(line: socket.socket, mine: range, agents: int, port: int) -> None:
    line.recv(2)
    _wait_for_port(port)
    stores = []
    for number in mine:
        stores.append(_agent(number, agents, port).next_rendezvous().store)
        stores[-1].set(f"{ROLE}{number}", _role(number))
    for number, store in zip(mine, stores, strict=True):
        assert json.loads(store.get(f"{RANKS}{number}"))[0] == 8 * number
    line.sendall(b"0")
    line.recv(2)
    asked, until_s = 0, time.monotonic() + ASK_S
    while time.monotonic() < until_s:
        for store in stores:
            store.check(["news/0"])
        asked += len(stores)
    line.sendall(str(asked).encode())
    line.recv(2)


def _wait_for_port(port: int) -> None:
    while True:
        with suppress(OSError), socket.create_connection((ADDRESS, port)):
            return
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((ADDRESS, 0))
        return int(free.getsockname()[1])


def _cpu_s(pid: int) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
