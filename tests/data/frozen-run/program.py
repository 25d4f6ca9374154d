"""A linear model on each rank; rank 1 kills itself once, in step 23."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain

STEPS, FATAL_STEP = 80, 23
KILLED = Path("killed")


def main() -> None:
    run = hpctrain.init()
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(total=STEPS):
        optimizer.zero_grad()
        loss = (model(torch.ones(8, 4)) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        run.log(
            loss=loss.item(),
            grad_norm=2 * loss.item(),
            tokens=32,
            flops=1e6,
            skipped=step % 20 == 7,
        )
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if run.world.rank == 1 and step == FATAL_STEP and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    print("all steps done")


if __name__ == "__main__":
    main()
