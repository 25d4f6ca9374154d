"""The progress of a run: how far it is, and how its saves go. Pure.

tests/unit/history/test_attempts.py and tests/unit/cli/test_status.py hold the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from hpctrain.history.run_history import Restore, StepMark

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.history.run_history import RunHistory, SaveRecord


@dataclass(frozen=True)
class Progress:
    """How far the run is.

    Attributes:
        step: Updates that the newest state has.
        total: How many there will be, where that is known.
        loss: Of the last step mark.
        step_s: Seconds per step, by the last step mark.
        seen: When a step, a save (also one that failed or was skipped) or a restore was last heard
            of.
        saved_step: The newest checkpoint that was committed and not gone back behind.
        saved_t: When.
        saved_bytes: Its size.
    """

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    step_s: float | None = None
    seen: float | None = None
    saved_step: int | None = None
    saved_t: float | None = None
    saved_bytes: int | None = None


@dataclass(frozen=True)
class SaveInterval:
    """How often the run saves, as its newest attempt said.

    Attributes:
        seconds: Between two saves; None where steps count.
        steps: The same in steps; None where seconds count.
        why: What decided.
        cost_s: What training loses to one save, as it was measured.
        mtbf_s: Seconds between failures, as they were expected.
    """

    seconds: float | None = None
    steps: int | None = None
    why: str = ""
    cost_s: float | None = None
    mtbf_s: float | None = None


@dataclass(frozen=True)
class Missed:
    """A save that was due and did not come."""

    step: int | None
    why: str


@dataclass(frozen=True)
class Saving:
    """How saving goes in the newest attempt that came to train.

    Attributes:
        interval: How often; None where the ledger does not say.
        since: From when on the interval counts: the last save or the restore.
        committed: Saves that were committed.
        skipped: Saves that were left out while the one before was still being written.
        last_skipped: The newest of them.
        failed: Saves that failed since the last one that was committed.
        last_failed: The newest of them.
        mode: How the newest was written: "async" or "sync".
        seconds: How long it took until it was committed.
        stall_s: How long training waited for it.
    """

    interval: SaveInterval | None = None
    since: float | None = None
    committed: int = 0
    skipped: int = 0
    last_skipped: Missed | None = None
    failed: int = 0
    last_failed: Missed | None = None
    mode: str = ""
    seconds: float | None = None
    stall_s: float | None = None


def progress(history: RunHistory) -> Progress:
    """How far the run is; a restore of an older step takes it back."""
    newest = history.training[-1] if history.training else None
    step = newest.step if isinstance(newest, Restore) else None
    timed = (mark for mark in _marks(history) if mark.fact.seconds and mark.steps)
    saved = history.kept_save or (None, None, None)
    return Progress(
        step=newest.fact.last if isinstance(newest, StepMark) else step,
        total=history.total_steps,
        loss=next((mark.fact.loss for mark in _marks(history)), None),
        step_s=next(((mark.fact.seconds or 0.0) / mark.steps for mark in timed), None),
        seen=history.seen,
        saved_step=saved[0],
        saved_t=saved[1],
        saved_bytes=saved[2],
    )


def _marks(history: RunHistory) -> Iterator[StepMark]:
    """The newest first."""
    return (told for told in reversed(history.training) if isinstance(told, StepMark))


def saving(history: RunHistory) -> Saving:
    """How saving goes; what an earlier attempt missed is in the steps that it lost."""
    saves = [save for save in history.saves if save.restores == history.restores]
    committed = [save for save in saves if save.committed]
    skipped = [save for save in saves if save.kind == "save_skipped"]
    since = list(takewhile(lambda save: not save.committed, reversed(saves)))
    failed = [save for save in reversed(since) if save.kind == "save_failed"]
    newest = committed[-1] if committed else None
    return Saving(
        interval=_interval(history),
        since=_since(saves[-1]) if saves else history.restored_t,
        committed=len(committed),
        skipped=len(skipped),
        last_skipped=_missed(skipped),
        failed=len(failed),
        last_failed=_missed(failed),
        mode=newest.mode if newest is not None else "",
        seconds=newest.seconds if newest is not None else None,
        stall_s=newest.stall_s if newest is not None else None,
    )


def _interval(history: RunHistory) -> SaveInterval | None:
    fact = history.interval
    if fact is None:
        return None
    each = fact.seconds or None, fact.steps or None
    return SaveInterval(*each, fact.why, fact.cost_s, fact.mtbf_s)


def _since(save: SaveRecord) -> float:
    """Training had gone on long before a save in the background was committed."""
    if not save.committed or save.seconds is None or save.stall_s is None:
        return save.t
    return save.t - max(0.0, save.seconds - save.stall_s)


def _missed(saves: Sequence[SaveRecord]) -> Missed | None:
    return Missed(saves[-1].step, saves[-1].why) if saves else None
