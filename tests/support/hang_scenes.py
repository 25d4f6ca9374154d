"""Real ranks that hang, each scene in its own way.

Not among them: ranks that bring other sizes or types to one collective. gloo ends such ranks within
milliseconds, or lets them pass; none of 20 ways to do so made them hang.

`Scene` starts 8 ranks in two tensor-parallel groups under DDP; rank `BAD` (and in one scene rank 0)
does wrong in step `STEP`. `evidence()` looks at them as an agent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.node.hangs.evidence import RankEvidence
from hpctrain.node.hangs.look import look
from tests.support import patience
from tests.support.gloo import preload

if TYPE_CHECKING:
    from typing import Self

RANKS, BAD, STEP = 8, 5, 3
PTRACE_ATTACH = 16
SCENES = (
    "sleeps",
    "holds_gil",
    "spins",
    "stopped",
    "traced",
    "extra_collective",
    "wrong_collective",
    "crossed_groups",
    "returns",
)


def fetch_rows(scene: str, rank: int, step: int) -> Any:
    """The program's data: where a rank hangs in Python."""
    import torch

    if rank == BAD and step == STEP:
        if scene == "sleeps":
            time.sleep(1000)
        if scene == "holds_gil":
            readable, _ = os.pipe()
            ctypes.PyDLL(None).read(readable, ctypes.create_string_buffer(1), 1)
        if scene == "spins":
            while True:
                pass
        if scene == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if scene == "traced":
            signal.pause()
    if scene == "slow":
        time.sleep(0.1)
    return torch.randn(4, 16)


def exchange_too_much(scene: str, rank: int) -> None:
    """Collectives that not all ranks call, or not all with the same."""
    import torch
    import torch.distributed as dist

    if rank == BAD and scene == "extra_collective":
        dist.barrier()
    if rank == BAD and scene == "wrong_collective":
        dist.all_gather([torch.empty(8) for _ in range(RANKS)], torch.ones(8))


def _train(scene: str, rank: int, folder: Path, port: int, said: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hpctrain.node.hangs.witness import Witness

    steps, returned = said
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says as it is killed
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    Witness(folder, rank)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    tensor_parallel = [dist.new_group(list(range(at, at + 4))) for at in (0, 4)][rank // 4]
    cross = dist.new_group([0, 4])
    net = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(10_000):
        steps[rank] = step
        rows = fetch_rows(scene, rank, step)
        if step == STEP:
            exchange_too_much(scene, rank)
            if scene == "returns" and rank == BAD:
                returned[rank] = 1
                signal.pause()  # as a program whose last thread does not end
        dist.all_reduce(rows.sum(), group=tensor_parallel)
        if scene == "crossed_groups" and step == STEP and rank == 0:
            dist.all_reduce(torch.ones(3), group=cross)  # before the gradients
        loss = net(rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if scene == "crossed_groups" and step == STEP and rank == 4:
            dist.all_reduce(torch.ones(3), group=cross)  # after them
        optimizer.step()


class Scene:
    """One scene's ranks, from their start until all stand still; a context manager."""

    def __init__(self, name: str, port: int) -> None:
        preload()
        context = multiprocessing.get_context("fork")
        self._stack = contextlib.ExitStack()
        self._name = name
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._steps = context.Array("l", RANKS, lock=False)
        self._returned = context.Array("b", RANKS, lock=False)
        said = (self._steps, self._returned)
        self.ranks = [
            context.Process(target=_train, args=(name, rank, self.folder, port, said))
            for rank in range(RANKS)
        ]

    def evidence(self) -> list[RankEvidence]:
        """What a look finds."""
        known = [
            RankEvidence(rank, "n1", "", step=step, has_returned=bool(has_returned))
            for rank, (step, has_returned) in enumerate(
                zip(self._steps, self._returned, strict=True)
            )
        ]
        pids = [process.pid or 0 for process in self.ranks]
        return look(self.folder, list(zip(pids, known, strict=True)))

    def wait_until_still(self, still_s: float = 1.0) -> None:
        """Until no rank has begun a step for so long."""
        moved_s, last, deadline_s = time.monotonic(), [-1] * RANKS, time.monotonic() + 60
        while time.monotonic() < moved_s + still_s or min(last) < STEP - 1:
            assert time.monotonic() < deadline_s, f"the ranks do not begin: {last}"
            now = list(self._steps)
            if now != last:
                moved_s, last = time.monotonic(), now
            assert max(last) <= STEP + 2, "nobody hangs"
            time.sleep(0.02)
        if self._name == "traced":  # a debugger's hold is as deaf as a wait for a file server
            pid = self.ranks[BAD].pid or 0
            assert ctypes.CDLL(None).ptrace(PTRACE_ATTACH, pid, 0, 0) == 0
            os.waitpid(pid, 0)

    def wait_for_step(self, step: int) -> None:
        """Until all ranks have begun it."""
        patience.until(
            lambda: min(self._steps) >= step, lambda: f"the ranks stand at {list(self._steps)}"
        )

    def __enter__(self) -> Self:
        for process in self.ranks:
            process.start()
        self._stack.callback(self._end)
        return self

    def _end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
