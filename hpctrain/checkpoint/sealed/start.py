"""What the ranks of an attempt go on from, written down: asked once before they start.

tests/unit/agent/test_sealing.py holds the promises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpctrain.checkpoint.format.patience import Patience
from hpctrain.checkpoint.sealed import seals
from hpctrain.checkpoint.sealed.proof import proves_itself
from hpctrain.checkpoint.sealed.resume import Choice, Resume, refuse_lost_seals, set_aside
from hpctrain.checkpoint.sealed.unsealed import RETURNED, Unsealed, cut, roots_of, seal
from hpctrain.checkpoint.store import find
from hpctrain.errors import FileSystemFault
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointSetAside, ResumeChosen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.checkpoint.sealed.unsealed import UnsealedSave
    from hpctrain.core.base.records import Skipped
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.checkpoint")


def resume_at_start(
    run: RunDir,
    attempt: Attempt,
    settings: CheckpointSettings,
    *,
    cwd: str = "",
    on_bytes: Callable[[int], object] | None = None,
) -> str | None:
    """Return the path of the newest complete registered checkpoint; None if nothing was registered.

    Nothing of the run may write but the caller. Several threads call `on_bytes` for each part that
    is read; what it raises ends all. `cwd` is the program's working directory, "" for none.

    Raises:
        CheckpointError: see `Choice.choose`; or the run's seals are gone.
    """
    history = RunHistory.read(run, marks="few") if attempt.number > 1 else RunHistory()
    asked = history.asked_seal
    is_anew = attempt.number == 1 or asked is not None
    aside: list[Skipped] = []
    unsealed = Unsealed(run, settings.sealed, roots_of(run, cwd))
    if settings.sealed and not is_anew:
        _patiently(
            settings,
            lambda: _take_in(run, attempt, settings, unsealed, aside=aside, on_bytes=on_bytes),
        )
    _set_aside(run, attempt, aside)
    resume = None
    if seals.has_any(run):
        choice = Choice(run, attempt, patience_s=settings.patience_s, on_bytes=on_bytes)
        resume = choice.choose(at_step=asked)
    else:
        resume = _without_seals(run, history)
    if settings.sealed and is_anew:
        _patiently(settings, lambda: unsealed.remember_before(attempt, anew=True))
    if resume is None:
        return None
    _write_down(run, attempt, resume)
    if resume.path is None:
        return None
    step = "" if resume.step is None else f" of step {resume.step}"
    log.info("the newest complete registered checkpoint%s is %s", step, resume.path)
    return str(resume.path)


def _without_seals(run: RunDir, history: RunHistory) -> Resume | None:
    """What a run without seals goes on from: None where that is for others to say."""
    if history.asked_seal is not None:
        # Written down, or each start after it would go back again.
        return None if find.steps(run) else Resume()
    # Checkpoints are listed only where seals are missed: memory may hold the state of a run whose
    # disk gives errors. Where there are some it has changed over to checkpoints of ours.
    if history.sealed_path and not find.steps(run):
        refuse_lost_seals(run, history)
    return None


def _patiently(settings: CheckpointSettings, act: Callable[[], None]) -> None:
    try:
        Patience(settings.patience_s)(act)
    except OSError as error:
        raise FileSystemFault(f"checkpoints cannot be looked at: {error}") from error


def _take_in(
    run: RunDir,
    attempt: Attempt,
    settings: CheckpointSettings,
    unsealed: Unsealed,
    *,
    aside: list[Skipped],
    on_bytes: Callable[[int], object] | None,
) -> None:
    """Seal what the last attempt saved and nobody sealed; `aside` takes what is torn.

    If its ranks had not returned, take only the newest file that its own checksums prove: a kill
    may have left anything else half written.
    """
    unsealed.remember_before(attempt, anew=False)
    units = unsealed.due()
    returned = (run.attempt(attempt.number - 1) / RETURNED).exists()
    left: list[UnsealedSave] = []
    while units:
        save = units.pop(0 if returned else -1)
        path = save.match.path
        why = cut(save, on_bytes)
        if why is not None and save.is_file:
            aside += set_aside(path, attempt.number, why, step=save.match.step)
        elif why is None and (returned or (save.is_file and proves_itself(path, on_bytes))):
            seal(run, attempt, save, settings, on_bytes)
            if not returned:
                left += units
                break
        else:
            unsealed.refuse(path, why or "a kill may have left it half written")
            left.append(save)
    # It lies still, as what is whole does: the watch beside the next ranks would seal it.
    unsealed.pass_over(left)


def _set_aside(run: RunDir, attempt: Attempt, aside: Sequence[Skipped]) -> None:
    for torn in aside:
        fact = CheckpointSetAside(name=torn.name, step=torn.step or None, reason=torn.reason)
        ledger.record(run, fact, attempt=attempt.number)


def _write_down(run: RunDir, attempt: Attempt, resume: Resume) -> None:
    _set_aside(run, attempt, resume.set_aside)
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
