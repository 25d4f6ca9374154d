"""Runs of scripts on the embedded cluster, through the command line, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import cpus, patience

SCRIPTS = Path(__file__).parent / "scripts"
FRAMEWORKS = Path(__file__).parents[2] / "docs" / "frameworks.md"


def shown(framework: str) -> str:
    """The program that docs/frameworks.md shows of a framework."""
    section = FRAMEWORKS.read_text().partition(f"\n## {framework}\n")[2]
    return re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[1]


def hpctrain(folder: Path, *words: str, or_says: str = "") -> str:
    """Run a command in a folder, which also holds its local jobs; it must succeed.

    Or fail with `or_says` in its error, where that is given.
    """
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", *words],
        cwd=folder,
        env={**os.environ, "HPCTRAIN_LOCAL_DIR": str(folder / "local")},
        capture_output=True,
        text=True,
        check=False,
    )
    is_refused = or_says and or_says in done.stderr
    assert done.returncode == 0 or is_refused, done.stdout + done.stderr
    return done.stdout


def start(folder: Path, name: str, nodes: int | str, ranks: int, *words: str) -> Path:
    """Submit a run of nodes x ranks; `words` are flags, "--", script and arguments."""
    cpus.take(ranks * max(map(int, f"{nodes}".replace("+", "-").split("-"))))
    where = ["--cluster", "local", "--no-snapshot", "--name", name]
    hpctrain(
        folder, "submit", *where, "--nodes", f"{nodes}", "--ranks-per-node", f"{ranks}", *words
    )
    return folder / "runs" / name


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The facts of one kind, oldest first."""
    text = (run / "events.jsonl").read_text()
    told = [json.loads(line) for line in text.splitlines()]
    return [event for event in told if event["kind"] == kind]


def await_end(run: Path, attempts: int = 1) -> dict[str, Any]:
    """Wait for the end of the last of so many attempts."""

    def logs() -> dict[str, str]:
        newest = sorted(run.glob("attempts/*"))[-1:]
        return {log.name: log.read_text() for one in newest for log in one.glob("rank-*.log")}

    patience.until(lambda: len(events(run, "attempt_ended")) >= attempts, logs)
    return events(run, "attempt_ended")[-1]
