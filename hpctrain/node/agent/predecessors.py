"""The last look at the runs that must be done before this one begins.

The scheduler starts a follower when the jobs before it have ended with exit code 0. That is not the
same as done: a run that was asked to save and leave ends so too, and a scheduler takes a job that
it has forgotten for one that ended well. The predecessors' ledgers decide.
tests/unit/agent/test_predecessors.py and tests/slurm/test_after.py hold the promises.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import HeldBack
from hpctrain.ledger.run.fence import look_anew
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("hpctrain.agent")


def held_back(run: RunDir, after: Sequence[str], job_id: str) -> str:
    """Return why a job of the run must not begin, and write that down; "" if it may.

    A run whose ranks were started once continues, whatever became of its predecessors since.
    `after` has their directories.

    Raises:
        OSError: a ledger cannot be read.
    """
    if not after or RunHistory.read(run, marks="few").has_begun:
        return ""
    why = next(filter(None, (_unfinished(run, RunDir(Path(path))) for path in after)), "")
    if why:
        log.error("job %s of %s does not begin: %s", job_id, run.name, why)
        ledger.record(run, HeldBack(job_id=job_id, why=why))
    return why


def _unfinished(run: RunDir, predecessor: RunDir) -> str:
    """Why the predecessor counts as not done, and what to do, or ""."""
    look_anew(predecessor.root)
    phase = RunHistory.read(predecessor, marks="few").state.phase
    if phase is RunState.DONE:
        return ""
    resume, itself = (f"`hpctrain resume {shlex.quote(one.name)}`" for one in (predecessor, run))
    to_run = f"it is to run after {predecessor.name}"
    if not predecessor.root.is_dir():
        return f"{to_run}, and {predecessor.root} is not there any more: submit it anew"
    if phase in OVER or phase is RunState.CREATED:
        return f"{to_run}, which is {phase.value} and not done: {resume}, then {itself}"
    return f"{to_run}, which is {phase.value}: {itself} has it wait"
