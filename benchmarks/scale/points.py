"""Real points, as they stand in constants.toml: what was run, when, at which commit, how busy.

Everything behind the mark in that file is written here; a new point takes the place of the one
with the same name and size.
"""

from __future__ import annotations

import os
import subprocess
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("constants.toml")
MARK = "# Points: written by `python -m benchmarks.scale --run NAME`.\n"
SIZES = ("ranks", "nodes", "agents", "levels")


def points(of: str) -> list[dict[str, Any]]:
    """Those of a name, by size."""
    named = [point for point in _all() if point["of"] == of]
    return sorted(named, key=lambda point: [point.get(size, 0) for size in SIZES])


def record(of: str, measured: Any) -> None:
    """Write a point down.

    Args:
        of: What was measured.
        measured: A dataclass of numbers.
    """
    point = {
        "of": of,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git_head(),
        "load": round(os.getloadavg()[0], 1),
        **{name: _short(value) for name, value in asdict(measured).items()},
    }
    kept = [other for other in _all() if _key(other) != _key(point)]
    text, _, _ = FILE.read_text().partition(MARK)
    listed = sorted([*kept, point], key=_key)
    FILE.write_text(text + MARK + "".join(map(_text, listed)))


def _all() -> list[dict[str, Any]]:
    return list(tomllib.loads(FILE.read_text()).get("point", []))


def _key(point: dict[str, Any]) -> tuple[Any, ...]:
    return (point["of"], *(point.get(size, 0) for size in SIZES))


def _text(point: dict[str, Any]) -> str:
    lines = [
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value!r}"
        for name, value in point.items()
    ]
    return "\n[[point]]\n" + "\n".join(lines) + "\n"


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.3g}")


def _git_head() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
