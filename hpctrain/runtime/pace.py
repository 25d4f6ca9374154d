"""Rank 0: how often to save, learnt from what saves cost and how often this run has died.

Also tells the job's clock what earlier attempts' saves took.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from hpctrain.plan import interval
from hpctrain.run import events as ledger

if TYPE_CHECKING:
    from hpctrain.checkpoint.tensors.save import Place, Saved
    from hpctrain.runtime.save_policy import JobClock
    from hpctrain.world import World

NEWS = 0.2
"""An interval that changes by less than this share is not worth a line in the ledger."""


class Pace:
    """The interval between saves; `checkpoint.interval_s` where it is set."""

    def __init__(self, place: Place, world: World, clock: JobClock) -> None:
        self._settings = place.settings
        self._is_chosen = interval.as_set(place.settings) is None
        events = ledger.read(place.run)
        clock.earlier_s = interval.longest_save_s(events, world.world_size)
        self._record = interval.failures(events)
        known = interval.costs(events)
        self._costs = [] if known is None else [known]
        self._nodes = max(1, world.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._job_s = None if clock.end_time is None else clock.end_time - time.time()
        self._began = time.monotonic()
        self._told: interval.Interval | None = None
        self.now = self._choose()

    def saved(self, saved: Saved) -> None:
        """Learn from a save."""
        self._costs.append(interval.Costs(saved.stall_s, saved.seconds))
        self.now = self._choose()

    def news(self) -> dict[str, Any] | None:
        """What the ledger should hear: the interval, if it is new; each change is told once."""
        told = self._told
        if told is not None and abs(self.now.seconds - told.seconds) <= NEWS * told.seconds:
            return None
        self._told = self.now
        cost = self._cost()
        facts: dict[str, Any] = {"seconds": round(self.now.seconds, 1), "why": self.now.why}
        if self.now.steps:
            facts["steps"] = self.now.steps
        if self._is_chosen and cost is not None:
            facts |= {"cost_s": round(cost.cost_s, 4), "mtbf_s": round(self._mtbf_s(), 1)}
        return facts

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
        seconds = self._record.observed_s + time.monotonic() - self._began
        return interval.mtbf_s(interval.Failures(self._record.count, seconds), self._nodes)
