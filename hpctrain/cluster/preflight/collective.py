"""An all-reduce and a matrix product over the ranks of a group of nodes: how fast, and how right.

    python -m hpctrain.cluster.preflight.collective   one on each node; orders on stdin, answers out

torch is imported once on each node, and each try runs in freshly forked ranks, since a collective
that hangs cannot be ended in any other way. The only module of this room that imports torch.
tests/slurm/test_preflight.py holds the promises.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hpctrain.cluster.preflight.bounded import Child, Unanswered, start
from hpctrain.core.base import clock
from hpctrain.core.base.listener import is_loopback, listen
from hpctrain.core.base.process import die_with_parent
from hpctrain.core.device import device_of_rank, is_accelerator, synchronize

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 1024**2
GB = 10**9
GPU_MIB, CPU_MIB = 1024, 8
GPU_TIMES, CPU_TIMES = 10, 4
GPU_SIZE, CPU_SIZE = 4096, 256
"""Of a product's square matrices."""
JOIN_S = 60.0


def main() -> int:
    """Serve until stdin ends."""
    for line in sys.stdin:
        order = json.loads(line)
        if "store" not in order:
            _send(_try(order))
            continue
        if order["host"]:
            _serve_store(order)
        _send({"ready": True})
    return 0


def _send(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _serve_store(order: Mapping[str, Any]) -> None:
    """Serve the store in which all tries meet, in a process beside; it dies with this one.

    torch's server looks up the name of everyone who connects, in a thread. A rank forked from the
    serving process during such a lookup inherits glibc's resolver lock as taken, and would wait for
    ever in its own first connect.
    """
    address, port, parent = str(order["address"]), int(order["store"]), os.getpid()
    listening = listen(address, port)
    if os.fork() == 0:
        try:
            die_with_parent(parent)
            os.close(sys.stdin.fileno())
            os.dup2(2, 1)
            # torch would listen on all of the machine's addresses.
            _store = TCPStore(
                address if is_loopback(address) else "localhost",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
            while True:
                signal.pause()
        finally:
            os._exit(1)
    listening.close()


def _try(order: Mapping[str, Any]) -> dict[str, Any]:
    """One group's try on this node: what each of its ranks measured, or why there is nothing."""
    order = {**order, "parent": os.getpid()}
    ranks = [start(partial(_measure, order, local)) for local in range(int(order["ranks"]))]
    deadline = clock.monotonic() + float(order["timeout_s"])
    measured: list[dict[str, Any]] = []
    why = ""
    for rank in ranks:
        try:
            measured.append(_awaited(rank, deadline, hurry=bool(why)))
        except Unanswered as error:
            why = why or str(error)
    return {"error": why} if why else {"ranks": measured}


def _awaited(rank: Child, deadline: float, *, hurry: bool) -> dict[str, Any]:
    """A rank's measurement; once one has failed the others are not waited for."""
    answer: dict[str, Any] = rank.answer(0.0 if hurry else deadline - clock.monotonic())
    return answer


def _measure(order: Mapping[str, Any], local: int) -> dict[str, Any]:
    """One rank: join, reduce some times, multiply. Collective over the group's ranks."""
    die_with_parent(int(order["parent"]))
    os.dup2(2, 1)  # what libraries print must not stand among our answers
    torch.set_num_threads(1)
    device = device_of_rank(local)
    rank, world = int(order["first"]) + local, int(order["world"])
    began = clock.monotonic()
    store = TCPStore(
        str(order["address"]), int(order["port"]), is_master=False,
        timeout=timedelta(seconds=JOIN_S),
    )  # fmt: skip
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=PrefixStore(str(order["name"]), store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=float(order["timeout_s"])),
    )
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    if ones.item() != world:
        raise OSError(f"an all-reduce of ones over {world} ranks came to {ones.item():g}")
    took = clock.monotonic() - began
    seconds, size = _reduce(order, device)
    return {
        "init_s": round(took, 3),
        "busbw_gbs": size / seconds * (2 * (world - 1) / world) / GB,
        "product": _product(device, wrong=bool(order.get("wrong"))),
    }


def _reduce(order: Mapping[str, Any], device: torch.device) -> tuple[float, int]:
    """The median of some all-reduces, after one that warms up: seconds, and bytes of each."""
    gpu = is_accelerator(device)
    size = int(order.get("size_mib") or (GPU_MIB if gpu else CPU_MIB)) * MIB
    values = torch.ones(size // 4, device=device)
    times = []
    for _ in range(1 + (GPU_TIMES if gpu else CPU_TIMES)):
        began = time.perf_counter()
        if slower := float(order.get("slow_s") or 0):
            clock.sleep(slower)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]), size


def _product(device: torch.device, *, wrong: bool) -> float | None:
    """Checksum of a matrix product of known numbers; None where it is not finite.

    Small integers, so that every order of summation gives the same bits on any hardware.
    """
    size = GPU_SIZE if is_accelerator(device) else CPU_SIZE
    numbers = torch.arange(size * size, dtype=torch.float32, device=device).reshape(size, size)
    left, right = numbers % 7 - 3, numbers % 5 - 2
    total = (left @ right).double()
    weights = torch.arange(size, dtype=torch.float64, device=device) % 11
    checksum = float((total @ weights).sum().item()) + (1.0 if wrong else 0.0)
    return checksum if torch.isfinite(total).all().item() else None


if __name__ == "__main__":
    sys.exit(main())
