"""Real points that the laws are held against, at the largest sizes that run here in seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MESSAGE_BYTES = 300
ROUNDS = 2000


def hop_s() -> float:
    """One way of a message between two processes of Python, over a pipe; the best of three."""
    ours, theirs = multiprocessing.Pipe()
    echo = multiprocessing.get_context("fork").Process(target=_echo, args=(theirs,), daemon=True)
    echo.start()
    message = bytes(MESSAGE_BYTES)
    best = min(_rounds(ours, message) for _ in range(3))
    ours.send_bytes(b"")
    echo.join()
    return best / 2


def _rounds(ours: Connection, message: bytes) -> float:
    began = time.perf_counter()
    for _ in range(ROUNDS):
        ours.send_bytes(message)
        ours.recv_bytes()
    return (time.perf_counter() - began) / ROUNDS


def _echo(theirs: Connection) -> None:
    while message := theirs.recv_bytes():
        theirs.send_bytes(message)


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
