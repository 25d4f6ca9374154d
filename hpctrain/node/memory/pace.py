"""How many steps lie between two copies in memory. Pure.

As few as cost next to nothing: training waits for a copy, and a copy takes a while until all nodes
have it whole. Both are measured with each copy. tests/unit/memory/test_pace.py holds the promises.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

MOST_STALL = 0.01
"""Of the time between two copies, that training may wait for them."""
MOST_BUSY = 0.8
"""Of the time between two copies, that one may take until it is covered."""
MOST_AHEAD = 0.5
"""And so much of it, of the slowest, where a copy is asked for before the one ahead is whole."""
COUNTED = 5
"""So many of the newest copies count."""
NEWS = 0.2
"""Fewer steps more or less, as a share, are not worth a change."""


class Pace:
    """Learns from copies.

    Attributes:
        steps: Between two copies from here on. The first copy of a start is made at once: after a
            lost node the others' copies lie on one node each, until there is a new one.
    """

    def __init__(self, setting: int) -> None:
        """Measure nothing yet; `setting` is `alive.memory_steps`, 0 to choose."""
        self._setting = setting
        self.steps = 1
        self._stalls: deque[float] = deque(maxlen=COUNTED)
        self._covers: deque[float] = deque(maxlen=COUNTED)

    @property
    def stall_s(self) -> float:
        """What training waits for a copy; 0 before the first."""
        return statistics.median(self._stalls) if self._stalls else 0.0

    @property
    def covered_s(self) -> float:
        """From the beginning of a copy until all nodes have it whole; 0 before the first."""
        return statistics.median(self._covers) if self._covers else 0.0

    def miss(self) -> None:
        """A copy was not whole on all nodes: what hinders it may not be over at the next step."""
        self.steps = self._setting or self.steps

    def is_quick(self, step_s: float) -> bool:
        """Return whether each copy is surely complete on all nodes before the next one is made."""
        return 0 < max(self._covers, default=0.0) <= MOST_AHEAD * self.steps * step_s

    def learn(self, stall_s: float, covered_s: float, step_s: float) -> bool:
        """Take in what a copy cost; return whether `steps` changed, or this was the first copy.

        Training waited `stall_s`; all nodes had the copy complete `covered_s` after it began.
        """
        is_first = not self._stalls
        self._stalls.append(stall_s)
        self._covers.append(covered_s)
        if self._setting or step_s <= 0:
            self.steps = self._setting or self.steps
            return is_first
        needed_s = max(self.stall_s / MOST_STALL, self.covered_s / MOST_BUSY)
        steps = max(1, math.ceil(needed_s / step_s - 1e-9))
        if not is_first and abs(steps - self.steps) <= NEWS * self.steps:
            return False
        self.steps = steps
        return True
