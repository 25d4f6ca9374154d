"""Runs the program that it is given, and kills it in its third optimizer step, every time."""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

FATAL_STEP = 3
steps = itertools.count(1)


def kill_in_time(*_: object) -> None:
    if next(steps) == FATAL_STEP:
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(kill_in_time)
runpy.run_path(sys.argv[1], run_name="__main__")
