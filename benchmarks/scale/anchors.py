"""Real points that the laws are held against, at the largest sizes that run here in seconds."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path


def look_s(files: int) -> float:
    """Looking at each of so many files in one folder."""
    with tempfile.TemporaryDirectory() as name:
        for number in range(files):
            Path(name, f"shard-{number:05d}").touch()
        began = time.perf_counter()
        with os.scandir(name) as entries:
            sizes = [entry.stat().st_size for entry in entries]
        assert len(sizes) == files
        return (time.perf_counter() - began) / files


def status_s(ranks: int) -> tuple[float, float]:
    """`hpctrain status` of a run of 30 days, and its MB of events."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.status_large import make_run, timed

    with tempfile.TemporaryDirectory() as name:
        run = make_run(Path(name) / "runs" / "large", ranks)
        seconds = min(timed(run, ["status", "--json"]) for _ in range(2))
        return seconds, run.events.stat().st_size / 1e6
