"""Ends in the way that its argument names, for real, at step 5 of a run whose steps are told.

python ends.py WAY; tests/e2e/test_doctor_causes.py holds what is said of each.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import hpctrain

WAY = sys.argv[1]
LATER = 1000
"""That ranks call equally many collectives has been seen often enough by then."""
LONG = {"goes_on": 2000, "leaves_out": 10_000}


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if WAY == "worker" and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4)


def worker():
    for _ in DataLoader(Rows(), num_workers=1):
        pass


def not_finite():
    value = torch.zeros(1, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        (value / value).sum().backward()


def memory():
    torch.zeros(1 << 50)


def full():
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"checkpoint")


def unreadable():
    with Path("/proc/self/mem").open("rb", buffering=0) as file:
        file.read(1)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def silent_peer():
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(1), group=group)


def stands():
    if dist.get_rank() == 1:
        time.sleep(3600)


def gpu_memory():
    """The real class and PyTorch's own words; no GPU has said them."""
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
        "of which 12.69 GiB is free. Including non-PyTorch memory, this process has 66.40 GiB "
        "memory in use. Of the allocated memory 65.03 GiB is allocated by PyTorch, and 512.00 MiB "
        "is reserved by PyTorch but unallocated."
    )


def gpu():
    """The same."""
    raise torch.AcceleratorError(
        "CUDA error: uncorrectable ECC error encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the "
        "stacktrace below might be incorrect.\n"
    )


def stays():
    threading.Thread(target=time.sleep, args=(3600,)).start()


def raises():
    raise ValueError("no tokenizer is given")


if WAY == "raises":
    raises()
run = hpctrain.init()
layer = torch.nn.Linear(4, 4)
run.track(model=layer)
last = run.world.rank == run.world.world_size - 1
for step in run.steps(LONG.get(WAY, 12)):
    if WAY != "leaves_out" or step != LATER or not last:
        dist.all_reduce(torch.ones(1))
    if WAY in LONG:
        time.sleep(0.02)
    elif step == 5 and WAY in globals() and (last or WAY == "silent_peer"):
        globals()[WAY]()
