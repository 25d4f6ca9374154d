"""Makes one real fault of a GPU: `faults.py KIND`. Without a GPU it ends where CUDA would begin."""

from __future__ import annotations

import os
import signal
import sys

import torch

FAR = 1 << 42
"""Bytes that no GPU has."""
READS_FAR = "template <typename T> T reads_far(T x) { return *((T*)(8ULL << 44) + (long long)x); }"


def out_of_memory(device: torch.device) -> None:
    held = [torch.empty(1 << 26, dtype=torch.uint8, device=device)]
    torch.empty(FAR, dtype=torch.uint8, device=device)
    del held


def asserted(device: torch.device) -> None:
    table = torch.nn.Embedding(8, 8).to(device)
    table(torch.tensor([99], device=device)).sum().item()


def illegal_access(device: torch.device) -> None:
    read = torch.cuda.jiterator._create_jit_fn(READS_FAR)
    read(torch.ones(32, device=device)).sum().item()


def hidden(_: torch.device) -> None:
    torch.cuda.init()


def old_driver(device: torch.device) -> None:
    """A driver cannot be had older than it is: torch's own words stand in for its check."""
    raise RuntimeError(
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
        f"driver by downloading and installing a new version ({device})"
    )


def two_ranks_on_one(device: torch.device) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()


def killed(device: torch.device) -> None:
    held = torch.ones(1 << 29, device=device)  # 2 GiB
    torch.cuda.synchronize()
    print(held[-1].item(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str) -> None:
    act = globals()[kind]
    if not torch.cuda.is_available() and act not in {hidden, old_driver}:
        sys.exit("no GPU here: nothing was tried")
    act(torch.device("cuda", 0))


main(sys.argv[1])
