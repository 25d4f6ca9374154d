"""What one stage of a pipeline holds at its fullest moment.

hpctrain's engine keeps a stage's weights gathered and its gradients whole until the step's last
microbatch, and torch's stages have memory for every microbatch that they receive. The stages are
those that the engine cuts (`plan.limits`); under 1F1B the first has as many microbatches in flight
as there are stages, the last has one. Pure. tests/unit/strategy/test_stages.py holds the terms,
tests/engines/test_strategy_measured.py the sums against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32, LOGITS_BACKWARD
from hpctrain.advise.strategy.memory import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    MOMENTS,
    UPDATE,
    WEIGHTS,
    Peak,
)
from hpctrain.advise.strategy.steps import StepMemory, edges, own_matrix
from hpctrain.ledger.plan.limits import balance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.strategy.facts import ModelFacts
    from hpctrain.advise.strategy.memory import Batch, Parts, Spread

MICROBATCHES = 4
"""For each stage, so that a rank waits for no more than a fifth of the step."""


@dataclass(frozen=True)
class StageFacts:
    """What a stage has of a model.

    Attributes:
        number: From 0 on.
        count: Of all stages.
        blocks: Of them.
        embed: Parameters before the blocks; 0 but in the first stage.
        head: Parameters behind them, a tied matrix among them; 0 but in the last stage.
        block_params: Of one block.
    """

    number: int
    count: int
    blocks: int
    embed: int
    head: int
    block_params: int

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
            yield Peak(
                "the loss",
                {
                    **full,
                    ACTIVATIONS: self.stored(1),
                    # Torch's stage keeps the model's own logits until the backward pass is over.
                    LOGITS: self.logits * (LOGITS_BACKWARD + low),
                    BUFFERS: self.received,
                },
            )
        for block in edges(stage.blocks) if stage.blocks else []:
            yield Peak(
                "a block's backward pass",
                {
                    **full,
                    ACTIVATIONS: others + self.in_block(block),
                    BUFFERS: self.received + low * own_matrix(self.model, self.layout),
                },
            )
        yield Peak(
            "a block's gradients are added",
            {
                **full,
                ACTIVATIONS: others + self.activations(stage.blocks - 1),
                BUFFERS: self.received + low * stage.block_params,
            },
        )
        yield Peak(
            "the embedding's gradients are added",
            {**full, ACTIVATIONS: others, BUFFERS: self.received + low * stage.embed},
        )
        yield from self._end()

    def _end(self) -> Iterator[Peak]:
        """Gradients are reduced unit by unit, then the update."""
        unit = max(self.stage.embed, self.stage.head, self.stage.block_params)
        yield Peak(
            "the reduction",
            {**self.base, GRADIENTS: self.whole, BUFFERS: self.received + FP32 * unit},
        )
        yield Peak(
            "the update",
            {
                WEIGHTS: self.base[WEIGHTS],
                MOMENTS: self.base[MOMENTS],
                GRADIENTS: FP32 * self.own,
                UPDATE: FP32 * self.own,
                BUFFERS: self.received,
            },
        )
