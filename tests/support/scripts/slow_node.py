"""A training in which every step takes five times as long on one node; its name is the argument."""

from __future__ import annotations

import os
import random
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain

STEPS = 200


def main() -> None:
    run = hpctrain.init()
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    work_s = 0.25 if os.environ["SLURMD_NODENAME"] == sys.argv[1] else 0.05
    noise = random.Random(run.world.rank)
    for _ in run.steps(total=STEPS):
        time.sleep(work_s * noise.gauss(1, 0.02))
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
