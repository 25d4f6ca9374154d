"""What one GPU's memory holds at its fullest moment, by part.

A step is walked through moment by moment: the loss, the backward pass of each block, the end of the
backward pass, the update. Each moment is a sum of parts; the fullest decides. Not in it: what the
allocator and the driver take beyond tensors (`ALLOWANCE`). Pure.
tests/unit/strategy/test_memory.py holds single terms, tests/engines/test_strategy_measured.py the
sums against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.plan.deepspeed import BUCKET_ELEMENTS, SPREADS_PARAMETERS
from hpctrain.strategy.activations import (
    FP32,
    LOGITS_BACKWARD,
    LOGITS_FORWARD,
    Widths,
    widths,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.strategy.facts import ModelFacts

WEIGHTS = "weights"
COPIES = "16-bit copies"
GRADIENTS = "gradients"
MOMENTS = "moments"
ACTIVATIONS = "activations"
LOGITS = "logits"
GATHERED = "gathered units"
BUFFERS = "buffers"
UPDATE = "update"
PARTS = (
    WEIGHTS, COPIES, GRADIENTS, MOMENTS, ACTIVATIONS, LOGITS, GATHERED, BUFFERS, UPDATE
)  # fmt: skip
FRAGMENTED = 0.05
"""Share of the peak that the allocator is allowed beside it, in pieces that nothing fits into."""
CONTEXT_BYTES = 1_000_000_000
"""The driver's context, kernels and NCCL's buffers. Both are allowances, no measurements."""


@dataclass(frozen=True)
class Batch:
    """What a rank is given.

    Attributes:
        micro: Samples in a pass.
        seq: Positions of a sample.
        passes: Of a step.
    """

    micro: int
    seq: int
    passes: int = 1

    @property
    def tokens(self) -> int:
        """Of a pass."""
        return self.micro * self.seq


@dataclass(frozen=True)
class Spread:
    """How a model lies on the ranks.

    Attributes:
        kind: "single", "ddp", "fsdp2", or "zero1" to "zero3".
        shards: Ranks over which weights, gradients and moments are cut.
        copies: HSDP: of the sharded model.
        tp: Tensor-parallel ranks.
        recompute: Each block's pass is computed again in the backward pass.
        reshard: A block is freed after its forward pass.
        low: Bytes of a number in products: 2 or 4.
    """

    kind: str = "single"
    shards: int = 1
    copies: int = 1
    tp: int = 1
    recompute: bool = False
    reshard: bool = True
    low: int = 2

    @property
    def autocast(self) -> bool:
        """Whether weights stay in fp32, with copies of 16 bits for a pass."""
        return self.kind in {"single", "ddp"} and self.low != FP32


Parts = dict[str, float]


@dataclass(frozen=True)
class Peak:
    """The fullest moment.

    Attributes:
        moment: Which.
        parts: Bytes by part.
    """

    moment: str
    parts: Parts

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return round(sum(self.parts.values()))

    @property
    def allowance(self) -> int:
        """Bytes kept free for the allocator and the driver."""
        return round(self.nbytes * FRAGMENTED) + CONTEXT_BYTES

    @property
    def needed(self) -> int:
        """What a GPU must have."""
        return self.nbytes + self.allowance


def peak(model: ModelFacts, batch: Batch, layout: Spread) -> Peak:
    """The fullest moment of a step on one rank."""
    step = _STEPS.get(layout.kind, _Zero)(model, batch, layout)
    return max(step.moments(), key=lambda moment: moment.nbytes)


def _cut(model: ModelFacts, tp: int) -> ModelFacts:
    """The part of every matrix that one of so many ranks has. Norms, which all have, are small."""
    if tp == 1:
        return model
    return replace(
        model,
        block_params=-(-model.block_params // tp),
        matrix_params=-(-model.matrix_params // tp),
        embed_params=-(-model.embed_params // tp),
        head_params=-(-model.head_params // tp),
    )


class _Step:
    """What all layouts share: activations and logits."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread) -> None:
        self.kept: Widths = widths(model, low=layout.low, autocast=layout.autocast, tp=layout.tp)
        model = _cut(model, layout.tp)
        self.model, self.batch, self.layout = model, batch, layout
        self.tokens = batch.tokens
        self.block = self.kept.block * self.tokens
        self.of_block = (self.kept.entry if layout.recompute else self.kept.block) * self.tokens
        self.again = self.block if layout.recompute else 0.0
        self.outside = self.kept.outside * self.tokens
        self.logits = float(self.tokens * model.vocab)

    def activations(self, blocks: int, *, outside: bool = False) -> float:
        """Kept for the backward pass by the first so many blocks."""
        return blocks * self.of_block + (self.outside if outside else 0.0)

    def in_block(self, block: int) -> float:
        """As a block's backward pass runs: those before it, its own, and what it takes."""
        own = self.block + self.kept.block_backward * self.tokens
        return (
            self.activations(block) + own + (self.kept.entry * self.tokens * self.layout.recompute)
        )


class _Whole(_Step):
    """Every rank has the whole model: one process, or DDP."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread) -> None:
        super().__init__(model, batch, layout)
        model = self.model
        params = model.params
        self.is_ddp = layout.kind == "ddp"
        tied_head = model.vocab * model.hidden if model.tied else 0
        head = model.head_params + tied_head
        casts = model.layers * (model.matrix_params + model.expert_params) + head
        copies = layout.low * casts if layout.autocast else 0.0
        self.rest: Parts = {WEIGHTS: FP32 * params, MOMENTS: 2 * FP32 * params}
        self.base: Parts = {**self.rest, COPIES: copies}
        self.whole_gradients = FP32 * params
        self.from_start = self.is_ddp or batch.passes > 1

    def gradients(self, blocks: int) -> float:
        """Of the blocks that the backward pass is through with, and the head."""
        if self.from_start:
            return self.whole_gradients
        own = 0 if self.model.tied else self.model.head_params
        return FP32 * (blocks * self.model.block_params + own)

    def moments(self) -> Iterator[Peak]:
        model, layers = self.model, self.model.layers
        begun = self.gradients(0) if self.from_start else 0.0
        saved = self.activations(layers, outside=True)
        yield Peak(
            "the loss",
            {
                **self.base,
                GRADIENTS: begun,
                ACTIVATIONS: saved,
                LOGITS: self.logits * max(LOGITS_BACKWARD, LOGITS_FORWARD + self.layout.low),
            },
        )
        head = {**self.base, GRADIENTS: self.gradients(0)}
        yield Peak(
            "the head's backward pass",
            {
                **head,
                ACTIVATIONS: saved + self.kept.head_backward * self.tokens,
            },
        )
        for done in range(layers):
            yield Peak(
                "a block's backward pass",
                {
                    **self.base,
                    GRADIENTS: self.gradients(done),
                    ACTIVATIONS: self.in_block(layers - 1 - done),
                    BUFFERS: self._moving(),
                },
            )
        # A tied matrix has gradients from both of its ends, and their sum.
        matrix = FP32 * model.vocab * model.hidden
        ends = matrix * (2 * model.tied + self.from_start)
        yield Peak(
            "the end of the backward pass",
            {
                **self.base,
                GRADIENTS: self.whole_gradients,
                BUFFERS: ends,
            },
        )
        yield Peak(
            "the update",
            {
                **self.rest,
                GRADIENTS: self.whole_gradients,
                UPDATE: FP32 * model.params,
            },
        )

    def _moving(self) -> float:
        """A matrix' gradient on its way: in 16 bits, and before it is added in fp32."""
        largest = self.model.hidden * self.model.inner
        return (self.layout.low + FP32 * self.from_start) * largest


class _Sharded(_Step):
    """FSDP2: every parameter is cut over ranks, and gathered unit by unit."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread) -> None:
        super().__init__(model, batch, layout)
        model = self.model
        own = model.params / layout.shards
        self.base: Parts = {WEIGHTS: FP32 * own, MOMENTS: 2 * FP32 * own}
        self.own = own
        tied = model.embed_params if model.tied else 0
        self.root = model.head_params + tied  # gathered from the head on until it is over
        self.free = 0 if model.tied else model.embed_params

    def whole(self) -> float:
        """Gradients in fp32 that are not reduced before the last pass of several."""
        return FP32 * self.model.params if self.batch.passes > 1 else 0.0

    def gradients(self, blocks: int, *, root: bool = True) -> float:
        """This rank's shards, of the blocks that are through, and those that wait in whole."""
        through = blocks * self.model.block_params
        if root and not self.model.tied:
            through += self.root
        return FP32 * through / self.layout.shards + self.waiting(through)

    def waiting(self, through: float) -> float:
        return FP32 * (self.model.params - through) if self.batch.passes > 1 else 0.0

    def gathered(self, blocks: int, *, beside: float = 0.0) -> float:
        """Bytes of blocks that are whole, beside the root."""
        return self.layout.low * (self.root + blocks * self.model.block_params + beside)

    def moments(self) -> Iterator[Peak]:
        model, layout, layers = self.model, self.layout, self.model.layers
        saved = self.activations(layers, outside=True)
        stays = 0 if layout.reshard else layers
        free = 0.0 if layout.reshard else self.free
        yield Peak(
            "the loss",
            {
                **self.base,
                GRADIENTS: self.waiting(0),
                ACTIVATIONS: saved,
                LOGITS: self.logits * max(LOGITS_BACKWARD, LOGITS_FORWARD + layout.low),
                GATHERED: self.gathered(stays, beside=free),
            },
        )
        yield Peak(
            "the last block's forward pass",
            {
                **self.base,
                GRADIENTS: self.waiting(0),
                ACTIVATIONS: saved,
                GATHERED: self.gathered(stays or 2, beside=free),
                BUFFERS: 2 * layout.low * model.block_params,
            },
        )
        if not model.tied:
            yield Peak(
                "the head's reduction",
                {
                    **self.base,
                    GRADIENTS: self.waiting(0) or layout.low * self.root,
                    ACTIVATIONS: saved,
                    GATHERED: layout.low * (max(1, stays) * model.block_params + free),
                    BUFFERS: FP32 * self.root,
                },
            )
        for done in range(layers):
            yield from self._block(done)
        yield from self._end()
        yield Peak(
            "the update",
            {
                **self.base,
                GRADIENTS: FP32 * self.own,
                UPDATE: FP32 * self.own,
            },
        )

    def _block(self, done: int) -> Iterator[Peak]:
        """A block's backward pass, behind which its gradients are reduced."""
        model, layout, layers = self.model, self.layout, self.model.layers
        block = layers - 1 - done
        unit, low = model.block_params, layout.low
        ahead = low * unit if block and layout.reshard else 0.0
        free = 0.0 if layout.reshard else self.free
        stays = 1 if layout.reshard else block + 1
        held = low * ((self.root if model.tied else 0) + free + unit * stays)
        # What was reduced before is let go of when the next reduction begins.
        yield Peak(
            "a block's backward pass",
            {
                **self.base,
                GRADIENTS: self.gradients(done),
                ACTIVATIONS: self.in_block(block),
                GATHERED: held,
                BUFFERS: ahead + (FP32 * unit if done else 0.0),
            },
        )
        own = 0.0 if self.batch.passes > 1 else low * unit
        yield Peak(
            "a block's reduction",
            {
                **self.base,
                GRADIENTS: self.gradients(done) + own,
                ACTIVATIONS: self.activations(block),
                GATHERED: held - low * unit + ahead,
                BUFFERS: FP32 * unit + ahead,
            },
        )

    def _end(self) -> Iterator[Peak]:
        """The embedding's gradients, with the root's where they are one matrix."""
        layout, last = self.layout, self.root if self.model.tied else self.free
        held = layout.low * last if self.model.tied else 0.0
        yield Peak(
            "the last reduction",
            {
                **self.base,
                GRADIENTS: self.gradients(self.model.layers) + layout.low * last,
                GATHERED: held,
                BUFFERS: FP32 * last,
            },
        )


class _Zero(_Step):
    """DeepSpeed's stages 1 to 3 as hpctrain sets them: weights of 16 bits, shards of fp32."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread) -> None:
        super().__init__(model, batch, layout)
        self.stage = int(layout.kind[-1])
        self.own = model.params / layout.shards
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
                LOGITS: self.logits * max(LOGITS_BACKWARD, LOGITS_FORWARD + low),
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


_STEPS: dict[str, type[_Whole | _Sharded | _Zero]] = {
    "single": _Whole,
    "ddp": _Whole,
    "fsdp2": _Sharded,
}
SHARDS_GRADIENTS = 2
LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance: so many stay gathered."""
