"""The processes of the nodes of a local job, by what they are for."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.scheduler import local as client
from tests.support import processes

NAMES = {
    "hpctrain-contro": "control",
    "hpctrain-replic": "replica server",
    "hpctrain-store": "store",
    "hpctrain-livene": "liveness",
    "hpctrain-writer": "writer",
}
"""The kernel's name of a process, of 15 bytes, to what it is."""
KINDS = ("agent", "rank", *NAMES.values())


@dataclass(frozen=True)
class NodeProcess:
    """A process of a node.

    Attributes:
        kind: One of KINDS.
        node: The number of its node.
        pid: Its id.
    """

    kind: str
    node: int
    pid: int

    def signal(self, signum: int) -> bool:
        """Send it a signal; whether it was there."""
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True

    def freeze(self) -> bool:
        """Stop it; whether it was there."""
        return self.signal(signal.SIGSTOP)


def of_job(job_id: str) -> list[NodeProcess]:
    """Those that live, in the order of their nodes."""
    record = client.read(job_id)
    if record is None or not record.controller_pid:
        return []
    parents = processes.parents()
    own = [pid for pid, parent in parents.items() if parent == record.controller_pid]
    agents = {pid: node for pid in own if (node := _node_of(pid)) is not None}
    found = [NodeProcess("agent", node, pid) for pid, node in agents.items()]
    ranks: dict[int, int] = {}
    for pid, parent in parents.items():
        if parent not in agents or not (name := _name(pid)):
            continue
        kind = NAMES.get(name, "rank" if _is_rank(pid) else "")
        if kind == "rank":
            ranks[pid] = agents[parent]
        if kind:
            found.append(NodeProcess(kind, agents[parent], pid))
    for pid, parent in parents.items():
        if parent in ranks and kind_of(pid) == "writer":
            found.append(NodeProcess("writer", ranks[parent], pid))
    return sorted(found, key=lambda one: (one.node, KINDS.index(one.kind), one.pid))


def pick(job_id: str, kind: str, node: int = 0) -> NodeProcess:
    """The first process of a kind on a node."""
    return next(one for one in of_job(job_id) if (one.kind, one.node) == (kind, node))


def child(agent: int, kind: str) -> int:
    """The process of a kind that an agent has forked, by their ids."""
    parents = processes.parents()
    own = [pid for pid, parent in parents.items() if parent == agent]
    return next(pid for pid in own if kind_of(pid) == kind)


def kind_of(pid: int) -> str:
    """What a process is for, by its name; "" for an agent, a rank or another's."""
    return NAMES.get(_name(pid), "")


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:  # it has ended
        return ""


def _node_of(pid: int) -> int | None:
    """The number of a forked agent's node, which is in its name."""
    number = _name(pid).removeprefix("hpctrain local")
    return int(number) if number.isdigit() else None


def _is_rank(pid: int) -> bool:
    return any("/rank-" in path and path.endswith(".log") for path in processes.open_files(pid))
