"""Keepers of a few nodes in this process, each with an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.format.shard import ShardPiece, file_name, header
from hpctrain.control.node_server import TreePlace
from hpctrain.memory.copy_plan import CopyPlan
from hpctrain.memory.facts import part_facts
from hpctrain.memory.keeper import Keeper
from hpctrain.memory.keeper_process import KeeperProcess
from hpctrain.memory.rank_line import KeeperLine
from tests.support import patience
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from hpctrain.memory.slots import Mark

BLOCK_BYTES = 1024
ROOM = 8000
"""Bytes that each rank asks for a copy."""


class Keepers:
    """Of some nodes with some ranks each; a new round with `begin`."""

    def __init__(self, root: Path, nodes: int, ranks: int, *, to_buddy: bool = False) -> None:
        self.root, self.nodes, self.ranks = root, nodes, ranks
        self.to_buddy = to_buddy
        self.buddies: tuple[int, ...] = ()
        self.round = 0
        self.lines: list[KeeperLine] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.keepers = [self._make() for _ in range(nodes)]

    def begin(self, secrets: list[str] | None = None) -> list[KeeperLine]:
        """Start a round; the lines of all its ranks."""
        self.close_lines()
        self.round += 1
        port = 0
        for node, keeper in enumerate(self.keepers):
            folder = self.folder(node)
            folder.mkdir(parents=True)
            all_ranks = self.nodes * self.ranks
            place = TreePlace(
                node, self.nodes, node * self.ranks, self.ranks, all_ranks, f"n{node}"
            )
            order = {"folder": str(folder), "place": asdict(place), "address": "127.0.0.1"}
            secret = secrets[node] if secrets else "secret"
            order |= {"secret": secret, "about": f"round {self.round}"}
            order |= {"shown": "127.0.0.1" if self.to_buddy else ""}
            order |= {"buddies": self.buddies if node == 0 else ()}  # it tells the others
            port = self._do(keeper, {"begin": order}) or port
        for keeper in self.keepers[1:]:
            self._do(keeper, {"join": ["127.0.0.1", port]})
        self.lines = [
            KeeperLine(self.folder(rank // self.ranks), rank, self.round)
            for rank in range(self.nodes * self.ranks)
        ]
        return self.lines

    def lose(self, node: int) -> None:
        """A node is gone with its keeper; those behind it move up, and a spare comes last."""
        self._end(self.keepers.pop(node))
        self.keepers.append(self._make())

    def folder(self, node: int) -> Path:
        return self.root / f"{self.round}-{node}"

    def close_lines(self) -> None:
        for line in self.lines:
            line.close()
        self.lines = []

    def close(self) -> None:
        self.close_lines()
        for keeper in self.keepers:
            self._end(keeper)
        self._on_loop(_all_ended())  # else each test leaves its connections open
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()

    def _make(self) -> Any:
        return self._on_loop(_made())

    def _do(self, keeper: Any, order: dict[str, Any]) -> int:
        return int(self._on_loop(keeper.do(order)))

    def _end(self, keeper: Any) -> None:
        self._on_loop(_closed(keeper))

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


class KeeperProcesses(Keepers):
    """The same, each in a process of its own, which can be killed."""

    def _make(self) -> KeeperProcess:
        return KeeperProcess()

    def _do(self, keeper: KeeperProcess, order: dict[str, Any]) -> int:
        return keeper.ask(order)

    def _end(self, keeper: KeeperProcess) -> None:
        keeper.stop()


async def _closed(keeper: Keeper) -> None:
    if keeper._round is not None:
        keeper._round.close()
    await asyncio.sleep(0.01)  # its connections end in the loop's next turns
    # Memory that ends with a keeper's process, and hundreds of tests are in this one.
    keeper._stock.keep_only(None)
    for stock in keeper._stock._stocks():
        stock.close()


async def _made() -> Keeper:
    return Keeper()


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
    line: KeeperLine, step: int, rank: int, world: int, facts: dict[str, Any] | None = None
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


def ready(keepers: Keepers, mark: Mark | None = None) -> list[KeeperLine]:
    """The ranks' lines of a new round: all have chosen, and have room."""
    lines = keepers.begin()
    for line in lines:
        line.chosen(mark)
    for line in lines:
        assert line.take_room(ROOM) == ""
    return lines


def copy_by_all(lines: Sequence[KeeperLine], step: int) -> None:
    """Every rank copies a step, once it has a slot free."""
    for rank, line in enumerate(lines):
        until(lambda line=line: line._words[line._at], f"rank {rank} has no slot free")
        write_copy(line, step, rank, len(lines))


def covered_by_all(lines: Sequence[KeeperLine], step: int) -> None:
    """Every rank copies a step, and hears that all nodes have it whole."""
    copy_by_all(lines, step)
    for line in lines:
        until(lambda line=line: line.covered == step, f"step {step} is not covered")
