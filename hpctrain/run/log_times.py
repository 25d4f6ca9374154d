"""When the lines of a rank's log were written: marks beside the log, and what follows from them.

Ranks write their logs themselves and without times. The agent of their node therefore notes how
long each log was at which moment, one line `T SIZE` a mark, in rank-00007.times beside
rank-00007.log (`agent/log_index.py`). Between two marks a line's time is estimated by its place.
tests/unit/test_log_clock.py holds the promises.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hpctrain.run.log_files import LogFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LATE_S = 60.0
"""A log that was changed later than this after its attempt's end was copied, not written then."""


@dataclass(frozen=True, slots=True)
class Mark:
    """At time `t`, seconds since the epoch, the log had `size` bytes."""

    t: float
    size: int


def times_path(log: Path) -> Path:
    """Where the marks of a rank's log are."""
    return log.with_suffix(".times")


def mark_line(mark: Mark) -> bytes:
    """A mark as it is written; whole seconds, since the agent looks every few seconds."""
    return b"%d %d\n" % (math.ceil(mark.t), mark.size)


class LogTimes:
    """The marks of one log, read as they grow; a log without a clock has none."""

    def __init__(self, log: Path) -> None:
        self._file = LogFile(times_path(log))
        self.marks: list[Mark] = []

    def read(self) -> Sequence[Mark]:
        """All marks so far. One that is torn or goes back (another clock, another file) is left."""
        for line in self._file.lines():
            t, _, size = line.partition(b" ")
            if not (t.isdigit() and size.isdigit()):
                continue
            mark = Mark(float(t), int(size))
            if not self.marks or (mark.t >= self.marks[-1].t and mark.size >= self.marks[-1].size):
                self.marks.append(mark)
        return self.marks


def first_offset(marks: Sequence[Mark], since: float) -> int:
    """All that was written before this offset was written before `since`; 0 where unknown."""
    place = bisect_left(marks, since, key=lambda mark: mark.t)
    return marks[place - 1].size if place else 0


class Guess:
    """About when each byte of a log was written.

    Args:
        marks: Known moments. Where clocks differ the later one counts.
        begin: Before it nothing was written: the attempt's start.
        end: What was seen last: by then the log had that size.
    """

    def __init__(self, marks: Sequence[Mark], begin: float, end: Mark) -> None:
        known = sorted((*marks, end), key=lambda mark: (mark.size, mark.t))
        times = accumulate((mark.t for mark in known), max)
        known = [Mark(t, mark.size) for t, mark in zip(times, known, strict=True)]
        self._marks = [Mark(min(begin, known[0].t), 0), *known]
        self._sizes = [mark.size for mark in self._marks]

    def at(self, offset: int) -> float:
        """About when the log became that long, seconds since the epoch; never goes back."""
        place = bisect_left(self._sizes, offset)
        if place == 0:
            return self._marks[0].t
        if place == len(self._marks):
            return self._marks[-1].t
        low, high = self._marks[place - 1], self._marks[place]
        part = (offset - low.size) / (high.size - low.size)
        return low.t + part * (high.t - low.t)
