"""Fails for real, in the way that its argument names: what it printed is kept beside it.

torchrun --nproc-per-node 2 program.py FAULT [FOLDER]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

FAULT = sys.argv[1]
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "."
RANK = int(os.environ.get("RANK", "0"))


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if FAULT == "worker_killed" and index == 9 and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "worker_raises" and index == 9 and RANK == 1:
            raise KeyError("label")
        if FAULT == "shm" and index == 9:
            os.kill(os.getpid(), signal.SIGBUS)
        return torch.full((4,), float(index))


def step(model, optimizer, batch):
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def checkpoint_of_other_shape():
    import torch.distributed.checkpoint as dcp

    path = f"{FOLDER}/dcp"
    dcp.save({"w": torch.zeros(4, 4), "rank": torch.zeros(2)}, checkpoint_id=path)
    dist.barrier()
    dcp.load({"w": torch.zeros(8, 4)}, checkpoint_id=path)


def checkpoint_missing_key():
    import torch.distributed.checkpoint as dcp

    path = f"{FOLDER}/dcp"
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=path)
    dist.barrier()
    dcp.load({"w": torch.zeros(4), "shard_of_rank_3": torch.zeros(4)}, checkpoint_id=path)


def main():
    if FAULT == "no_rank":
        os.environ.pop("RANK", None)
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3 if FAULT == "nan" else 1e-3)
    if FAULT == "checkpoint_shape":
        checkpoint_of_other_shape()
    if FAULT == "checkpoint_key":
        checkpoint_missing_key()
    workers = 1 if FAULT in {"worker_killed", "worker_raises", "shm"} else 0
    for number, batch in enumerate(DataLoader(Samples(), batch_size=4, num_workers=workers)):
        loss = step(model, optimizer, batch)
        print(f"step {number} loss: {loss.item():.4g}", flush=True)
        if number == 3:
            fail(model)
        if FAULT == "nan" and not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} at step {number}")
    dist.destroy_process_group()


def fail(model):  # noqa: C901, PLR0912 - one test for each fault
    if FAULT == "exception" and RANK == 1:
        raise ValueError("the vocabulary has 50257 entries, not 50304")
    if FAULT == "sigkill" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "segfault" and RANK == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if FAULT == "sigterm" and RANK == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    if FAULT == "hang" and RANK == 1:
        time.sleep(20)
    if FAULT == "mismatch":
        dist.all_reduce(torch.zeros(4 if RANK else 8))
    if FAULT == "desync_debug":  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        dist.broadcast(torch.zeros(4), 0) if RANK else dist.all_reduce(torch.zeros(4))
    if FAULT == "disk_full":
        torch.save(torch.zeros(4 << 20), f"{FOLDER}/model-{RANK}.pt")
    if FAULT == "memory_error" and RANK == 1:
        torch.zeros(1 << 50)
    if FAULT == "python_memory" and RANK == 1:
        bytearray(1 << 60)
    if FAULT == "chained" and RANK == 0:
        try:
            {}["model"]
        except KeyError as error:
            raise RuntimeError("the checkpoint has no model") from error
    if FAULT == "monitored" and RANK == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)
    if FAULT == "monitored" and RANK == 1:
        time.sleep(4)


main()
