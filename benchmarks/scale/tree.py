"""Real points of the control plane: a tree of node processes, with ranks that are processes of it.

The ranks have no torch: a step is 20 ms of sleep, begun by the machine's clock on all of them, as
the collectives of training would have it. Two cores carry all of them, so that times of many ranks
are upper bounds; `hop_s` and `message_s` are of a small tree that has the machine for itself.

```
 parent (this process) --fork--> node processes 0..n --- TCP, authenticated --- each other
                       '-fork--> ranks, each on its node's socket and board
```
"""

from __future__ import annotations

import functools
import mmap
import os
import random
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from hpctrain.node.control import collectives
from hpctrain.node.control.client import ControlClient
from hpctrain.node.control.endpoint import Endpoint
from tests.support.control_tree import ControlTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

RANKS_PER_NODE = 8
STEP_S = 0.02
WARM_STEPS = 100
WISHES = 12
"""Saves that the last rank wishes, one after another; then a stop."""
STEPS_BETWEEN = 47
TAIL_STEPS = 25
GATHERS = 5
PATIENCE_S = 300.0
LATE_NS = 1_000_000
"""A tick that took so long has waited."""
CHAIN = 8
HOP_ROUNDS = 200


@dataclass(frozen=True)
class Agreement:
    """What a tree of ranks has shown. Seconds, bytes, or counts for each second."""

    ranks: int
    nodes: int
    levels: int
    fan_out: int
    notice_s: float
    """From a wish to the tick that does it at the last of all ranks: median of the saves."""
    notice_worst_s: float
    stop_s: float
    """The same of the stop, which ends the round."""
    tick_cpu_s: float
    """Of a rank's `tick()`, on average; the clock's own time is taken off."""
    tick_s: float
    """What `tick()` adds to a step, on average over all ranks."""
    late_share: float
    """Of the ticks, those that took more than a millisecond."""
    root_cpu: float
    """CPU seconds of node 0's process in each second."""
    node_cpu: float
    """The same of the other nodes' on average."""
    frames_per_s: float
    """Between nodes, in all."""
    bytes_per_s: float
    gather_s: float
    """Of what ranks say at a save, to rank 0: the best of some."""
    gather_bytes: int
    """That rank 0 gets."""


# ---- agreement


def agreement(ranks: int, fan_out: int = collectives.FANOUT) -> Agreement:
    """A round of that many ranks, 8 on each node: wishes, a stop, gathers."""
    nodes = ranks // RANKS_PER_NODE
    with _fan_out(fan_out), _Counters() as counters, ControlTree(nodes, RANKS_PER_NODE) as tree:
        board = _Results(ranks)
        with _forked_ranks(tree, board, ranks) as go:
            board.wait_for(READY, ranks)
            go()
            used = _watched(tree, counters)
            board.wait_for(GATHERED, ranks)
        return _told(board, ranks, nodes, _levels(nodes), used)


def _levels(nodes: int) -> int:
    levels, node = 0, nodes - 1
    while (parent := collectives.parent_of(node)) is not None:
        levels, node = levels + 1, parent
    return levels


@dataclass(frozen=True)
class _Used:
    root_cpu: float
    node_cpu: float
    frames_per_s: float
    bytes_per_s: float


def _watched(tree: ControlTree, counters: _Counters) -> _Used:
    """What the node processes use while ranks train."""
    time.sleep((WARM_STEPS + STEPS_BETWEEN) * STEP_S)
    pids = [node.pid for node in tree.nodes]
    began, cpu, said = time.monotonic(), [cpu_s(pid) for pid in pids], counters.of(pids)
    time.sleep(STEPS_BETWEEN * (WISHES - 2) * STEP_S)
    took_s = time.monotonic() - began
    used = [(cpu_s(pid) - before) / took_s for pid, before in zip(pids, cpu, strict=True)]
    now = counters.of(pids)
    return _Used(
        used[0],
        mean(used[1:] or [0.0]),
        (now[0] - said[0]) / took_s,
        (now[1] - said[1]) / took_s,
    )


def _told(board: _Results, ranks: int, nodes: int, levels: int, used: _Used) -> Agreement:
    rows = [board.row(rank) for rank in range(ranks)]
    took = [
        (max(row[DECIDED + number] for row in rows) - rows[-1][WISHED + number]) / 1e9
        for number in range(WISHES + 1)
    ]
    ticks = sum(row[TICKS] for row in rows)
    return Agreement(
        ranks=ranks,
        nodes=nodes,
        levels=levels,
        fan_out=collectives.FANOUT,
        notice_s=median(took[:WISHES]),
        notice_worst_s=max(took[:WISHES]),
        stop_s=took[WISHES],
        tick_cpu_s=sum(row[TICK_CPU] for row in rows) / ticks / 1e9,
        tick_s=sum(row[TICK_WALL] for row in rows) / ticks / 1e9,
        late_share=sum(row[LATE] for row in rows) / ticks,
        root_cpu=used.root_cpu,
        node_cpu=used.node_cpu,
        frames_per_s=used.frames_per_s,
        bytes_per_s=used.bytes_per_s,
        gather_s=rows[0][GATHER] / 1e9,
        gather_bytes=rows[0][GATHER_BYTES],
    )


# ---- a rank


def _train(client: ControlClient, row: memoryview, rank: int, ranks: int, start_ns: int) -> None:
    lease, clock_ns = client.lease, _clock_ns()
    step, wished = 0, 0
    while True:
        step += 1
        _sleep_until(start_ns + int(step * STEP_S * 1e9))
        due = WARM_STEPS + (wished + 1) * STEPS_BETWEEN
        if rank == ranks - 1 and step == due + (TAIL_STEPS if wished == WISHES else 0):
            time.sleep(STEP_S * (wished % 5) / 5)  # at any moment of a step
            row[WISHED + wished] = time.monotonic_ns()
            wished += 1
            lease.wish(**({"save": wished} if wished <= WISHES else {"stop": 1}))
        began, cpu = time.monotonic_ns(), time.thread_time_ns()
        decisions = lease.tick()
        cpu, ended = time.thread_time_ns() - cpu, time.monotonic_ns()
        if step > WARM_STEPS:
            row[TICKS] += 1
            row[TICK_CPU] += max(0, cpu - clock_ns)
            row[TICK_WALL] += ended - began
            row[LATE] += ended - began > LATE_NS
        for decision in decisions:
            if decision.kind == "stop":
                row[DECIDED + WISHES] = ended
                return
            row[DECIDED + decision.value - 1] = ended


def _sleep_until(moment_ns: int) -> None:
    left_ns = moment_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)


def _clock_ns() -> int:
    """What asking the thread's clock takes of it."""
    times = [time.thread_time_ns() for _ in range(1001)]
    return (times[-1] - times[0]) // 1000


def _gather(client: ControlClient, row: memoryview, rank: int) -> None:
    """What a save gathers: of each rank its file's entry and its numbers, of one the layout."""
    import pickle

    value = said_at_a_save(rank)
    exchange = client.exchange(PATIENCE_S)
    best, nbytes = 2**62, 0
    for _ in range(GATHERS):
        exchange.gather(None)
        began = time.monotonic_ns()
        answers = exchange.gather_on_0(value)
        best = min(best, time.monotonic_ns() - began)
        nbytes = sum(len(pickle.dumps(answer)) for answer in answers) if rank == 0 else 0
    row[GATHER], row[GATHER_BYTES] = best, nbytes


def said_at_a_save(
    rank: int, *, ranks: int = 16384, rows: int = 16384, columns: int = 4096, tensors: int = 512
) -> Any:
    """A rank's part of tensors that are cut by rows, as `checkpoint/tensors/save.py` has it."""
    import numpy as np

    from hpctrain.checkpoint.format import shard
    from hpctrain.checkpoint.format.layout import RankPart
    from hpctrain.checkpoint.format.manifest import FileEntry

    nbytes = 4 * (rows // ranks) * columns
    size = 80_000 + tensors * nbytes + shard.proof_bytes(tensors * shard.blocks_of(nbytes))
    digest = random.Random(rank).getrandbits(64)  # noqa: S311 - as a manifest holds them
    # Parts begin at a multiple of their size, told once for all tensors; rank 0's begin at 0.
    layout = _layout(min(rank, 1), ranks, rows, columns, tensors)
    return RankPart(
        FileEntry(shard.file_name(rank), size, f"xxh3_64-blocks:{digest:016x}"),
        80_000,
        layout.key,
        np.array([rank] if rank else [], np.int64),
        layout if rank <= 1 else None,
        2**63,
    )


@functools.cache
def _layout(rank: int, ranks: int, rows: int, columns: int, tensors: int) -> Any:
    from hpctrain.checkpoint.format.layout import placed
    from hpctrain.checkpoint.format.shard import ShardPiece

    names = [f"model.blocks.{n // 8}.attention.weight_{n % 8}" for n in range(tensors)]
    own = rows // ranks
    begin, extent = (rank * own, 0), (own, columns)
    return placed([ShardPiece(name, "F32", (rows, columns), begin, extent) for name in names],
                  rank).layout  # fmt: skip


# ---- processes


READY, GATHERED, TICKS, TICK_CPU, TICK_WALL, LATE, GATHER, GATHER_BYTES = range(8)
WISHED = 8
DECIDED = WISHED + WISHES + 1
_ROW = DECIDED + WISHES + 1


class _Results:
    """A row of whole numbers for each rank, which it alone writes."""

    def __init__(self, ranks: int) -> None:
        self._words = memoryview(mmap.mmap(-1, ranks * _ROW * 8)).cast("q")

    def row(self, rank: int) -> memoryview:
        return self._words[rank * _ROW : (rank + 1) * _ROW]

    def wait_for(self, word: int, ranks: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(self.row(rank)[word] for rank in range(ranks)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not all of {ranks} ranks came so far")
            time.sleep(0.1)


@contextmanager
def _forked_ranks(tree: ControlTree, board: _Results, ranks: int) -> Iterator[Callable[[], None]]:
    """Ranks that begin when the function is called that this gives."""
    for rank in range(2):  # what it imports and keeps is shared
        said_at_a_save(rank)
    start, when = os.pipe()
    pids = [_fork(lambda rank=rank: _be_rank(tree, board, rank, ranks, (start, when)))  # type: ignore[misc]
            for rank in range(ranks)]  # fmt: skip
    os.close(start)

    def go() -> None:
        moment = str(time.monotonic_ns() + 1_000_000_000).rjust(32).encode()
        for _ in range(ranks):
            os.write(when, moment)

    try:
        yield go
    finally:
        os.close(when)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_rank(
    tree: ControlTree, board: _Results, rank: int, ranks: int, pipe: tuple[int, int]
) -> None:
    start, when = pipe
    os.close(when)
    client, row = ControlClient.take(tree.folder(rank), rank), board.row(rank)
    row[READY] = 1
    _train(client, row, rank, ranks, int(os.read(start, 32)))
    _gather(client, row, rank)
    row[GATHERED] = 1


def _fork(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


@contextmanager
def _fan_out(children: int) -> Iterator[None]:
    """Node processes forked in here have so many children at most."""
    before = collectives.FANOUT
    collectives.FANOUT = children
    try:
        yield
    finally:
        collectives.FANOUT = before


class _Counters:
    """Frames between nodes, and their bytes, as the node processes forked meanwhile send them."""

    def __enter__(self) -> Self:
        most = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
        self._words = memoryview(mmap.mmap(-1, most * 16)).cast("q")
        self._say = say = Endpoint.say

        def counted(peer: Endpoint, message: bytes) -> None:
            if peer.codes is not None:
                at = 2 * os.getpid()
                self._words[at] += 1
                self._words[at + 1] += len(message) + 28  # length, code, number
            say(peer, message)

        Endpoint.say = counted  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Endpoint.say = self._say  # type: ignore[method-assign]

    def of(self, pids: list[int]) -> tuple[int, int]:
        """Frames, bytes."""
        frames = sum(self._words[2 * pid] for pid in pids)
        return frames, sum(self._words[2 * pid + 1] for pid in pids)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process's first thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


# ---- a small tree that has the machine for itself


def hop_s() -> float:
    """A value from a node to its parent: a chain of 8 nodes against one of 2, for each level."""
    return (_up_s(CHAIN) - _up_s(2)) / (CHAIN - 2)


def _up_s(nodes: int) -> float:
    """From the last node's rank to rank 0, through all nodes between them: the median."""
    with _fan_out(1), ControlTree(nodes, 1) as tree:
        clients = [ControlClient.take(tree.folder(rank), rank) for rank in range(nodes)]
        exchanges = [client.exchange(PATIENCE_S) for client in clients]
        took = []
        for _ in range(HOP_ROUNDS):
            rows = exchanges[0].send_to_0([0.0])
            for exchange in exchanges[1:-1]:
                exchange.send_to_0([0.0])
            time.sleep(0.005)  # all but the last one's are there
            began = time.perf_counter()
            exchanges[-1].send_to_0([0.0])
            assert len(rows.values()) == nodes
            took.append(time.perf_counter() - began)
        for client in clients:
            client.close()
        return median(took)
