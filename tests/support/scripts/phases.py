"""A training that says in which phase it is, for what counts its file operations.

Attempt 1 trains, saves once while training waits and once behind it, and fails; attempt 2 goes on
and ends. Arguments: seconds of the phase that only trains.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import hpctrain

TRAINED, SAVED, STEPS = 4, 5, 12


def phase(name: str) -> None:
    """Say so to who traces: a path that is asked for, and is not there."""
    Path("/phase", name).exists()


def main() -> None:
    run = hpctrain.init()
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    again = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"] > 1
    if again:
        phase("resume")
    for step in run.steps(total=STEPS):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=1.0)
        if again:
            phase("resumed")
        else:
            first_attempt(run, step)


def first_attempt(run: hpctrain.Run, step: int) -> None:
    """What attempt 1 does after a step."""
    if step == 1:  # the first step's imports are over
        phase("train")
    elif step == TRAINED - 1:
        time.sleep(float(sys.argv[1]))
        phase("trained")
    elif step == TRAINED:
        phase("save")
        run.save()
        phase("saved")
    elif step == SAVED:  # after which a save is due, by checkpoint.interval_steps
        phase("save-behind")
    elif step == SAVED + 1:
        while run._kept._saves.saver.in_flight:
            time.sleep(0.01)
        phase("saved-behind")
        raise RuntimeError("of the test: the agents start the ranks again")


if __name__ == "__main__":
    main()
