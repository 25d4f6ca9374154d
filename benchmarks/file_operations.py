"""What a run asks of the file system by ranks and nodes: counted by strace on real runs.

    python benchmarks/file_operations.py

Runs of several sizes on this machine. Of each phase the law a + b x ranks + c x nodes is printed,
of all metadata operations on the run's directory together. Rank 0's looks at shards are told apart:
of a save they end at a sample, which runs of this size do not reach.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

SIZES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1))
"""Nodes, and ranks on each."""
TRAIN_S = 10.0
PHASES = ("start", "train", "save", "save-behind", "resume")


def main() -> None:
    """Count, and print counts and laws."""
    from tests.support.file_operations import missing

    if lacking := missing():
        print(f"left out, missing: {', '.join(lacking)}")
        return
    counts = [counted(nodes, ranks) for nodes, ranks in SIZES]
    for (nodes, ranks), row in zip(SIZES, counts, strict=True):
        told = "; ".join(
            f"{phase} {count} + {looks}" for phase, (count, looks) in zip(PHASES, row, strict=True)
        )
        print(f"{nodes} nodes x {ranks} ranks (and looks at shards): {told}")
    sides = np.array([[1.0, nodes * ranks, nodes] for nodes, ranks in SIZES])
    for number, phase in enumerate(PHASES):
        observed = np.array([row[number][0] for row in counts], dtype=float)
        law, *_ = np.linalg.lstsq(sides, observed, rcond=None)
        off = float(np.abs(sides @ law - observed).max())
        words = f"{law[0]:.0f} + {law[1]:.1f} x ranks + {law[2]:.1f} x nodes"
        print(f"{phase:12} {words}, at most {off:.1f} off")


def counted(nodes: int, ranks: int) -> list[tuple[int, int]]:
    """Metadata operations of each phase, by all ranks and agents of one run; looks at shards."""
    from tests.support.file_operations import LOGIN, METADATA, of, trace

    script = Path(__file__).parents[1] / "tests" / "support" / "scripts" / "phases.py"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = ["--nodes", str(nodes), "--ranks-per-node", str(ranks)]
        where = ["--cluster", "local", "--no-snapshot", "--name", "counted", *size]
        command = [*where, "--set", "checkpoint.interval_steps=6", "--", str(script), str(TRAIN_S)]
        operations = trace(
            [sys.executable, "-m", "hpctrain", "submit", *command],
            folder / "trace",
            cwd=folder,
            env={**os.environ, "HPCTRAIN_LOCAL_DIR": str(folder / "local")},
        )
        below = folder / "runs" / "counted"
        told = []
        for phase in PHASES:
            asked = [
                one
                for one in of(operations, phase=phase, below=below)
                if one.owner != LOGIN and one.kind in METADATA
            ]
            looks = sum(one.kind == "look" and "/shard-" in one.path for one in asked)
            told.append((len(asked) - looks, looks))
        return told


if __name__ == "__main__":
    main()
