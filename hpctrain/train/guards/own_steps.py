"""Guards for a loop with a backward pass of its own: judged by the largest numbers of all. Pure.

Such a loop's numbers may be each rank's own, so that all of them are there for every rank to judge
by. tests/unit/guards/test_own_steps.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.train.guards.nonfinite import BadStep, NonfiniteRule, Ruling
from hpctrain.train.guards.spikes import SpikeRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.core.settings.schema import GuardSettings
    from hpctrain.train.guards.spikes import Spike


@dataclass(frozen=True)
class RankNumbers:
    """What a rank has come to.

    Attributes:
        loss: Its own, or that of all.
        norm: Of the gradient; the same.
        node: Its node.
    """

    loss: float
    norm: float
    node: str


class OwnSteps:
    """Judges such a loop's steps; can be tracked."""

    def __init__(self, settings: GuardSettings) -> None:
        """Nothing has happened so far."""
        self._leaves_out = settings.nonfinite in {"skip", "stop", "rewind"}
        self._rule = NonfiniteRule(stops_at_once=settings.nonfinite == "stop")
        self._looks_at_nonfinite = settings.nonfinite != "off"
        self._spikes = SpikeRule() if settings.spike != "off" else None
        self._skips_spikes = settings.spike in {"skip", "rewind"}
        self._count = 0
        self._was_bad = False

    def judge(self, step: int, rows: Sequence[RankNumbers]) -> tuple[bool, BadStep | Spike | None]:
        """Whether the update is to be applied, and what there is to tell.

        Args:
            step: Its number.
            rows: Of all ranks, in their order.
        """
        self._count += 1
        losses, norms = [row.loss for row in rows], [row.norm for row in rows]
        if not all(map(math.isfinite, losses + norms)):
            return self._not_finite(step, rows) if self._looks_at_nonfinite else (True, None)
        self._was_bad = False
        spike = None if self._spikes is None else self._spikes.judge(max(losses), max(norms))
        return spike is None or not self._skips_spikes, spike

    def _not_finite(self, step: int, rows: Sequence[RankNumbers]) -> tuple[bool, BadStep | None]:
        if self._was_bad and not self._leaves_out:
            return True, None  # said once: every step after it is the same
        self._was_bad = True
        guilty = _not_all(rows, "loss") or _not_all(rows, "norm")
        ruling = Ruling.GO_ON
        if self._leaves_out:
            ruling = self._rule.met(self._count, transient=False)
        bad = BadStep(
            step=step,
            loss=_worst([row.loss for row in rows]),
            norm=_worst([row.norm for row in rows]),
            rank=guilty[0] if guilty else None,
            ranks=guilty,
            node=rows[guilty[0]].node if guilty else "",
            is_left_out=self._leaves_out,
            ruling=ruling,
        )
        return not self._leaves_out, bad

    def state_dict(self) -> dict[str, Any]:
        """All that a later judgement depends on, to the bit."""
        return {
            "count": self._count,
            "nonfinite": self._rule.state_dict(),
            "spikes": self._spikes.state_dict() if self._spikes is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; also from what an engine's guard has remembered."""
        self._count = int(state["count"])
        if state["nonfinite"] is not None:
            self._rule.load_state_dict(state["nonfinite"])
        if self._spikes is not None and state["spikes"] is not None:
            self._spikes.load_state_dict(state["spikes"])


def _not_all(rows: Sequence[RankNumbers], name: str) -> tuple[int, ...]:
    """Ranks whose number is not finite; none where that is so of all, since it has travelled."""
    guilty = tuple(r for r, row in enumerate(rows) if not math.isfinite(getattr(row, name)))
    return guilty if len(guilty) < len(rows) or len(rows) == 1 else ()


def _worst(values: Sequence[float]) -> float:
    """The largest, or the first that is not finite: of NaN no MAX is certain."""
    return next((value for value in values if not math.isfinite(value)), max(values))
