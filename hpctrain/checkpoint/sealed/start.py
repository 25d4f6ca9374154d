"""What the ranks of an attempt go on from, written down: asked once before they start.

tests/unit/checkpoint/sealed/test_start.py holds the promises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.sealed.resume import Choice
from hpctrain.history.run_history import RunHistory
from hpctrain.run import events as ledger
from hpctrain.run.event_types import CheckpointSetAside, ResumeChosen

if TYPE_CHECKING:
    from hpctrain.checkpoint.sealed.resume import Resume
    from hpctrain.run.fence import Attempt
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import CheckpointSettings

log = logging.getLogger("hpctrain.checkpoint")


def resume_at_start(run: RunDir, attempt: Attempt, settings: CheckpointSettings) -> str | None:
    """The path of the newest whole sealed checkpoint; None in a run that has sealed nothing.

    Args:
        run: The run.
        attempt: The attempt that begins; nothing of the run writes but the caller.
        settings: How long a file system is waited for.

    Raises:
        CheckpointError: see `Choice.choose`.
    """
    if not seals.has_any(run):
        return None
    asked = RunHistory.read(run, marks="few").asked_seal
    resume = Choice(run, attempt, patience_s=settings.patience_s).choose(at_step=asked)
    _write_down(run, attempt, resume)
    if resume.path is None:
        return None
    step = "" if resume.step is None else f" of step {resume.step}"
    log.info("the newest whole sealed checkpoint%s is %s", step, resume.path)
    return str(resume.path)


def _write_down(run: RunDir, attempt: Attempt, resume: Resume) -> None:
    for torn in resume.set_aside:
        fact = CheckpointSetAside(name=torn.name, step=torn.step or None, reason=torn.reason)
        ledger.record(run, fact, attempt=attempt.number)
    chosen = ResumeChosen(
        step=resume.step,
        path=str(resume.path or ""),
        name=resume.name,
        seconds=round(resume.seconds, 3),
        bytes_read=resume.read_bytes,
        put_back=resume.put_back,
        skipped=resume.skipped,
    )
    ledger.record(run, chosen, attempt=attempt.number)
