"""Which ranks stand still for longer than such a phase takes, and whether that is suspicious. Pure.

A phase may take five times as long as the longest stay in it so far, and a minute at least. Only
time that the watcher itself has seen pass counts: where a whole node was stopped, nothing has.
tests/unit/hangs/test_standing.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpctrain.core.base.text import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from hpctrain.node.control.heartbeat import HeartbeatSeen

LEARNT = 5
"""A phase may take so many times as long as it took at most so far."""
FEWEST_S = 60.0
"""And so many seconds, however short it was so far."""
LONGEST_GAP_S = 2.0
"""So much counts of the time between two looks."""
STEPS_AHEAD = 2
"""Others are so many steps further on: then one that stands is suspicious though they move."""

Unmoved = Literal["all", "behind", ""]
"""All ranks stand; or some do, and the others are steps ahead; or nothing is suspicious."""


@dataclass(frozen=True)
class HangLimits:
    """After what time a look is taken.

    Attributes:
        hang_s: In an ordinary phase, at least.
        first_step_s: Before the first step is over.
        save_s: In a save.
        ends_round: A hang that is confirmed ends the round; else it is only told.
        watches: Ranks that stand are looked at.
        desync: What is done about ranks that are out of step: "restart", "tell" or "off".
        stragglers: What is done about slow ranks: "tell" or "off".
    """

    hang_s: float = FEWEST_S
    first_step_s: float = 1800.0
    save_s: float = 600.0
    ends_round: bool = True
    watches: bool = True
    desync: str = "off"
    stragglers: str = "off"


class Stand(NamedTuple):
    """For how long a rank has not moved.

    Attributes:
        phase: Its phase by name; "" for a program that says nothing.
        stood_s: Seconds without a change.
        limit_s: What such a phase may take; infinite for whatever it takes.
    """

    rank: int
    step: int
    phase: str
    stood_s: float
    limit_s: float

    @property
    def is_over(self) -> bool:
        """Whether it stands for longer than its phase may take."""
        return self.stood_s >= self.limit_s


class Standing:
    """Watches the heartbeats of one node's ranks, and learns what their phases take."""

    def __init__(self, limits: HangLimits, clock: Callable[[], float]) -> None:
        """Start without heartbeats; `clock` gives seconds and never jumps."""
        self._limits, self._clock = limits, clock
        self._looked_s = clock()
        self._stood: dict[int, tuple[HeartbeatSeen, float]] = {}
        self._ended_s: dict[str, float] = {}
        """The longest stay in each phase that has ended: what still lasts proves nothing."""

    def look(self, heartbeats: Sequence[HeartbeatSeen]) -> list[Stand]:
        """Return for how long each rank has not moved, by its heartbeat as it is now."""
        now_s = self._clock()
        gap_s = min(LONGEST_GAP_S, now_s - self._looked_s)
        self._looked_s = now_s
        stands = []
        for heartbeat in heartbeats:
            seen, stood_s = self._stood.get(heartbeat.rank, (None, 0.0))
            if seen is None or seen.since_ns != heartbeat.since_ns:
                if seen is not None and not seen.is_first:
                    self._ended_s[seen.phase] = max(self._ended_s.get(seen.phase, 0.0), stood_s)
                stood_s = 0.0
            else:
                stood_s += gap_s
            self._stood[heartbeat.rank] = (heartbeat, stood_s)
            stands.append(Stand(heartbeat.rank, heartbeat.step, heartbeat.phase, stood_s, 0.0))
        return [
            stand._replace(limit_s=self._limit_s(heartbeat))
            for stand, heartbeat in zip(stands, heartbeats, strict=True)
        ]

    def _limit_s(self, heartbeat: HeartbeatSeen) -> float:
        if heartbeat.phase in {"", "end"}:
            return math.inf
        if heartbeat.limit_s is not None:
            return heartbeat.limit_s
        if heartbeat.is_first:
            return max(self._limits.first_step_s, self._limits.hang_s)
        least_s = self._limits.save_s if heartbeat.phase == "save" else 0.0
        return max(least_s, self._limits.hang_s, LEARNT * self._ended_s.get(heartbeat.phase, 0.0))


def unmoved(stands: Sequence[Stand], returned: Collection[int]) -> tuple[Unmoved, list[Stand]]:
    """Return whether a job's ranks are suspicious, and who stands, of nodes that answered."""
    left = [stand for stand in stands if stand.rank not in returned]
    over = [stand for stand in left if stand.is_over]
    if over and len(over) == len(left):
        return "all", over
    furthest = max((stand.step for stand in left), default=0)
    behind = [stand for stand in over if stand.step + STEPS_AHEAD <= furthest]
    return ("behind", behind) if behind else ("", over)


def in_words(stands: Sequence[Stand]) -> str:
    """Such as "step 12, in data, for 2 min" of the ranks that stand longest."""
    longest = max(stands, key=lambda stand: stand.stood_s)
    return f"step {longest.step}, in {longest.phase}, for {duration(longest.stood_s)}"
