"""A program with its own loop and its own checkpoint, which tells its steps and leaves as asked.

What each start began with, and every step, stands in `steps.txt`, a line each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import preempts
import torch
import torch.distributed as dist

import hpctrain

STATE = Path("state.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--preempted-at", type=int, default=sys.maxsize)
    parser.add_argument("--returns", action="store_true", help="without run.leave()")
    parser.add_argument("--tells-after", action="store_true", help="says nothing before its loop")
    asked = parser.parse_args()
    run = hpctrain.init()
    state = {"step": 0, "weight": torch.zeros(1)}
    if STATE.exists():
        state = torch.load(STATE)
    if not asked.tells_after:
        run.at(state["step"])
    while state["step"] < asked.steps:
        gradient = torch.full((1,), dist.get_rank() + 1.0)
        dist.all_reduce(gradient)
        state = {"step": state["step"] + 1, "weight": state["weight"] + gradient}
        if dist.get_rank() == 0:
            with Path("steps.txt").open("a") as file:
                print(state["step"], file=file)
        run.at(state["step"], loss=1 / state["step"], tokens=100)
        preempts.after(state["step"], asked.preempted_at)
        if run.should_stop():
            if dist.get_rank() == 0:
                torch.save(state, STATE)
            if asked.returns:
                return
            run.leave()
    if not asked.returns:
        run.leave()


if __name__ == "__main__":
    main()
