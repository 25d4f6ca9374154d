"""Whether a step's loss or gradient norm jumps out of the values before it. Pure.

Judged by median and median absolute deviation (MAD) of the last accepted values: a spike, or a
number that is none, never enters what later steps are judged by. A rule of mean and deviation would
be blinded by the first NaN for as long as it remembers. tests/unit/guards/test_spikes.py holds the
promises.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Any

WINDOW, LEAST = 128, 64
"""Accepted values that are remembered, and how many there must be before anything is judged."""
LIMIT = 10.0
"""Deviations above the median from which on a value is a spike."""
SIGMA = 1.4826
"""MAD times this is the standard deviation of values that are distributed normally."""
LOSS_FLOOR, NORM_FLOOR = 0.005, 0.05
"""A deviation is at least so much of the median: of the loss, and of the norm's logarithm."""
MOST_IN_A_ROW = 8
"""After so many spikes in a row the next one is a new level, and is accepted."""


@dataclass(frozen=True)
class Spike:
    """A value that jumps out.

    Attributes:
        what: "loss" or "grad_norm".
        value: What it was.
        usual: The median of the values before it.
        deviations: How many deviations it lies above that.
    """

    what: str
    value: float
    usual: float
    deviations: float


class Recent:
    """The last accepted values of one kind, in their order and sorted."""

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def deviations(self, value: float) -> tuple[float, float]:
        """How many deviations a value lies above the median, and the median; 0 of too few."""
        if len(self._sorted) < LEAST:
            return 0.0, 0.0
        middle = _median(self._sorted)
        mad = _median(sorted([abs(each - middle) for each in self._sorted]))
        return (value - middle) / max(SIGMA * mad, self._floor * max(1.0, abs(middle))), middle

    def accept(self, value: float) -> None:
        """Remember a value; the oldest one beyond `WINDOW` is forgotten."""
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    def as_list(self) -> list[float]:
        """In the order in which they came."""
        return list(self._values)

    def set(self, values: list[float]) -> None:
        """Remember these alone."""
        self._values = deque(values)
        self._sorted = sorted(values)


class SpikeRule:
    """Judges each step by those before it; can be tracked, so that a resume judges the same."""

    def __init__(self) -> None:
        self._losses = Recent(LOSS_FLOOR)
        self._norms = Recent(NORM_FLOOR)
        self._in_a_row = 0

    def judge(self, loss: float | None, norm: float) -> Spike | None:
        """A step's numbers, finite ones; the spike that they are, or None, and they are remembered.

        Args:
            loss: Of all ranks; None where nobody told it.
            norm: Of the gradient before clipping, of all ranks.
        """
        log_norm = math.log(norm) if norm > 0.0 else 0.0
        spike = self._spike(loss, norm, log_norm)
        self._in_a_row = self._in_a_row + 1 if spike is not None else 0
        if spike is not None and self._in_a_row <= MOST_IN_A_ROW:
            return spike
        if loss is not None:
            self._losses.accept(loss)
        self._norms.accept(log_norm)
        return None

    def _spike(self, loss: float | None, norm: float, log_norm: float) -> Spike | None:
        if loss is not None:
            deviations, usual = self._losses.deviations(loss)
            if deviations > LIMIT:
                return Spike("loss", loss, usual, deviations)
        deviations, usual = self._norms.deviations(log_norm)
        if deviations > LIMIT:
            return Spike("grad_norm", norm, math.exp(usual), deviations)
        return None

    def state_dict(self) -> dict[str, Any]:
        """All that a later judgement depends on, to the bit."""
        return {
            "losses": self._losses.as_list(),
            "log_norms": self._norms.as_list(),
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._losses.set([float(value) for value in state["losses"]])
        self._norms.set([float(value) for value in state["log_norms"]])
        self._in_a_row = int(state["in_a_row"])


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
