"""`run.loader` against torch's plain DataLoader over the same dataset, turn and turn about.

The plain one shuffles with torch's own sampler and reads the same numbers of samples. A sample is a
row of 1,024 tokens out of a memory-mapped file, made a tensor: little work, so that what is added
to it shows. The ratio is of throughputs, the median of those of all turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from collections.abc import Iterator

SEQUENCES, SEQ_LEN, BATCH = 20_000, 1024, 64
BATCHES, TURNS = 250, 9
GOAL = 0.95


class Rows(Dataset[Any]):
    """Sequences of tokens in a file."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.memmap(path, np.uint16, "r", shape=(SEQUENCES, SEQ_LEN + 1))

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.from_numpy(self._tokens[index].astype(np.int64))
        return row[:-1], row[1:]


def rate(batches: Iterator[Any]) -> float:
    """Batches per second."""
    started = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    return BATCHES / (time.perf_counter() - started)


def main() -> None:
    """Measure both in turn, with no worker and with two."""
    import hpctrain

    run = hpctrain.init()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(50_000, size=SEQUENCES * (SEQ_LEN + 1)).astype(
            np.uint16
        ).tofile(path)
        rows = Rows(path)
        for workers in (0, 2):
            ratios, rates = [], []
            for turn in range(TURNS + 1):
                plain = iter(DataLoader(rows, BATCH, shuffle=True, num_workers=workers))
                ours = run.loader(
                    rows, global_batch=BATCH, workers=workers, name=f"{workers}-{turn}"
                )
                next(plain), next(ours)  # starts the workers
                pair = [rate(plain), 0.0] if turn % 2 else [0.0, rate(ours)]
                pair = [pair[0] or rate(plain), pair[1] or rate(ours)]
                ours.close()
                del plain
                if turn:
                    ratios.append(pair[1] / pair[0])
                    rates.append(pair)
            median = statistics.median(ratios)
            plain_s, ours_s = (statistics.median(column) for column in zip(*rates, strict=True))
            print(
                f"workers {workers}: plain {plain_s:.0f}, run.loader {ours_s:.0f} batches/s of "
                f"{BATCH}; ratio {median:.3f}, {min(ratios):.3f} to {max(ratios):.3f} "
                f"(goal: at least {GOAL}) {'reached' if median >= GOAL else 'MISSED'}"
            )


if __name__ == "__main__":
    main()
