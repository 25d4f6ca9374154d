"""The fullest moment of a step, whatever the layout, and the moments of DeepSpeed's stages. Pure.

Under DeepSpeed's stages 1 to 3, as hpctrain sets them, weights lie in 16 bits, their masters and
moments in shards of fp32; what travels goes through a bucket.
tests/unit/strategy/test_moments.py holds each moment by hand, test_memory.py single terms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32
from hpctrain.advise.strategy.memory import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    LIVE_ELEMENTS,
    LOGITS,
    MOMENTS,
    SHARDS_GRADIENTS,
    UPDATE,
    WEIGHTS,
    Peak,
)
from hpctrain.advise.strategy.stages import PipelineStage, stages_of
from hpctrain.advise.strategy.steps import Sharded, StepMemory, Whole
from hpctrain.ledger.plan.deepspeed import BUCKET_ELEMENTS, SPREADS_PARAMETERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.strategy.facts import ModelFacts
    from hpctrain.advise.strategy.memory import Batch, Parts, Spread


class ZeroStep(StepMemory):
    """DeepSpeed's stages 1 to 3 as hpctrain sets them: weights of 16 bits, shards of fp32."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread) -> None:
        super().__init__(model, batch, layout)
        self.stage = int(layout.kind[-1])
        self.own = 0.0 if layout.offload else model.params / layout.shards
        self.bucket = float(layout.low * BUCKET_ELEMENTS)
        weights = FP32 * self.own + layout.low * (
            self.own if self.stage == SPREADS_PARAMETERS else model.params
        )
        self.base: Parts = {WEIGHTS: weights, MOMENTS: 2 * FP32 * self.own}
        live = min(model.params, LIVE_ELEMENTS) if self.stage == SPREADS_PARAMETERS else 0
        self.gathered = float(layout.low * live)

    def resting(self) -> tuple[float, float]:
        """Gradients and buffers that are there before the first backward pass of several ends."""
        later = self.batch.passes > 1
        if self.stage == 1:
            return (self.layout.low * self.model.params if later else 0.0), 0.0
        kept = FP32 * self.own
        return kept if later or self.stage == SPREADS_PARAMETERS else 0.0, (
            self.bucket if later or self.stage == SPREADS_PARAMETERS else 0.0
        )

    def moments(self) -> Iterator[Peak]:
        """Of a step, each full in its way."""
        model, low, layers = self.model, self.layout.low, self.model.layers
        gradients, buffers = self.resting()
        saved = self.activations(layers, outside=True)
        held = {**self.base, GATHERED: self.gathered}
        whole = low * model.params if self.stage == 1 else FP32 * self.own
        yield Peak(
            "the loss",
            {
                **held,
                GRADIENTS: gradients,
                ACTIVATIONS: saved,
                LOGITS: self.logits * self.logit_bytes,
                BUFFERS: buffers,
            },
        )
        yield Peak(
            "the first block's forward pass",
            {
                **held,
                GRADIENTS: gradients,
                BUFFERS: buffers
                + low * min(model.params, BUCKET_ELEMENTS) * (self.stage == SPREADS_PARAMETERS),
            },
        )
        yield from self._backward(held, gradients, whole)
        yield Peak(
            "the update",
            {
                **self.base,
                GRADIENTS: FP32 * self.own,
                UPDATE: FP32 * self.own,
                BUFFERS: self.bucket * (self.stage == SPREADS_PARAMETERS),
            },
        )

    def _backward(self, held: Parts, gradients: float, whole: float) -> Iterator[Peak]:
        """From the last block to the last reduction."""
        model, low, layers = self.model, self.layout.low, self.model.layers
        matrix = model.vocab * model.hidden
        for done in range(layers):
            through = model.head_params + done * model.block_params
            part = low * through if self.stage == 1 else whole * done / layers
            yield Peak(
                "a block's backward pass",
                {
                    **held,
                    GRADIENTS: max(gradients, part),
                    ACTIVATIONS: self.in_block(layers - 1 - done),
                    BUFFERS: self.bucket + self._flat(through),
                },
            )
        yield Peak(
            "the last reduction",
            {**held, GRADIENTS: gradients, BUFFERS: self.bucket + self._flat(model.params)},
        )
        yield Peak(
            "the end of the backward pass",
            {
                **held,
                GRADIENTS: whole,
                BUFFERS: self.bucket
                + (FP32 * min(matrix, self.own) if self.stage == SHARDS_GRADIENTS else 0.0),
            },
        )

    def _flat(self, through: float) -> float:
        """Gradients in one piece, as they are reduced at stage 2."""
        waits = min(through, BUCKET_ELEMENTS) if self.stage == SHARDS_GRADIENTS else 0
        return self.layout.low * waits


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
