"""An ordinary torchrun program: knows nothing of hpctrain, and keeps a checkpoint of its own."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    state = {"step": 0, "weight": torch.zeros(1)}
    if asked.checkpoint.exists():
        state = torch.load(asked.checkpoint)
    print(f"starts at step {state['step']}", flush=True)
    for step in range(state["step"], asked.steps):
        gradient = torch.full((1,), dist.get_rank() + 1.0)
        dist.all_reduce(gradient)
        state = {"step": step + 1, "weight": state["weight"] + gradient}
        time.sleep(asked.step_s)
        if dist.get_rank() == 0:
            staged = asked.checkpoint.with_suffix(".new")
            torch.save(state, staged)
            staged.replace(asked.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
