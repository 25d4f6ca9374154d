"""A training program with children: DataLoader workers, spawned and forked, and a command.

Attempt N leaves two lists of pids in the working directory: `children-N.json` with all of them, and
`end-N.json` with those that live when it leaves its loop, in whatever way.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hpctrain


class Numbers(Dataset):
    """Samples that say which process made them."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index % 7)), os.getpid()


def main() -> None:
    run = hpctrain.init()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    run.track(model=model, optimizer=optimizer)
    loaders = [
        DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method)
        for method in ("spawn", "fork")
    ]
    streams = [iter(loader) for loader in loaders]
    command = subprocess.Popen(["sleep", "600"])
    workers = list(chain.from_iterable(stream._workers for stream in streams))
    attempt = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"]
    pids = [*(worker.pid for worker in workers), command.pid]
    Path(f"children-{attempt}.json").write_text(json.dumps(pids))
    try:
        for _step in run.steps(total=30):
            optimizer.zero_grad()
            for stream in streams:
                samples, _made_by = next(stream)
                model(samples).sum().backward()
            optimizer.step()
            time.sleep(0.2)
    finally:
        alive = [w.pid for w in workers if w.is_alive()]
        alive += [command.pid] if command.poll() is None else []
        Path(f"end-{attempt}.json").write_text(json.dumps(alive))


if __name__ == "__main__":
    main()
