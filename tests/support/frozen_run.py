"""A copy of the frozen run, as if it had been made in another folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

FROZEN = Path(__file__).parents[1] / "data" / "frozen-run"
HERE = b"@HERE@"
"""Stands in its files for the folder in which it was made."""
PYTHON = HERE + b"/hpctrain/.venv/bin/python"
"""Ran it, and runs it on: an environment is updated where it lies."""


def copy_of_frozen_run(folder: Path) -> Path:
    """Put run, program and a ledger of every kind of event into a folder; returns the run's."""
    shutil.copy(FROZEN / "program.py", folder)
    run = folder / "runs" / "gpt"
    shutil.copytree(FROZEN / "run", run)
    other = folder / "runs" / "every-kind"
    other.mkdir()
    shutil.copy(FROZEN / "run" / "spec.json", other)
    shutil.copy(FROZEN / "every-kind.jsonl", other / "events.jsonl")
    for path in run.rglob("*"):
        if path.suffix in {".json", ".jsonl", ".log", ".sh"}:
            text = path.read_bytes().replace(PYTHON, sys.executable.encode())
            path.write_bytes(text.replace(HERE, str(folder).encode()))
    return run
