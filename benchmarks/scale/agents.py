"""Real points of many nodes: a thousand node processes of one machine, each with one rank.

What carries a node's control plane is real, as are the sockets between them; agents beside it are
not there (torch in each would need 200 GB), and the ranks are clients of this process, which sits
down, speaks and listens for all of them, one after another. A board is looked at once a second and
not twenty times: a thousand processes that look would take both cores.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hpctrain.node.control import node_server
from hpctrain.node.control.client import ControlClient
from tests.support.control_tree import ControlTree

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 300.0
ROUNDS = 10


@dataclass(frozen=True)
class Nodes:
    """What so many node processes have shown."""

    nodes: int
    begin_node_s: float
    """A node's process is told its place, makes its board and meets its parent: on average."""
    pss_bytes: int
    """Memory of a node's process, shared pages divided among those that share them: on average."""
    own_bytes: int
    """Of that, what only it has."""
    gather_s: float
    """A row of numbers of each rank to rank 0, said by one process for all: median."""
    last_s: float
    """Of that, from the last one's word on."""
    broadcast_s: float
    """From rank 0 to all, read by one process for all: median."""


def many_nodes(nodes: int) -> Nodes:
    """A round of one rank on each of so many nodes: begin, join, gather, broadcast."""
    with _looks_seldom(), _tree(nodes) as (tree, begin_s):
        clients = [ControlClient.take(tree.folder(rank), rank) for rank in range(nodes)]
        exchanges = [client.exchange(PATIENCE_S) for client in clients]
        rows: list[tuple[float, float, float]] = []
        for number in range(ROUNDS):
            began = time.perf_counter()
            pending = [exchange.send_to_0([1.0, float(number)]) for exchange in exchanges]
            said = time.perf_counter()
            assert len(pending[0].values()) == nodes
            came = time.perf_counter()
            exchanges[0].broadcast(number)
            assert all(exchange.broadcast(None) == number for exchange in exchanges[1:])
            rows.append((came - began, came - said, time.perf_counter() - came))
        pss, own = _memory([node.pid for node in tree.nodes])
        for client in clients:
            client.close()
        gather_s, last_s, broadcast_s = (median(column) for column in zip(*rows, strict=True))
        return Nodes(nodes, begin_s / nodes, pss, own, gather_s, last_s, broadcast_s)


@contextmanager
def _tree(nodes: int) -> Iterator[tuple[ControlTree, float]]:
    tree = ControlTree(nodes, 1)
    began = time.perf_counter()
    with tree:
        yield tree, time.perf_counter() - began


def _memory(pids: list[int]) -> tuple[int, int]:
    """Of a process on average: its share of all pages, and what it has for itself; bytes."""
    pss = own = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, *numbers = line.split()
            if name == "Pss:":
                pss += int(numbers[0]) << 10
            elif name in {"Private_Clean:", "Private_Dirty:"}:
                own += int(numbers[0]) << 10
    return pss // len(pids), own // len(pids)


@contextmanager
def _looks_seldom() -> Iterator[None]:
    before, node_server.LOOK_S = node_server.LOOK_S, 1.0
    try:
        yield
    finally:
        node_server.LOOK_S = before
