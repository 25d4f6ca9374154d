"""What follows from the facts, at one address: attempts, progress, state, lineage.

Pure functions of events; nothing here reads a file or asks a scheduler. tests/unit/test_derive.py
holds the promises.
"""

from __future__ import annotations

from hpctrain.history.attempts import AttemptView, Failure, attempts
from hpctrain.history.lineage import Lineage, Piece, coverage, lineage
from hpctrain.history.progress import Progress, progress
from hpctrain.history.run_state import OVER, RunState, Standing, live, run_state, standing

__all__ = [
    "OVER",
    "AttemptView",
    "Failure",
    "Lineage",
    "Piece",
    "Progress",
    "RunState",
    "Standing",
    "attempts",
    "coverage",
    "lineage",
    "live",
    "progress",
    "run_state",
    "standing",
]
