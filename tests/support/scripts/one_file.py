"""A training program as many are: it keeps one file, and goes on from it only where it is told to.

It has never heard of hpctrain. Each step's batch follows from the step, so that a run that was
disturbed ends with the number of one that was not, to the last bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64


class Cut:
    """A file that its writer does not live to finish."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.file, self.left_bytes = path.open("wb"), limit_bytes

    def write(self, data: bytes) -> int:
        if len(data) > self.left_bytes:
            self.file.write(data[: self.left_bytes])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left_bytes -= len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return source, source.sum(dim=1, keepdim=True).sin()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.05, help="a step takes at least so long")
    parser.add_argument("--every", type=int, default=20, help="steps from one save to the next")
    parser.add_argument("--init-from", choices=("scratch", "resume"), default="scratch")
    parser.add_argument("--die-in-save", type=int, help="of this step, once an older one is sealed")
    return parser.parse_args()


def save(state: dict[str, Any], path: Path, *, die: bool) -> None:
    if die:
        while not any(Path(os.environ["HPCTRAIN_RUN_DIR"]).glob("sealed/seal-*")):
            time.sleep(0.05)
        torch.save(state, Cut(path, limit_bytes=20_000))
    torch.save(state, path)


def main() -> None:
    asked = parse()
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), asked.out / "ckpt.pt"
    asked.out.mkdir(parents=True, exist_ok=True)
    model = DistributedDataParallel(model_of(seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if asked.init_from == "resume":
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first + 1, asked.steps + 1):
        began = time.monotonic()
        source, target = batch_of(step, rank)
        loss = torch.nn.functional.mse_loss(model(source), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(max(0.0, asked.step_s - (time.monotonic() - began)))
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if rank == 0 and step % asked.every == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(state, path, die=not first and step == asked.die_in_save)
    weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
    if rank == 0:
        print(f"result {weights:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
