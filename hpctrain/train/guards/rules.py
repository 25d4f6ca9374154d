"""What a step's numbers may be, and what follows: not finite, a spike, a loop of its own. Pure.

A spike is judged by median and median absolute deviation (MAD) of the last accepted values, so that
neither a spike nor a NaN ever enters what later steps are judged by. tests/unit/guards holds the
promises.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.ledger.run.event_types import StepNotFinite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.core.settings.schema import GuardSettings


# ---- numbers that are not finite

WINDOW_STEPS, MOST_IN_WINDOW = 100, 3
"""More such steps than this among so many, and training stops."""
MOST_IN_A_ROW = 3
"""The last of so many persistent ones in a row stops: it is not a bad batch any more."""
MOST_OVERFLOWS = 8
"""Overflows of fp16 in a row, after which the scale is not to blame: it fell by 2 at each."""
SMALLEST_SCALE = 1.0


class NonfiniteRule:
    """Counts such steps; can be tracked, so that a resume counts on.

    Attributes:
        overflows: Steps in a row that fp16's scale has left out; 0 is set after a finite one.
    """

    def __init__(self, *, stops_at_once: bool = False) -> None:
        """Begin; with `stops_at_once` the first that is not finite when computed again stops."""
        self._stops_at_once = stops_at_once
        self._steps: list[int] = []
        self._in_a_row = 0
        self._last = -1
        self.overflows = 0

    def overflowed(self, scale: float) -> bool:
        """A step that fp16's loss scale has left out; whether that is more than its daily business.

        `scale` is that of the losses after the step.
        """
        self.overflows += 1
        return self.overflows >= MOST_OVERFLOWS or scale <= SMALLEST_SCALE

    def met(self, step: int, *, transient: bool) -> bool:
        """A step whose numbers are not finite; `transient` if they were when computed again.

        Returns whether training ends here, with the evidence: no other start would go better.
        """
        self._steps = [earlier for earlier in self._steps if step - WINDOW_STEPS < earlier < step]
        self._steps.append(step)
        if not transient:
            self._in_a_row = self._in_a_row + 1 if self._last == step - 1 else 1
            self._last = step
        if len(self._steps) > MOST_IN_WINDOW:
            return True
        return not transient and (self._stops_at_once or self._in_a_row >= MOST_IN_A_ROW)

    def state_dict(self) -> dict[str, Any]:
        """All that a later judgement depends on."""
        return {
            "steps": list(self._steps),
            "in_a_row": self._in_a_row,
            "last": self._last,
            "overflows": self.overflows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from there."""
        self._steps = [int(step) for step in state["steps"]]
        self._in_a_row = int(state["in_a_row"])
        self._last = int(state["last"])
        self.overflows = int(state["overflows"])


# ---- spikes

WINDOW, LEAST = 128, 64
"""Accepted values that are remembered, and how many there must be before anything is judged."""
LIMIT = 10.0
"""Deviations above the median from which on a value is a spike."""
SIGMA = 1.4826
"""MAD times this is the standard deviation of values that are distributed normally."""
LOSS_FLOOR, NORM_FLOOR = 0.005, 0.05
"""A deviation is at least so much of the median: of the loss, and of the norm's logarithm."""
MOST_SPIKES_IN_A_ROW = 8
"""After so many spikes in a row the next one is a new level, and is accepted."""


@dataclass(frozen=True)
class Spike:
    """A value ("loss" or "grad_norm") that jumps out.

    Attributes:
        usual: The median of the values before it.
        deviations: How many deviations it lies above that.
    """

    what: str
    value: float
    usual: float
    deviations: float


class Recent:
    """The last accepted values of one kind, in their order (`values`) and sorted."""

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self.values: deque[float] = deque()
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
        self.values.append(value)
        insort(self._sorted, value)
        if len(self.values) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self.values.popleft())]

    def set(self, values: list[float]) -> None:
        """Remember these alone."""
        self.values = deque(values)
        self._sorted = sorted(values)


class SpikeRule:
    """Judges each step by those before it; can be tracked, so that a resume judges the same."""

    def __init__(self) -> None:
        self._losses = Recent(LOSS_FLOOR)
        self._norms = Recent(NORM_FLOOR)
        self._in_a_row = 0

    def judge(self, loss: float | None, norm: float) -> Spike | None:
        """The spike that a step's finite numbers are; or None, and they are remembered.

        `loss` is of all ranks, None where nobody told it; `norm` is the gradient's before clipping,
        of all ranks.
        """
        log_norm = math.log(norm) if norm > 0.0 else 0.0
        spike = self._spike(loss, norm, log_norm)
        self._in_a_row = self._in_a_row + 1 if spike is not None else 0
        if spike is not None and self._in_a_row <= MOST_SPIKES_IN_A_ROW:
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
            "losses": list(self._losses.values),
            "log_norms": list(self._norms.values),
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from there."""
        self._losses.set([float(value) for value in state["losses"]])
        self._norms.set([float(value) for value in state["log_norms"]])
        self._in_a_row = int(state["in_a_row"])


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


# ---- both rules, as the settings say


class StepRules:
    """What a guard of steps remembers; can be tracked."""

    def __init__(self, settings: GuardSettings) -> None:
        """Nothing has happened so far."""
        is_on = settings.nonfinite != "off"
        self._rule = NonfiniteRule(stops_at_once=settings.nonfinite == "stop") if is_on else None
        self._leaves_out = settings.nonfinite in {"skip", "stop", "rewind"}
        self._spikes = SpikeRule() if settings.spike != "off" else None
        self._skips_spikes = settings.spike in {"skip", "rewind"}
        self._count = 0
        self._was_bad = False

    def state_dict(self) -> dict[str, Any]:
        """All that a later judgement depends on, to the bit."""
        return {
            "count": self._count,
            "nonfinite": self._rule.state_dict() if self._rule is not None else None,
            "spikes": self._spikes.state_dict() if self._spikes is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there; a rule that was off then begins without a memory."""
        self._count = int(state["count"])
        if self._rule is not None and state["nonfinite"] is not None:
            self._rule.load_state_dict(state["nonfinite"])
        if self._spikes is not None and state["spikes"] is not None:
            self._spikes.load_state_dict(state["spikes"])


# ---- a loop with a backward pass of its own


class OwnSteps(StepRules):
    """Judges such a loop's steps.

    Attributes:
        must_stop: Nothing more is to be trained after the step that was judged last.
    """

    must_stop = False

    def judge(
        self, step: int, rows: Sequence[tuple[float, float, str]]
    ) -> tuple[bool, StepNotFinite | Spike | None]:
        """Whether to apply the update, and what there is to tell.

        `rows` are in rank order: a rank's own loss and gradient norm, or those of all; its node.
        """
        self._count += 1
        losses, norms, nodes = zip(*rows, strict=True)
        if not all(map(math.isfinite, losses + norms)):
            if self._rule is None:
                return True, None
            return self._not_finite(step, losses, norms, nodes, self._rule)
        self._was_bad = False
        spike = None if self._spikes is None else self._spikes.judge(max(losses), max(norms))
        return spike is None or not self._skips_spikes, spike

    def _not_finite(
        self,
        step: int,
        losses: Sequence[float],
        norms: Sequence[float],
        nodes: Sequence[str],
        rule: NonfiniteRule,
    ) -> tuple[bool, StepNotFinite | None]:
        if self._was_bad and not self._leaves_out:
            return True, None  # said once: every step after it is the same
        self._was_bad = True
        guilty = _not_all(losses) or _not_all(norms)
        self.must_stop = self._leaves_out and rule.met(self._count, transient=False)
        bad = StepNotFinite(
            step=step,
            loss=_worst(losses),
            grad_norm=_worst(norms),
            rank=guilty[0] if guilty else None,
            ranks=guilty,
            node=nodes[guilty[0]] if guilty else "",
            left_out=self._leaves_out,
        )
        return not self._leaves_out, bad


def _not_all(values: Sequence[float]) -> tuple[int, ...]:
    """Ranks whose number is not finite; none where that is so of all, since it has travelled."""
    guilty = tuple(rank for rank, value in enumerate(values) if not math.isfinite(value))
    return guilty if len(guilty) < len(values) or len(values) == 1 else ()


def _worst(values: Sequence[float]) -> float:
    """The largest, or the first that is not finite: of NaN no MAX is certain."""
    return next((value for value in values if not math.isfinite(value)), max(values))
