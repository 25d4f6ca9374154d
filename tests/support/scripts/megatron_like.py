"""A program with Megatron-LM's contract: how it is launched, hears a stop, saves and goes on.

Read from NVIDIA/Megatron-LM at d98e8a6: megatron/training/arguments.py (RANK, WORLD_SIZE),
initialize.py (env://), dist_signal_handler.py, training.py (checkpoint_and_decide_exit and the end
of train), checkpointing.py (get_checkpoint_name, the order of save_checkpoint, read_metadata,
_load_base_checkpoint). What it trains is one number for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import preempts
import torch
import torch.distributed as dist

STEPS = 100


class DistributedSignalHandler:
    """As Megatron-LM's: any rank's signal is every rank's."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self.hear)

    def hear(self, *_: object) -> None:
        self.received = True

    def signals_received(self) -> list[int]:
        said = [torch.zeros(1, dtype=torch.int32) for _ in range(dist.get_world_size())]
        dist.all_gather(said, torch.tensor([self.received], dtype=torch.int32))
        return [int(one) for one in said]


def folder_of(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def tracker_of(root: Path) -> Path:
    return root / "latest_checkpointed_iteration.txt"


def load(asked: argparse.Namespace) -> tuple[int, float]:
    iteration = -1
    if tracker_of(asked.load).is_file():
        text = tracker_of(asked.load).read_text().strip()
        if not text.isdigit():
            print("ERROR: Invalid metadata file")
            sys.exit()
        iteration = int(text)
    if asked.ckpt_step:
        iteration = asked.ckpt_step
    if iteration == -1:
        return 0, 0.0
    folder = folder_of(asked.load, iteration)
    weight = torch.load(folder / f"__{dist.get_rank()}_0.distcp")["weight"]
    assert json.loads((folder / "metadata.json").read_text()) == {"sharded_backend": "torch_dist"}
    return iteration, float(weight)


def save(asked: argparse.Namespace, iteration: int, weight: float) -> None:
    rank, folder = dist.get_rank(), folder_of(asked.save, iteration)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"weight": torch.tensor(weight)}, folder / f"__{rank}_0.distcp")
    if rank == 0:
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    dist.barrier()
    if rank == 0:
        tracker_of(asked.save).write_text(str(iteration))
    dist.barrier()
    if iteration == asked.torn_at:  # as a node that dies before its pages are on the disk
        while not any(Path(os.environ["HPCTRAIN_RUN_DIR"]).glob("sealed/seal-*")):
            time.sleep(0.05)
        if rank == 0:
            (folder / "__1_0.distcp").write_bytes(b"")
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-interval", type=int)
    parser.add_argument("--ckpt-step", type=int)
    parser.add_argument("--preempted-at", type=int, default=sys.maxsize)
    parser.add_argument("--torn-at", type=int, help="saved at the first start, and lost")
    asked = parser.parse_args()
    if os.environ["HPCTRAIN_STARTS"] != "1":
        asked.torn_at = None
    rank = int(os.getenv("RANK", "0"))
    dist.init_process_group("gloo", rank=rank, world_size=int(os.getenv("WORLD_SIZE", "1")))
    assert int(os.environ["LOCAL_RANK"]) == rank
    handler = DistributedSignalHandler()
    iteration, weight = load(asked)
    print(f"begins at {iteration}", flush=True)
    while iteration < STEPS:
        iteration, weight = iteration + 1, weight + rank + 1
        preempts.after(iteration, asked.preempted_at)
        if any(handler.signals_received()):
            save(asked, iteration, weight)
            print("exiting program after receiving SIGTERM.", flush=True)
            sys.exit(0)
        if iteration % asked.save_interval == 0 or iteration == asked.torn_at:
            save(asked, iteration, weight)
    print(f"ends with {weight}", flush=True)


if __name__ == "__main__":
    main()
