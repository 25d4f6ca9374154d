"""Runs a program as it is; after so many optimizer steps its first attempt is preempted.

`preempted.py STEP SCRIPT [ARGUMENTS]`. Each step of rank 0's optimizer is a line in `steps.txt`.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from pathlib import Path

import preempts
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    at, script = int(sys.argv[1]), sys.argv[2]
    steps = itertools.count(1)

    def count(*_: object) -> None:
        if os.environ["RANK"] == "0":
            with Path("steps.txt").open("a") as file:
                print("step", file=file)
        preempts.after(next(steps), at)

    register_optimizer_step_post_hook(count)
    sys.argv = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
