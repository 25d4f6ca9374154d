"""What a program tells of its steps and saves, and so what can be known of its run. Pure.

A program that knows nothing of hpctrain trains all the same, and none of its steps, losses and
checkpoints is known. Whatever is shown of a run asks here first, so that what nobody knows is
never shown as none. tests/unit/history/test_telling.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.core.base.records import EndReason
from hpctrain.core.base.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord

NO_STEP = "the program has reported no step"
HOW_TO_REPORT = (
    "`run.at(step)` reports steps, `run.sealed(step, path)` or checkpoint.sealed its checkpoints "
    "(`hpctrain help watching`)"
)
START_UP_S = 60.0
"""A program that has run so long without a word of a step is worth a line on how to tell them."""
LONGEST_START_UP_S = 600.0
"""One that knows hpctrain counts as starting up to then: it may be reading a checkpoint."""


@dataclass(frozen=True)
class Reported:
    """What the attempts of a run have told.

    Attributes:
        tells: At least one of them told a step.
        silent: Those whose ranks told none: all of them where none did, else those that ran longer
            than any other needed to its first step, or returned.
        saves: A checkpoint that hpctrain knows of was made or read.
        unaccounted: Of the silent ones those that cannot only have been starting.
        is_long: A silent one has run long enough to say that its program tells none.
    """

    tells: bool = False
    silent: tuple[int, ...] = ()
    saves: bool = False
    unaccounted: tuple[int, ...] = ()
    is_long: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether ranks ran and no attempt told a step."""
        return bool(self.silent) and not self.tells

    @property
    def not_known(self) -> str:
        """Why its steps, and what was lost of them, are not known; "" where they are.

        Also of a run in which some attempts told and others did not.
        """
        if not self.silent:
            return ""
        return _which(self.silent) if self.tells else NO_STEP

    def heard_of(self, attempt: int) -> Reported:
        """The same where this attempt's heartbeat has told a step."""
        others = () if not self.tells else tuple(one for one in self.silent if one != attempt)
        return replace(self, tells=True, silent=others)


@dataclass(frozen=True)
class StepsLost:
    """The steps that all attempts did in vain.

    Attributes:
        steps: As far as they were told; None where no attempt told any.
        why: What is not in it, or why there is none; "" where all is known.
    """

    steps: int | None
    why: str = ""


def reported(history: RunHistory, *, now: float | None = None) -> Reported:
    """What the attempts of a run have told.

    Args:
        history: The run's.
        now: How long the newest attempt has run by then, where its end is not on record.
    """
    ran = [attempt for attempt in history.attempts if attempt.reports_steps or _had_ranks(attempt)]
    startups = [startup_s(attempt) for attempt in ran if attempt.reports_steps]
    tells = bool(startups)
    longest = max((seconds for seconds in startups if seconds is not None), default=0.0)
    silent, unaccounted = [], []
    is_long = False
    for attempt in ran:
        if attempt.reports_steps:
            continue
        seconds = _lasted_s(attempt, now if attempt is history.newest else None)
        returned = attempt.reason is EndReason.COMPLETED
        if not tells or returned or seconds > longest:
            silent.append(attempt.number)
            is_long = is_long or returned or seconds >= START_UP_S
            knows_us = tells or attempt.initialised
            if returned or not knows_us or seconds > LONGEST_START_UP_S:
                unaccounted.append(attempt.number)
    saves = any(attempt.saves or attempt.from_checkpoint for attempt in history.attempts)
    known_saves = saves or history.newest_saved is not None
    return Reported(tells, tuple(silent), known_saves, tuple(unaccounted), is_long)


def startup_s(attempt: AttemptRecord) -> float | None:
    """From the start of an attempt's ranks to its first step; None where it told of none."""
    if attempt.first_step is None:
        return None
    return max(0.0, attempt.first_step - attempt.began)


def steps_lost(attempts: Sequence[AttemptView], words: Reported) -> StepsLost:
    """The steps that all attempts did in vain, and what is not known of them."""
    if words.is_silent:
        return StepsLost(None, NO_STEP)
    return StepsLost(sum(attempt.steps_lost or 0 for attempt in attempts), words.not_known)


def listens(history: RunHistory) -> bool:
    """Whether the newest attempt's program is known to use hpctrain, and so sees requests."""
    newest = history.newest
    return newest is not None and (newest.initialised or newest.restored is not None)


def _which(silent: Sequence[int]) -> str:
    if len(silent) == 1:
        return f"attempt {silent[0]} reported no step"
    return f"{count(len(silent), 'attempt')} reported no step"


def _had_ranks(attempt: AttemptRecord) -> bool:
    return attempt.started is not None and attempt.by != "batch"


def _lasted_s(attempt: AttemptRecord, now: float | None) -> float:
    end = attempt.ended
    if end is None:
        end = attempt.last_heard if now is None else now
    return max(0.0, end - attempt.began)
