"""Runs a program under deterministic algorithms: `deterministic.py recipe`, or a file's path.

With a second word, a folder, attempts 1 and 2 stand still after 7 of their steps: they write
`held-<attempt>` with their process number, the first waits until it has heard a stop, the second
until it is killed.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS begins

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

HELD_AFTER = 7
POLL_S = 0.02


def hold(folder: Path, attempt: int) -> None:
    from hpctrain.train.runtime.stops import RankSignals

    held = folder / f"held-{attempt}"
    held.with_suffix(".new").write_text(str(os.getpid()))
    held.with_suffix(".new").rename(held)
    listening = RankSignals._listening
    while attempt == 2 or not (listening and listening.heard.is_set()):
        time.sleep(POLL_S)


def main(program: str, folder: str = "") -> None:
    torch.use_deterministic_algorithms(mode=True)
    attempt, steps = int(Path(os.environ["HPCTRAIN_ATTEMPT_DIR"]).name), itertools.count(1)

    def after_step(*_: object) -> None:
        if next(steps) == HELD_AFTER and attempt < 3:
            hold(Path(folder), attempt)

    if folder:
        register_optimizer_step_post_hook(after_step)
    if program == "recipe":
        from hpctrain.recipes.lm import train

        train.main()
    else:
        runpy.run_path(program, run_name="__main__")


main(*sys.argv[1:])
