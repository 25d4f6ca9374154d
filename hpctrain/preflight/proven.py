"""Which nodes of a run have been seen to reduce fast, and when: a requeue need not try them again.

tests/unit/test_preflight_proven.py holds the promises.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from hpctrain.base.files import read_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hpctrain.run.layout import RunDir

NAME = "proven-nodes.json"
HOUR_S = 3600.0


def of_run(run: RunDir) -> Path:
    """The list of a run."""
    return run.root / NAME


def read(path: Path) -> dict[str, float]:
    """Each node to the time when it was last proven; a list that is torn or absent has none."""
    try:
        raw = json.loads(read_plain(path))
        return {str(node): float(t) for node, t in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def are_proven(path: Path, nodes: Sequence[str], hours: float, *, now: float | None = None) -> bool:
    """Whether all of these nodes were proven in the last so many hours."""
    now = time.time() if now is None else now
    known = read(path)
    return all(now - known.get(node, 0.0) < hours * HOUR_S for node in nodes)


def note(path: Path, nodes: Iterable[str], *, now: float | None = None) -> None:
    """Write down that these nodes are fast together.

    Raises:
        OSError: it cannot be written.
    """
    now = time.time() if now is None else now
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    staged.write_text(json.dumps(read(path) | dict.fromkeys(nodes, now)) + "\n")
    staged.replace(path)
