"""Replica servers of a few nodes in this process, each with an event loop on a thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.format.shard import ShardPiece, file_name, header
from hpctrain.node.agent.control import NodeMemory
from hpctrain.node.control.node_server import TreePlace
from hpctrain.node.memory.copy_plan import CopyPlan, part_facts
from hpctrain.node.memory.replica_client import ReplicaClient
from hpctrain.node.memory.replica_server import ReplicaServer
from tests.support import patience
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from hpctrain.node.memory.slots import Mark

BLOCK_BYTES = 1024
ROOM = 8000
"""Bytes that each rank asks for a copy."""


class ReplicaServers:
    """Of some nodes with some ranks each; a new round with `begin`."""

    def __init__(self, root: Path, nodes: int, ranks: int, *, to_peer: bool = False) -> None:
        self.root, self.nodes, self.ranks = root, nodes, ranks
        self.to_peer = to_peer
        self.peers: tuple[int, ...] = ()
        self.round = 0
        self.lines: list[ReplicaClient] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.replica_servers = [self._make() for _ in range(nodes)]

    def begin(self, secrets: list[str] | None = None) -> list[ReplicaClient]:
        """Start a round; the lines of all its ranks."""
        self.close_lines()
        self.round += 1
        port = 0
        for node, replica_server in enumerate(self.replica_servers):
            folder = self.folder(node)
            folder.mkdir(parents=True)
            all_ranks = self.nodes * self.ranks
            place = TreePlace(
                node, self.nodes, node * self.ranks, self.ranks, all_ranks, f"n{node}"
            )
            order = {"folder": str(folder), "place": asdict(place), "address": "127.0.0.1"}
            secret = secrets[node] if secrets else "secret"
            order |= {"secret": secret, "about": f"round {self.round}"}
            order |= {"shown": "127.0.0.1" if self.to_peer else ""}
            order |= {"peers": self.peers if node == 0 else ()}  # it tells the others
            port = self._do(replica_server, {"begin": order}) or port
        for replica_server in self.replica_servers[1:]:
            self._do(replica_server, {"join": ["127.0.0.1", port]})
        self.lines = [
            ReplicaClient(self.folder(rank // self.ranks), rank, self.round)
            for rank in range(self.nodes * self.ranks)
        ]
        return self.lines

    def lose(self, node: int) -> None:
        """Lose a node with its replica server; those behind it move up, and a spare comes last."""
        self._end(self.replica_servers.pop(node))
        self.replica_servers.append(self._make())

    def folder(self, node: int) -> Path:
        return self.root / f"{self.round}-{node}"

    def close_lines(self) -> None:
        for line in self.lines:
            line.close()
        self.lines = []

    def close(self) -> None:
        self.close_lines()
        for replica_server in self.replica_servers:
            self._end(replica_server)
        self._on_loop(_all_ended())  # else each test leaves its connections open
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()

    def _make(self) -> Any:
        return self._on_loop(_made())

    def _do(self, replica_server: Any, order: dict[str, Any]) -> int:
        return int(self._on_loop(replica_server.do(order)))

    def _end(self, replica_server: Any) -> None:
        self._on_loop(_closed(replica_server))

    def _on_loop(self, work: Any) -> Any:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return done.result(PATIENCE_S)


async def _all_ended() -> None:
    """Cancel what still runs on this loop, and let connections close."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)


class ReplicaServerProcesses(ReplicaServers):
    """The same, each in a process of its own, which can be killed."""

    def _make(self) -> NodeMemory:
        return NodeMemory("secret")

    def _do(self, replica_server: NodeMemory, order: dict[str, Any]) -> int:
        return replica_server.ask(order)

    def _end(self, replica_server: NodeMemory) -> None:
        replica_server.stop()


async def _closed(replica_server: ReplicaServer) -> None:
    if replica_server._round is not None:
        replica_server._round.close()
    await asyncio.sleep(0.01)  # its connections end in the loop's next turns
    # Memory that ends with a replica server's process, and hundreds of tests are in this one.
    replica_server._copies.keep_only(None)
    for rank_memory in replica_server._copies._rank_memories():
        rank_memory.close()


async def _made() -> ReplicaServer:
    return ReplicaServer()


def pieces_of(rank: int, world: int, nbytes: int = 5000) -> list[ShardPiece]:
    """A rank's part of a tensor that all ranks share evenly, and one of its own."""
    count = nbytes // 4
    return [
        ShardPiece("model.w", "F32", (world * count,), (rank * count,), (count,)),
        ShardPiece(f"rng.rank-{rank:05d}.torch", "U8", (16,), (0,), (16,)),
    ]


def plan_of(rank: int, world: int, facts: dict[str, Any] | None = None) -> tuple[CopyPlan, bytes]:
    """How a rank's copy lies in its slot, and its header."""
    pieces = pieces_of(rank, world)
    head = header(pieces, file_name(rank), BLOCK_BYTES)
    told = {"part": part_facts(pieces, rank), **(facts or {})}
    sizes = tuple(piece.nbytes for piece in pieces)
    return CopyPlan(world, rank, len(head), sizes, BLOCK_BYTES, told), head


def values_of(step: int, rank: int, nbytes: int) -> bytes:
    """What a rank has at a step."""
    return np.random.default_rng([step, rank]).bytes(nbytes)


def write_copy(
    line: ReplicaClient, step: int, rank: int, world: int, facts: dict[str, Any] | None = None
) -> int | None:
    """Do what a rank does at a copy; the slot, or None where none was free."""
    slot = line.take_slot()
    if slot is None:
        line.left_out(step)
        return None
    plan, head = plan_of(rank, world, facts)
    memory = line.slots[slot]
    memory[: len(head)] = head
    memory[len(head) : len(head) + sum(plan.sizes)] = values_of(step, rank, sum(plan.sizes))
    line.copied(slot, step, plan)
    return slot


def until(holds: Callable[[], Any], why: str) -> None:
    """Wait for another thread's or process's doing."""
    patience.until(holds, why)


def ready(replica_servers: ReplicaServers, mark: Mark | None = None) -> list[ReplicaClient]:
    """The ranks' lines of a new round: all have chosen, and have room."""
    lines = replica_servers.begin()
    for line in lines:
        line.chosen(mark)
    for line in lines:
        assert line.take_room(ROOM) == ""
    return lines


def copy_by_all(lines: Sequence[ReplicaClient], step: int) -> None:
    """Every rank copies a step, once it has a slot free."""
    for rank, line in enumerate(lines):
        until(lambda line=line: line._words[line._at], f"rank {rank} has no slot free")
        write_copy(line, step, rank, len(lines))


def covered_by_all(lines: Sequence[ReplicaClient], step: int) -> None:
    """Every rank copies a step, and hears that all nodes have it whole."""
    copy_by_all(lines, step)
    for line in lines:
        until(lambda line=line: line.covered == step, f"step {step} is not covered")
