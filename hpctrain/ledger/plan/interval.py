"""The time between two saves: from what a save costs and how often runs die, within bounds.

Pure. The bounds are promises and beat the formula: what a hard kill may cost, and that every job
leaves something behind. tests/unit/plan/test_interval.py holds the promises.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base.records import EndReason
from hpctrain.core.base.text import duration
from hpctrain.ledger.history.attempts import attempts

if TYPE_CHECKING:
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.run_history import RunHistory

PRIOR_NODE_S = 30 * 86400.0
"""Seconds that one node is believed to train until it fails, before the run has a record."""
FIRST_GUESS_S = 600.0
"""The first save is to come soon: it is what tells the cost of the others."""
STALL_SHARE = 0.05
"""Saves that training waits for take about this share of the time at most."""
WRITES_APART = 2.0
"""Background writes leave the file system free for at least as long as they use it."""
JOB_SHARE = 0.25
"""Share of a job's whole time that may pass without a save."""
SHORTEST_S = 10.0
"""A shorter interval gains seconds at a failure and keeps a shared metadata server busy."""
CLOCK_SAFETY = 1.5
"""Times the longest save is kept free before a job's end."""
LEAVE_S = 3.0
"""Kept free before the kill: for the processes to leave and for the agent to requeue."""
LAST_SAVE_SAFETY = 1.3
"""What is planned with is an estimate: a save that ends a moment too late is no save."""
SAVES_COUNTED = 5
"""Newest saves that tell the cost: few enough to follow a change of ranks or of the file system."""

_SUDDEN = frozenset(
    {
        EndReason.NODE_FAILED,
        EndReason.STORAGE_FAILED,
        EndReason.CRASHED,
        EndReason.UNKNOWN,
        None,
    }
)
_WARNED = frozenset({EndReason.PREEMPTED, EndReason.REQUEUED, EndReason.TIMED_OUT})


@dataclass(frozen=True)
class Failures:
    """A run's record.

    Attributes:
        count: Attempts that ended without a chance to save.
        observed_s: Seconds that were trained or meant to, over all attempts.
    """

    count: int = 0
    observed_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What saves have cost of late.

    Attributes:
        cost_s: What training loses to one.
        write_s: From its beginning until it is committed; the same where training waits for it.
    """

    cost_s: float
    write_s: float


@dataclass(frozen=True)
class Interval:
    """When the next save is due.

    Attributes:
        seconds: After the last one; 0 where steps count.
        steps: Save every so many steps; 0 where seconds count.
    """

    seconds: float
    why: str
    steps: int = 0


def failures(history: RunHistory) -> Failures:
    """How often the run lost what it had done since its last save, and in how much time.

    A sudden end counts. An end that came with a warning counts only where no save was made of it.
    What people decide (a cancel) and a program's error before its first step are no failures.
    Attempts that never came to train are left out with their time: they had nothing to lose.
    """
    trained = [attempt for attempt in attempts(history) if attempt.last_step is not None]
    count = sum(1 for attempt in trained if attempt.ended is not None and _is_failure(attempt))
    until = [a.heard or a.started if a.ended is None else a.ended for a in trained]
    seconds = (end - attempt.started for end, attempt in zip(until, trained, strict=True))
    return Failures(count, sum(max(0.0, one) for one in seconds))


def _is_failure(attempt: AttemptView) -> bool:
    kept = max(attempt.last_saved_step or 0, attempt.first_step or 0)
    lost = (attempt.last_step or 0) > kept
    if attempt.reason in _SUDDEN:
        # One that was asked to stop, saved and left may have died before its end was on record.
        return lost or attempt.stop_cause is None
    return attempt.reason in _WARNED and lost


def costs(history: RunHistory) -> Costs | None:
    """What the newest saves have cost, also those of earlier attempts; None before the first.

    The median, since one slow moment of the file system says little about the next save. Saves on
    the way out are left out: training is over by then, and waits for all of the write.
    """
    saves = [save for save in history.saves if save.kind == "saved" and not save.leaving]
    both = ((s.seconds if s.stall_s is None else s.stall_s, s.seconds or 0.0) for s in saves)
    durations = [(stall, max(stall, write)) for stall, write in both if stall is not None]
    newest = durations[-SAVES_COUNTED:]
    if not newest:
        return None
    stalls, writes = zip(*newest, strict=True)
    return Costs(statistics.median(stalls), statistics.median(writes))


def longest_save_s(history: RunHistory, world_size: int) -> float | None:
    """The longest of the newest saves of all attempts, from begin to commit; None before the first.

    Also of those on the way out, since it is for one of them that the answer is needed. Of a
    program's own with its seal, where it has told when it began.

    `world_size` ranks are to save now. Fewer than then share in more each.
    """
    sizes = {attempt.number: attempt.world_size for attempt in history.attempts}
    durations = [
        (save.seconds + (save.own_s or 0.0))
        * max(1.0, sizes.get(save.attempt or 0, 0) / world_size)
        for save in history.saves
        if save.seconds is not None and (save.kind == "saved" or save.own_s is not None)
    ]
    return max(durations[-SAVES_COUNTED:], default=None)


def mtbf_s(record: Failures, nodes: int) -> float:
    """Seconds between failures to be expected, from a prior and the run's own record.

    The prior is one failure per node in 30 days, worth one observation: a gamma prior of shape 1,
    of which the rate's posterior mean is (1 + failures) / (prior's time + observed time). Published
    rates of hardware are lower (one in 154 to 264 days), and a guess that is too short is cheap.

    An earlier number of nodes in the record is not made up for.
    """
    return (PRIOR_NODE_S / max(1, nodes) + record.observed_s) / (1 + record.count)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """The interval between saves that costs the least time, by Daly's higher-order estimate.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006). Young's sqrt(2CM) is its first term.

    `cost_s` is what training loses to one save.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def first_guess(max_loss_s: float) -> float:
    """Seconds until the first save of a run, which tells what the others will cost."""
    return min(max_loss_s / 4, FIRST_GUESS_S)


def choose(
    cost_s: float | None,
    mtbf_s: float,
    *,
    max_loss_s: float,
    job_s: float | None = None,
    write_s: float = 0.0,
    min_s: float = SHORTEST_S,
) -> Interval:
    """How long to train between two saves.

    Daly's interval; not so short that saves take more than about 5 % of the time or that the file
    system is written to more than half of the time; but never longer than the bounds allow, which
    are promises and beat all of this.

    The bound of allowed loss: a save counts once it is committed, so a hard kill just before that
    costs the interval and the write. Where writes take half of `max_loss_s` or more it cannot be
    kept, and half of it is the interval.

    The bound of the time limit: a job saves when it is warned of its end, and that save may fail or
    the warning not come. A quarter leaves room for three saves before, so that a job that trained
    for its whole time always takes the run forward.

    Args:
        cost_s: What training loses to one save: the whole save where it waits, the stall where it
            does not; None before anything was measured.
        mtbf_s: Seconds between failures.
        max_loss_s: What a hard kill may cost at most.
        job_s: The job's whole time, which stays the same as it passes (with the time that is left
            the interval would shrink towards the end); None where nobody knows.
        write_s: From the beginning of a save until it is committed.
        min_s: No shorter, unless a bound asks for it.
    """
    wanted = _wanted(cost_s, mtbf_s, max_loss_s, write_s, min_s)
    bounds = [_allowed(max_loss_s, write_s)]
    if job_s is not None and job_s > 0:
        bounds.append(Interval(job_s * JOB_SHARE, f"a quarter of the job's {_short(job_s)}"))
    return min([wanted, *bounds], key=lambda one: one.seconds)


def _wanted(
    cost_s: float | None, mtbf_s: float, max_loss_s: float, write_s: float, min_s: float
) -> Interval:
    """The interval by what saves cost, before the bounds."""
    if cost_s is None:
        return Interval(first_guess(max_loss_s), "a first guess, no save was measured")
    costs = f"a save costs {_short(cost_s)}"
    wishes = [
        Interval(daly_s(cost_s, mtbf_s), f"Daly, {costs}, one failure in {_short(mtbf_s)}"),
        Interval(cost_s * (1 / STALL_SHARE - 1), f"saves take {STALL_SHARE:.0%}, {costs}"),
        Interval(write_s * WRITES_APART, f"writing a save takes {_short(write_s)}"),
        Interval(min_s, f"the shortest, {costs}"),
    ]
    return max(wishes, key=lambda one: one.seconds)


def _allowed(max_loss_s: float, write_s: float) -> Interval:
    """The longest interval that keeps the promise of `max_loss_s`, or comes nearest to it."""
    if 2 * write_s >= max_loss_s:
        why = f"half of max_loss_s of {_short(max_loss_s)}, a write takes {_short(write_s)}"
        return Interval(max_loss_s / 2, why)
    writing = f" less {_short(write_s)} to write" if write_s >= 1 else ""
    return Interval(max_loss_s - write_s, f"max_loss_s of {_short(max_loss_s)}{writing}")


def as_set(checkpoint: CheckpointSettings) -> Interval | None:
    """The interval that the user has set, steps before seconds; None where it is to be chosen."""
    if checkpoint.interval_steps:
        return Interval(0.0, "checkpoint.interval_steps", steps=checkpoint.interval_steps)
    if checkpoint.interval_s:
        return Interval(checkpoint.interval_s, "checkpoint.interval_s")
    return None


def _short(seconds: float) -> str:
    """A duration of which the first digits count: "0.4 s", "3m20s"."""
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)  # noqa: PLR2004 - two digits
