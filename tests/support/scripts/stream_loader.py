"""A training program over a Hugging Face IterableDataset with a worker in each rank.

Every rank writes down the numbers that its steps trained on. Attempts 1 and 2 wait at a step of
their own until they are stopped.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn

import hpctrain

SIZE, SHARDS, GLOBAL_BATCH, STEPS = 240, 12, 10, 36
STEPS_OF_ATTEMPT, STOPS = 6, 2


def main() -> None:
    run = hpctrain.init()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    run.track(model=model, optimizer=optimizer)
    rows = Dataset.from_dict({"number": list(range(SIZE))}).to_iterable_dataset(num_shards=SHARDS)
    loader = run.stream_loader(rows, global_batch=GLOBAL_BATCH, workers=1)
    attempt = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"]
    record = Path(f"steps-{attempt}-{run.world.rank}.txt")
    for step in run.steps(total=STEPS):
        numbers = next(loader)["number"]
        optimizer.zero_grad()
        (model(numbers[:, None].float()).mean() * loader.weight).backward()
        optimizer.step()
        used = [
            n for n, w in zip(numbers.tolist(), loader.taken.pieces[0].weights, strict=True) if w
        ]
        with record.open("a") as file:
            file.write(json.dumps([loader.epoch, used]) + "\n")
        if attempt <= STOPS and step + 1 == attempt * STEPS_OF_ATTEMPT:
            if run.world.rank == 0:
                Path(f"waits-{attempt}").touch()
            while not run.should_stop():
                time.sleep(0.02)


if __name__ == "__main__":
    main()
