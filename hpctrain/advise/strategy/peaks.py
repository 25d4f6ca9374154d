"""The fullest moment of a step, whatever the layout; moments of DeepSpeed and pipelines. Pure.

Under DeepSpeed's stages 1 to 3, as hpctrain sets them, weights lie in 16 bits, their masters and
moments in shards of fp32; what travels goes through a bucket.
tests/unit/strategy/test_moments.py holds each moment by hand, test_memory.py single terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32, LOGITS_BACKWARD
from hpctrain.advise.strategy.memory import (
    GATHERED,
    GRADIENTS,
    LIVE_ELEMENTS,
    MOMENTS,
    SHARDS_GRADIENTS,
    WEIGHTS,
    Batch,
    Parts,
    Peak,
    Sharded,
    Spread,
    StepMemory,
    Whole,
    at,
    edges,
    own_matrix,
)
from hpctrain.ledger.plan.deepspeed import BUCKET_ELEMENTS, SPREADS_PARAMETERS
from hpctrain.ledger.plan.mesh import balance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.strategy.facts import ModelFacts

MICROBATCHES = 4
"""For each stage, so that a rank waits for no more than a fifth of the step."""


@dataclass(frozen=True)
class StageFacts:
    """What a stage has of a model."""

    number: int  # from 0 on
    count: int  # of all stages
    blocks: int  # of them
    embed: int  # parameters before the blocks; 0 but in the first stage
    head: int  # parameters behind them, a tied matrix among them; 0 but in the last stage
    block_params: int  # of one block

    @property
    def params(self) -> int:
        """All of them."""
        return self.blocks * self.block_params + self.embed + self.head

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.number == self.count - 1

    def in_flight(self, passes: int) -> int:
        """Microbatches whose activations are here at once, under 1F1B."""
        return min(self.count - self.number, passes)


def stages_of(model: ModelFacts, count: int) -> list[StageFacts]:
    """The stages that the engine cuts a decoder into: embedding, blocks, last norm, head."""
    norm, matrix = model.hidden, model.vocab * model.hidden
    sizes = [model.embed_params, *[model.block_params] * model.layers, norm, matrix]
    is_block = [False, *[True] * model.layers, False, False]
    return [
        StageFacts(
            number,
            count,
            sum(is_block[place] for place in run),
            model.embed_params if 0 in run else 0,
            sum(sizes[place] for place in run if place > model.layers),
            model.block_params,
        )
        for number, run in enumerate(balance(sizes, is_block, count))
    ]


class PipelineStage(StepMemory):
    """One stage under FSDP2 with 1F1B, as it trains several microbatches."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread, stage: StageFacts) -> None:
        super().__init__(model, batch, layout)
        self.stage = stage
        self.own = stage.params / layout.shards
        self.in_flight = stage.in_flight(batch.passes)
        self.entry = layout.low * model.hidden * self.tokens
        # What is received lies in memory of its own, for every microbatch of the step.
        receives = (stage.number > 0) + (not stage.is_last)
        self.received = batch.passes * receives * self.entry
        self.base: Parts = {
            WEIGHTS: FP32 * self.own,
            MOMENTS: 2 * FP32 * self.own,
            GATHERED: float(layout.low * stage.params),
        }
        self.whole = float(FP32 * stage.params)

    def stored(self, flights: int) -> float:
        """Activations of so many microbatches, with what was sent on."""
        sent = 0.0 if self.stage.is_last else self.entry
        ends = self.outside if self.stage.is_last else 0.0
        return flights * (self.activations(self.stage.blocks) + sent + ends)

    def moments(self) -> Iterator[Peak]:
        """Of the last microbatches, when gradients are there in whole."""
        stage, low = self.stage, self.layout.low
        full = {**self.base, GRADIENTS: self.whole}
        others = self.stored(self.in_flight - 1)
        if stage.is_last:
            yield at(
                "the loss",
                full,
                activations=self.stored(1),
                # Torch's stage keeps the model's own logits until the backward pass is over.
                logits=self.logits * (LOGITS_BACKWARD + low),
                buffers=self.received,
            )
        for block in edges(stage.blocks) if stage.blocks else []:
            yield at(
                "a block's backward pass",
                full,
                activations=others + self.in_block(block),
                buffers=self.received + low * own_matrix(self.model, self.layout),
            )
        yield at(
            "a block's gradients are added",
            full,
            activations=others + self.activations(stage.blocks - 1),
            buffers=self.received + low * stage.block_params,
        )
        yield at(
            "the embedding's gradients are added",
            full,
            activations=others,
            buffers=self.received + low * stage.embed,
        )
        yield from self._end()

    def _end(self) -> Iterator[Peak]:
        """Gradients are reduced unit by unit, then the update."""
        unit = max(self.stage.embed, self.stage.head, self.stage.block_params)
        yield at(
            "the reduction", self.base, gradients=self.whole, buffers=self.received + FP32 * unit
        )
        yield at(
            "the update",
            {WEIGHTS: self.base[WEIGHTS], MOMENTS: self.base[MOMENTS]},
            gradients=FP32 * self.own,
            update=FP32 * self.own,
            buffers=self.received,
        )


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
        yield at(
            "the loss",
            held,
            gradients=gradients,
            activations=saved,
            logits=self.logits * self.logit_bytes,
            buffers=buffers,
        )
        yield at(
            "the first block's forward pass",
            held,
            gradients=gradients,
            buffers=buffers
            + low * min(model.params, BUCKET_ELEMENTS) * (self.stage == SPREADS_PARAMETERS),
        )
        yield from self._backward(held, gradients, whole)
        yield at(
            "the update",
            self.base,
            gradients=FP32 * self.own,
            update=FP32 * self.own,
            buffers=self.bucket * (self.stage == SPREADS_PARAMETERS),
        )

    def _backward(self, held: Parts, gradients: float, whole: float) -> Iterator[Peak]:
        """From the last block to the last reduction."""
        model, low, layers = self.model, self.layout.low, self.model.layers
        matrix = model.vocab * model.hidden
        for done in range(layers):
            through = model.head_params + done * model.block_params
            part = low * through if self.stage == 1 else whole * done / layers
            yield at(
                "a block's backward pass",
                held,
                gradients=max(gradients, part),
                activations=self.in_block(layers - 1 - done),
                buffers=self.bucket + self._flat(through),
            )
        yield at(
            "the last reduction",
            held,
            gradients=gradients,
            buffers=self.bucket + self._flat(model.params),
        )
        yield at(
            "the end of the backward pass",
            held,
            gradients=whole,
            buffers=self.bucket
            + (FP32 * min(matrix, self.own) if self.stage == SHARDS_GRADIENTS else 0.0),
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
