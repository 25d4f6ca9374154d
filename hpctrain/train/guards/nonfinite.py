"""What follows a step whose loss or gradient norm is not a number, or infinite. Pure.

Every rank hands in the same numbers, so that every rank comes to the same word without asking the
others. tests/unit/guards/test_nonfinite.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

WINDOW_STEPS, MOST_IN_WINDOW = 100, 3
"""More such steps than this among so many, and training stops."""
MOST_IN_A_ROW = 3
"""The last of so many persistent ones in a row stops: it is not a bad batch any more."""
MOST_OVERFLOWS = 8
"""Overflows of fp16 in a row, after which the scale is not to blame: it fell by 2 at each."""
SMALLEST_SCALE = 1.0


class Ruling(StrEnum):
    """What is done about a step that was not finite."""

    GO_ON = "go_on"
    """The update was left out, or is applied after all: training goes on."""
    STOP = "stop"
    """Training ends here, with the evidence: no other start would go better."""


@dataclass(frozen=True)
class BadStep:
    """A step whose loss or norm is not finite, as all ranks know it.

    Attributes:
        step: Its number: updates that would have been applied after it.
        loss: Of all ranks, as it was at first; None where the engine was not told.
        norm: Of the gradient, as it was at first.
        rank: Who had it by itself, before anything travelled; None where nobody knows.
        ranks: All ranks that had it.
        node: Of that rank; "" where nobody knows.
        is_left_out: The update was left out.
        ruling: What follows.
        parameter: The first one; "" where nobody knows.
        samples: Of that rank's microbatch; empty where nobody knows.
        in_weights: The weights themselves are not finite.
        transient: Computed again, the numbers were finite; None where that was not possible.
    """

    step: int
    loss: float | None
    norm: float
    rank: int | None
    ranks: tuple[int, ...]
    node: str
    is_left_out: bool
    ruling: Ruling
    parameter: str = ""
    samples: tuple[int, ...] = ()
    in_weights: bool = False
    transient: bool | None = None


class NonfiniteRule:
    """Counts such steps; can be tracked, so that a resume counts on.

    Attributes:
        overflows: Steps in a row that fp16's scale has left out.
    """

    def __init__(self, *, stops_at_once: bool = False) -> None:
        """Nothing has happened so far.

        Args:
            stops_at_once: The first one that is not finite again when computed again stops.
        """
        self._stops_at_once = stops_at_once
        self._steps: list[int] = []
        self._in_a_row = 0
        self._last = -1
        self.overflows = 0

    def overflowed(self, scale: float) -> bool:
        """A step that fp16's loss scale has left out; whether that is more than its daily business.

        Args:
            scale: Of the losses, as it is after the step.
        """
        self.overflows += 1
        return self.overflows >= MOST_OVERFLOWS or scale <= SMALLEST_SCALE

    def passed(self) -> None:
        """A step whose numbers are finite."""
        self.overflows = 0

    def met(self, step: int, *, transient: bool) -> Ruling:
        """A step whose numbers are not finite.

        Args:
            step: Its number.
            transient: Computed again from the same state, they were finite.
        """
        self._steps = [earlier for earlier in self._steps if step - WINDOW_STEPS < earlier < step]
        self._steps.append(step)
        if not transient:
            self._in_a_row = self._in_a_row + 1 if self._last == step - 1 else 1
            self._last = step
        if len(self._steps) > MOST_IN_WINDOW:
            return Ruling.STOP
        if not transient and (self._stops_at_once or self._in_a_row >= MOST_IN_A_ROW):
            return Ruling.STOP
        return Ruling.GO_ON

    @property
    def recent(self) -> int:
        """Such steps among the last `WINDOW_STEPS` before the newest of them, it included."""
        return len(self._steps)

    def state_dict(self) -> dict[str, Any]:
        """All that a later judgement depends on."""
        return {
            "steps": list(self._steps),
            "in_a_row": self._in_a_row,
            "last": self._last,
            "overflows": self.overflows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps = [int(step) for step in state["steps"]]
        self._in_a_row = int(state["in_a_row"])
        self._last = int(state["last"])
        self.overflows = int(state["overflows"])
