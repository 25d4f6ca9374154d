"""Policy of saves: the interval, the last moment before the job's end, and the last save.

Rank 0 learns the interval from what saves cost and how often this run has died (`SavePolicy`), also
from earlier attempts. `JobClock` says when a save still fits before the job's end, and `last_save`
whether a save that is being written when a stop is asked for is finished or made anew. The latter
two are pure: times in, answer out. tests/unit/runtime/test_save_policy.py, test_clock.py and
test_last_save.py hold the promises.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.records import StopCause
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan import interval
from hpctrain.ledger.plan.interval import CLOCK_SAFETY, LAST_SAVE_SAFETY, LEAVE_S
from hpctrain.ledger.run.event_types import IntervalSet

if TYPE_CHECKING:
    from hpctrain.checkpoint.tensors.save import Saved, SavePlace
    from hpctrain.core.world import World

NEWS = 0.2
"""An interval that changes by less than this share is not worth a line in the ledger."""
GUESS_BYTES_PER_S = 200e6
"""Of one rank, before any save was measured: eight ranks of a node write 1.6 GB/s together."""
GUESS_SHARE = 1 / 8
"""A guess costs a job no more of its time: a wrong one must not keep it from training at all."""


class SavePolicy:
    """The interval between saves; `checkpoint.interval_s` where it is set."""

    def __init__(self, place: SavePlace, world: World, job_clock: JobClock) -> None:
        self._settings = place.settings
        self._is_chosen = interval.as_set(place.settings) is None
        history = RunHistory.read(place.run)
        job_clock.earlier_s = interval.longest_save_s(history, world.world_size)
        self._record = interval.failures(history)
        earlier = interval.costs(history)
        self._costs = [] if earlier is None else [earlier]
        self._nodes = max(1, world.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._job_s = None if job_clock.end_time is None else job_clock.end_time - clock.now()
        self._began = clock.monotonic()
        self._told: interval.Interval | None = None
        self.now = self._choose()

    def saved(self, saved: Saved) -> None:
        """Learn from a save."""
        self._costs.append(interval.Costs(saved.stall_s, saved.seconds))
        self.now = self._choose()

    def news(self) -> IntervalSet | None:
        """What the ledger should hear: the interval, if it is new; each change is told once."""
        before = self._told
        if before is not None and abs(self.now.seconds - before.seconds) <= NEWS * before.seconds:
            return None
        self._told = self.now
        cost = self._cost()
        is_chosen = self._is_chosen and cost is not None
        return IntervalSet(
            seconds=round(self.now.seconds, 1),
            why=self.now.why,
            steps=self.now.steps or None,
            cost_s=round(cost.cost_s, 4) if is_chosen and cost is not None else None,
            mtbf_s=round(self._mtbf_s(), 1) if is_chosen else None,
        )

    def _choose(self) -> interval.Interval:
        fixed = interval.as_set(self._settings)
        if fixed is not None:
            return fixed
        cost = self._cost()
        return interval.choose(
            None if cost is None else cost.cost_s,
            self._mtbf_s(),
            max_loss_s=self._settings.max_loss_s,
            job_s=self._job_s,
            write_s=0.0 if cost is None else cost.write_s,
        )

    def _cost(self) -> interval.Costs | None:
        newest = self._costs[-interval.SAVES_COUNTED :]
        if not newest:
            return None
        return interval.Costs(
            statistics.median(one.cost_s for one in newest),
            statistics.median(one.write_s for one in newest),
        )

    def _mtbf_s(self) -> float:
        seconds = self._record.observed_s + clock.monotonic() - self._began
        return interval.mtbf_s(interval.Failures(self._record.count, seconds), self._nodes)


@dataclass
class JobClock:
    """The job's end against what a save costs. Rank 0's is the one that counts.

    Attributes:
        end_time: When the scheduler ends the job, seconds since the epoch; None where nobody knows.
        margin_s: Kept free after the save, for leaving and requeueing.
        job_s: The job's time from here to its end; None where nobody knows.
        state_bytes: What this rank writes in a save; a first guess of its time comes from it.
        earlier_s: Longest of the newest saves of earlier attempts.
        save_s: Longest save measured in this attempt.
        step_s: Time of a step.
        has_stepped: Whether this attempt has done a step.
    """

    end_time: float | None
    margin_s: float
    job_s: float | None = None
    state_bytes: int = 0
    earlier_s: float | None = None
    save_s: float | None = None
    step_s: float = 0.0
    has_stepped: bool = False

    def expected_save_s(self) -> float:
        """What a save is likely to take: as measured here, else as before, else a guess."""
        if self.save_s is not None:
            return self.save_s
        if self.earlier_s is not None:
            return self.earlier_s
        guess = 1.0 + self.state_bytes / GUESS_BYTES_PER_S
        return guess if self.job_s is None else min(guess, max(0.0, GUESS_SHARE * self.job_s))

    def lead_s(self) -> float:
        """Seconds before the end at which to stop: one more step, one save, the margin."""
        return self.margin_s + CLOCK_SAFETY * self.expected_save_s() + 2 * self.step_s

    def is_late(self, now: float) -> bool:
        """Whether the step that is about to begin may be the last one that fits, or be none."""
        return self.end_time is not None and now >= self.end_time - self.lead_s()

    def is_due(self, now: float) -> bool:
        """Whether to stop before the next step.

        Not before the first: there is nothing to save so far, and a job that always left then would
        never come to do anything.
        """
        return self.has_stepped and self.is_late(now)

    def saved(self, seconds: float) -> None:
        """Learn from a save."""
        self.save_s = max(self.save_s or 0.0, seconds)

    def stepped(self, seconds: float) -> None:
        """Learn from a step."""
        self.has_stepped = True
        self.step_s += 0.3 * (seconds - self.step_s) if self.step_s else seconds

    def left_s(
        self,
        cause: StopCause,
        now: float,
        *,
        term_at: float | None = None,
        kill_wait_s: float | None = None,
        grace_end: float | None = None,
    ) -> float | None:
        """Seconds until the processes are killed; None where nobody says.

        Args:
            cause: What asked for the stop.
            now: Seconds since the epoch, as all times here.
            term_at: When SIGTERM came.
            kill_wait_s: Between SIGTERM and SIGKILL, where there is no grace time; a job that
                reaches its limit hears SIGTERM then.
            grace_end: When the grace time of a preemption ends; None where there is none.
        """
        if cause is StopCause.TERM and grace_end is None:
            end = None if kill_wait_s is None else (term_at or now) + kill_wait_s - LEAVE_S
        else:
            end = self.end_time if grace_end is None else grace_end
            # As the agent of the node does, which ends late ranks: at its limit a job hears
            # SIGTERM, and is killed KillWait later; at the end of a grace time it is killed.
            spare_s = -max(LEAVE_S, self.margin_s / 2)
            if grace_end is None and kill_wait_s is not None:
                spare_s = max(spare_s, kill_wait_s - LEAVE_S)
            end = None if end is None else end + spare_s
        return None if end is None else max(0.0, end - now)


class LastSave(StrEnum):
    """What to do before leaving."""

    BOTH = "both"
    """Wait for the save in flight, then save the step that training has come to."""
    FINISH = "finish"
    """Wait for the save in flight and leave with it: a newer one would not be done in time."""
    FRESH = "fresh"
    """Give the save in flight up, so that the newer one is done in time."""


def flight_left_s(usual_s: float, flying_s: float) -> float:
    """What a save that has taken so long is likely to take yet.

    One that takes longer than usual may hang: it is believed less and less to end soon.
    """
    return max(usual_s - flying_s, flying_s / 4)


def patience_s(left_s: float, fresh_s: float) -> float:
    """How long to wait for the save in flight, so that a new one still fits if it hangs."""
    return max(0.0, left_s - LAST_SAVE_SAFETY * fresh_s)


def last_save(left_s: float | None, *, flight_left_s: float, fresh_s: float) -> LastSave:
    """Choose what loses the fewest steps: the save in flight, or a new one.

    `left_s` is the time until the kill, None if unknown; the others are how long each save probably
    takes. With too little time for either, finish the one in flight: it is the further on.
    """
    if left_s is None or LAST_SAVE_SAFETY * (flight_left_s + fresh_s) <= left_s:
        return LastSave.BOTH
    if LAST_SAVE_SAFETY * fresh_s <= left_s:
        return LastSave.FRESH
    return LastSave.FINISH
