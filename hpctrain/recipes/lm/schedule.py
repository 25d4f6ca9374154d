"""The learning rate, as a function of the step alone: nothing of it needs saving. No torch."""

from __future__ import annotations

import math


def lr_at(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.1) -> float:
    """The rate of the update that follows `step` updates: a rise to `peak`, then half a cosine.

    Args:
        step: Updates applied so far; the first update is that of step 0.
        peak: The highest rate, reached by the last of the warm-up's updates.
        warmup: Updates of the rise; 0 begins at the peak.
        total: Updates of the run; from there on the rate stays at the floor.
        floor: The lowest rate, as a part of the peak.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
