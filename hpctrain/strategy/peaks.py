"""The fullest moment of a step, whatever the layout. Pure.

tests/unit/strategy/test_memory.py holds single terms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.strategy.activations import FP32
from hpctrain.strategy.stages import PipelineStage, stages_of
from hpctrain.strategy.steps import Sharded, Whole
from hpctrain.strategy.zero_steps import ZeroStep

if TYPE_CHECKING:
    from hpctrain.strategy.facts import ModelFacts
    from hpctrain.strategy.memory import Batch, Peak, Spread

_STEPS: dict[str, type[Whole | Sharded]] = {"single": Whole, "ddp": Whole, "fsdp2": Sharded}


def peak(model: ModelFacts, batch: Batch, layout: Spread) -> Peak:
    """The fullest moment of a step on one rank; of a pipeline on a rank of its fullest stage."""
    if layout.pp > 1:
        return max(stage_peaks(model, batch, layout), key=lambda peak: peak.nbytes)
    step = _STEPS.get(layout.kind, ZeroStep)(model, batch, layout)
    return max(step.moments(), key=lambda moment: moment.nbytes)


def stage_peaks(model: ModelFacts, batch: Batch, layout: Spread) -> list[Peak]:
    """Of each stage of a pipeline, in order."""
    return [
        max(PipelineStage(model, batch, layout, stage).moments(), key=lambda moment: moment.nbytes)
        for stage in stages_of(model, layout.pp)
    ]


def host_bytes(model: ModelFacts, layout: Spread) -> int:
    """What a rank's offloaded state takes of its node's memory.

    Masters, gradients and two moments in fp32; under DeepSpeed its weights of 16 bits too.
    """
    if not layout.offload:
        return 0
    each = 4 * FP32 + (layout.low if layout.kind.startswith("zero") else 0)
    return round(each * model.params / layout.shards)
