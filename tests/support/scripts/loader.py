"""A training program whose data is read by two spawned workers of each rank.

Every worker writes down each sample that it reads (its own number of the reading, and the index),
every rank what its steps trained on (the worker and that number), so that the two can be held
against each other. Attempts 1 to LOADER_STOPS wait at a step of their own until they are stopped.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import hpctrain

SIZE, GLOBAL_BATCH, STEPS = 251, 14, 2 * 18
STEPS_OF_ATTEMPT = 5
STOPS = int(os.environ.get("LOADER_STOPS", "5"))
WORKERS = 2


class Recorded(Dataset):
    """Samples that say who has read them; workers keep a record."""

    def __init__(self) -> None:
        self._readings = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        pid = os.getpid()
        self._readings += 1
        with Path(f"worker-{pid}.txt").open("a") as file:
            file.write(f"{self._readings} {index}\n")
        return index, pid, self._readings


def main() -> None:
    run = hpctrain.init()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(
        Recorded(), global_batch=GLOBAL_BATCH, workers=WORKERS, start_method="spawn"
    )
    attempt = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"]
    record = Path(f"steps-{attempt}-{run.world.rank}.txt")
    for step in run.steps(total=STEPS):
        index, pid, reading = next(loader)
        optimizer.zero_grad()
        (model(index[:, None].float()).mean() * loader.weight).backward()
        optimizer.step()
        rows = zip(pid.tolist(), reading.tolist(), index.tolist(), strict=True)
        counted = [row for row in rows if row[2] in loader.taken.consumed]
        with record.open("a") as file:
            file.write(json.dumps([step, loader.taken.first, counted]) + "\n")
        if attempt <= STOPS and step + 1 == attempt * STEPS_OF_ATTEMPT:
            if run.world.rank == 0:
                Path(f"waits-{attempt}").touch()
            while not run.should_stop():
                time.sleep(0.02)


if __name__ == "__main__":
    main()
