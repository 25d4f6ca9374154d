"""How far a run is, how its saves go, how fast it trains, what its program reports. Pure.

A program may report nothing of its steps: what nobody knows is never shown as none.
tests/unit/history and tests/unit/cli/test_status.py hold the
promises.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base.records import EndReason
from hpctrain.core.base.text import count
from hpctrain.ledger.history.run_records import AttemptRecord, Restore, StepMark
from hpctrain.ledger.run.event_fields import finite, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import SaveRecord
    from hpctrain.ledger.run import event_types as facts


@dataclass(frozen=True)
class Progress:
    """How far the run is.

    Attributes:
        step: Updates that the newest state has.
        total: How many there will be, where that is known.
        loss: Of the last step mark.
        step_s: Seconds per step, by the last step mark.
        seen: When a step, a save (also one that failed) or a restore was last heard of.
        saved_step: The newest checkpoint that was committed and not gone back behind.
        saved_bytes: Its size.
    """

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    step_s: float | None = None
    seen: float | None = None
    saved_step: int | None = None
    saved_bytes: int | None = None


@dataclass(frozen=True)
class Missed:
    """A save that was due and did not come."""

    step: int | None
    why: str


@dataclass(frozen=True)
class Saving:
    """How saving goes in the newest attempt that came to train.

    Attributes:
        interval: As the newest attempt said; None where the ledger does not say.
        since: From when on the interval counts: the last save or the restore.
        committed: Saves that were committed.
        skipped: Saves that were left out while the one before was still being written.
        failed: Saves that failed since the last one that was committed.
        mode: How the newest was written: "async" or "sync".
        seconds: How long it took until it was committed.
        stall_s: How long training waited for it.
    """

    interval: facts.IntervalSet | None = None
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
        saved_bytes=saved[2],
    )


def _marks(history: RunHistory) -> Iterator[StepMark]:
    return (fact for fact in reversed(history.training) if isinstance(fact, StepMark))


def saving(history: RunHistory) -> Saving:
    """How saving goes; what an earlier attempt missed is in the steps that it lost."""
    saves = [save for save in history.saves if save.restores == history.restores]
    committed = [save for save in saves if save.committed]
    skipped = [save for save in saves if save.kind == "save_skipped"]
    since = list(takewhile(lambda save: not save.committed, reversed(saves)))
    failed = [save for save in reversed(since) if save.kind == "save_failed"]
    newest = committed[-1] if committed else None
    return Saving(
        interval=history.interval,
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


def _since(save: SaveRecord) -> float:
    """Training continued long before a save in the background was committed."""
    if not save.committed or save.seconds is None or save.stall_s is None:
        return save.t
    return save.t - max(0.0, save.seconds - save.stall_s)


def _missed(saves: Sequence[SaveRecord]) -> Missed | None:
    return Missed(saves[-1].step, saves[-1].why) if saves else None


@dataclass(frozen=True)
class RankSample:
    """Where the ranks' time went in a window of steps; a value for each rank, None for not known.

    Attributes:
        t: End of the window.
        step: Last step.
        steps: How many.
        wall_s: All of the window.
        data_s: Waiting for data.
        own_s: A rank's work before it first waits for others.
        peak_bytes: Memory in use at most.
        reserved_bytes: Memory taken from the device.
        retries: Allocations that needed the cache to be emptied first.
    """

    t: float
    attempt: int
    step: int
    steps: int
    wall_s: tuple[float, ...]
    data_s: tuple[float, ...] | None = None
    own_s: tuple[float, ...] | None = None
    peak_bytes: tuple[float, ...] | None = None
    reserved_bytes: tuple[float, ...] | None = None
    retries: tuple[float, ...] | None = None

    @property
    def busy_s(self) -> tuple[float, ...]:
        """What tells the slow rank from those that wait for it; the whole time where unknown."""
        return self.wall_s if self.own_s is None else self.own_s


def rank_sample(line: bytes, attempt: int) -> RankSample | None:
    """One line of an attempt's ranks.jsonl; None for what is no whole sample."""
    try:
        raw = json.loads(line)
    except ValueError:  # torn, or not UTF-8
        return None
    if not isinstance(raw, dict):
        return None
    t, steps, wall_s = finite(raw.get("t")), whole(raw.get("steps")), _each(raw.get("wall_s"))
    if t is None or not steps or steps < 0 or not wall_s:
        return None
    names = ("data_s", "own_s", "mem_peak_bytes", "mem_reserved_bytes", "mem_retries")
    optional = [_each(raw.get(name), len(wall_s)) for name in names]
    return RankSample(t, attempt, whole(raw.get("step")) or 0, steps, wall_s, *optional)


def newest_sample(content: bytes, attempt: int) -> RankSample | None:
    """The last whole sample at the end of a ranks.jsonl; None where there is none."""
    lines = reversed(content.split(b"\n"))
    return next((found for line in lines if (found := rank_sample(line, attempt))), None)


def _each(value: object, ranks: int = 0) -> tuple[float, ...] | None:
    if not isinstance(value, list) or (ranks and len(value) != ranks):
        return None
    numbers = [finite(one) for one in value]
    return None if None in numbers else tuple(one for one in numbers if one is not None)


def peak_flops(device: str) -> float | None:
    """FLOP/s of one device at best, by its name in torch; None for one that is not known."""
    name = device.strip()
    return next((peak for known, peak in peaks().items() if re.fullmatch(known, name)), None)


@cache
def peaks() -> dict[str, float]:
    """peaks.toml: names of devices as patterns, and their FLOP/s."""
    return tomllib.loads(Path(__file__).with_name("peaks.toml").read_text("utf-8"))


WINDOW_S = 600.0
MARKS = 20
LOOKED_AT = 2 * MARKS
"""Marks that nothing can be counted with leave enough others."""


@dataclass(frozen=True)
class Speed:
    """Speed over the newest marks, ten minutes or 20 of them; None where the marks do not say.

    Attributes:
        step_p50_s: Median of the marks' medians, each weighted by its steps.
        step_p95_s: The same of the marks' 95th percentiles: that of a typical stretch.
        steps_per_s: Over wall time, so saves and waits count; so below, of all ranks.
        mfu: Share of what the devices could do at best, where that is known.
        data_share: Share of wall time in which rank 0 waited for data.
        slow_rank: The slowest rank by its own work.
        slow_by: By how much it is above the ranks' median, e.g. 0.04.
        skipped: Steps within the window whose update was skipped.
        window_s: Seconds that the marks tell about.
    """

    step_p50_s: float | None = None
    step_p95_s: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    data_share: float | None = None
    slow_rank: int | None = None
    slow_by: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    skipped: int = 0
    window_s: float = 0.0


def speed(history: RunHistory) -> Speed | None:
    """How fast the newest attempt is; None until its first mark after the newest restore."""
    resumed = [attempt for attempt in history.attempts if attempt.resume >= 0]
    if not resumed:
        return None
    since = max(resumed[-1].marks_before, len(resumed[-1].marks) - LOOKED_AT)
    marks = [mark for mark in resumed[-1].marks[since:] if mark.steps and mark.fact.seconds]
    if not marks:
        return None
    # A stretch in which the job was suspended says nothing of its speed.
    marks = [mark for mark in marks if not _was_suspended(resumed[-1], mark)] or marks
    window = _window(marks)
    before = marks[len(marks) - len(window) - 1] if len(marks) > len(window) else None
    flops_per_s = _rate(window, lambda mark: finite(mark.fact.flops))
    device, ranks = resumed[-1].device, resumed[-1].world_size
    peak = peak_flops(device)
    mfu = flops_per_s / (peak * ranks) if flops_per_s and peak and ranks else None
    norms = (finite(mark.fact.grad_norm) for mark in reversed(window))
    slow = next((mark.fact for mark in reversed(window) if mark.fact.slow_rank is not None), None)
    return Speed(
        step_p50_s=_typical(window, lambda mark: mark.fact.p50_s or _seconds(mark) / mark.steps),
        step_p95_s=_typical(window, lambda mark: mark.fact.p95_s),
        steps_per_s=_rate(window, lambda mark: float(mark.steps)),
        samples_per_s=_rate(window, _samples),
        tokens_per_s=_rate(window, lambda mark: finite(mark.fact.tokens)),
        flops_per_s=flops_per_s,
        mfu=mfu,
        data_share=_data_share(window, before),
        slow_rank=slow.slow_rank if slow else None,
        slow_by=slow.slow_by if slow else None,
        loss=finite(window[-1].fact.loss),
        grad_norm=next((norm for norm in norms if norm is not None), None),
        skipped=sum(mark.fact.skipped or 0 for mark in window),
        window_s=sum(_seconds(mark) for mark in window),
    )


def _was_suspended(attempt: AttemptRecord, mark: StepMark) -> bool:
    return any(
        stretch.start < mark.t and (stretch.end or mark.t) > mark.t - _seconds(mark)
        for stretch in attempt.suspended
    )


def _seconds(mark: StepMark) -> float:
    return mark.fact.seconds or 0.0


def _window(marks: Sequence[StepMark]) -> Sequence[StepMark]:
    newest = marks[-1].t
    return [m for m in marks[-MARKS:] if newest - m.t < WINDOW_S or m is marks[-1]]


def _typical(window: Sequence[StepMark], value: Callable[[StepMark], float | None]) -> float | None:
    """Median of the marks' values, each weighted by its steps."""
    weighted = sorted((v, mark.steps) for mark in window if (v := value(mark)) is not None)
    half, seen = sum(steps for _, steps in weighted) / 2, 0
    for middle, steps in weighted:
        seen += steps
        if seen >= half:
            return middle
    return None


def _rate(window: Sequence[StepMark], value: Callable[[StepMark], float | None]) -> float | None:
    """Sum over seconds, of the marks that tell the value."""
    rates = [(found, _seconds(mark)) for mark in window if (found := value(mark)) is not None]
    return sum(v for v, _ in rates) / sum(s for _, s in rates) if rates else None


def _samples(mark: StepMark) -> float | None:
    first, last = mark.fact.sample_first, mark.fact.sample_last
    return None if first is None or last is None or last < first else last - first


def _data_share(window: Sequence[StepMark], before: StepMark | None) -> float | None:
    """`data_s` counts from the attempt's first step, so it takes two marks, or the first one."""
    base = before or (window[0] if len(window) > 1 else None)
    last = window[-1].fact.data_s
    if last is None:
        return None
    if base is None:
        return _share(last, _seconds(window[-1]))
    first = base.fact.data_s
    return None if first is None else _share(last - first, window[-1].t - base.t)


def _share(part: float, of: float) -> float | None:
    return min(1.0, max(0.0, part / of)) if of > 0 else None


# ---- what a program reports

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
        steps: As far as they were reported; None if no attempt reported any.
        why: What is not in it, or why there is none; "" where all is known.
    """

    steps: int | None
    why: str = ""


def reported(history: RunHistory, *, now: float | None = None) -> Reported:
    """What the attempts of a run have told; the newest one without an end has run until `now`."""
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
