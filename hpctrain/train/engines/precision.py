"""The dtype of forward passes, and the scale of losses under fp16.

`LossScale` goes up while all goes well, down after an overflow. The rule and its numbers are those
of torch.amp.GradScaler. That one looks at each rank's gradients alone, so that pipeline stages
would disagree about a step; here the norm decides, which is the same on every rank of any mesh.
tests/engines/test_norm.py holds the promises.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hpctrain.core.device import computes_bf16
from hpctrain.errors import CheckpointError, UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH, BACKOFF = 2.0, 0.5
"""Of the scale: after `growth_interval` good steps, and after an overflow."""


def precision_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `engine.precision` means on a device.

    Raises:
        UsageError: there is none of that name.
    """
    if name == "auto":
        return torch.bfloat16 if computes_bf16(device) else torch.float32
    if name not in DTYPES:
        raise UsageError(
            f"engine.precision {name!r} is not known; use one of auto, {', '.join(DTYPES)}"
        )
    return DTYPES[name]


class LossScale:
    """How far losses are scaled; can be tracked."""

    def __init__(self, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0

    def update(self, norm: float) -> bool:
        """Take note of the gradient norm of all ranks; return whether the step counts."""
        if not math.isfinite(norm):
            self.scale = max(1.0, self.scale * BACKOFF)
            self.good_steps = 0
            return False
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale *= GROWTH
            self.good_steps = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Scale and the number of steps since it changed."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; also from the state of a torch.amp.GradScaler.

        Raises:
            CheckpointError: it is the state of something else.
        """
        scale = state.get("scale")
        good = state.get("good_steps", state.get("_growth_tracker"))
        if not isinstance(scale, int | float) or not isinstance(good, int):
            raise CheckpointError(f"{state} is not the state of a loss scale")
        self.scale, self.good_steps = float(scale), good
