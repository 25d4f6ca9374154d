"""DeepSpeed's loss scale for fp16, told and set in the words of `loss_scale.py`."""

from __future__ import annotations

from typing import Any

from hpctrain.engines.loss_scale import LossScale


class DeepSpeedScale(LossScale):
    """How far DeepSpeed scales losses; its state goes on under any other engine, and back.

    DeepSpeed itself updates it. A scale that the user's own ds_config.json fixes stays as it is.
    """

    def __init__(self, scaler: Any) -> None:
        """Take DeepSpeed's scaler: a dynamic one, or one with a fixed scale."""
        self._scaler = scaler

    @property
    def scale(self) -> float:
        """What losses are multiplied by now."""
        return float(self._scaler.cur_scale)

    @scale.setter
    def scale(self, value: float) -> None:
        if self._scaler.dynamic:
            self._scaler.cur_scale = value

    @property
    def good_steps(self) -> int:
        """Steps since the scale changed. DeepSpeed doubles it one step later than torch."""
        if not self._scaler.dynamic:
            return 0
        since = int(self._scaler.cur_iter - self._scaler.last_overflow_iter - 1)
        return since if since <= self.growth_interval else (since - 1) % self.growth_interval + 1

    @good_steps.setter
    def good_steps(self, value: int) -> None:
        if self._scaler.dynamic:
            self._scaler.last_overflow_iter = self._scaler.cur_iter - 1 - value

    @property
    def growth_interval(self) -> int:  # type: ignore[override]
        """Good steps after which the scale is doubled."""
        return int(self._scaler.scale_window) if self._scaler.dynamic else 1
