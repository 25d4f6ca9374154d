"""What one GPU's memory holds in each moment of a step, by part.

A step is walked through moment by moment: the loss, the backward pass of each block, the end of
the backward pass, the update. Each moment is a sum of parts; the fullest decides (`peaks`, which
has the moments of pipelines and DeepSpeed). Not in it: what the allocator and the driver take
beyond tensors (`Peak.allowance`). Pure.
tests/unit/strategy/test_memory.py holds single terms, tests/engines/test_strategy_measured.py the
sums against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import (
    FP32,
    LOGITS_BACKWARD,
    LOGITS_FORWARD,
    Widths,
    widths,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.strategy.facts import ModelFacts

WEIGHTS = "weights"
COPIES = "16-bit copies"
GRADIENTS = "gradients"
MOMENTS = "moments"
GATHERED = "gathered units"
FRAGMENTED = 0.05
"""Share of what comes and goes in a step that the allocator is allowed beside it, in pieces that
nothing fits into. Weights and moments stay where they are, without such pieces."""
CONTEXT_BYTES = 1_000_000_000
"""The driver's context, kernels and NCCL's buffers. Both are allowances, no measurements."""
SHARDS_GRADIENTS = 2
FORMULA_ERROR = 0.06
"""Share by which a formula's tensors were off at most: 5.3 % in tests/data/plan-peaks.md."""
ELSEWHERE_ERROR = 0.2
"""The same of other engines' rows, in tests/data/plan-published.md: their optimizers differ."""
LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance: so many stay gathered."""


@dataclass(frozen=True)
class Batch:
    """What a rank is given: `micro` samples of `seq` positions in each of a step's `passes`."""

    micro: int
    seq: int
    passes: int = 1

    @property
    def tokens(self) -> int:
        """Of a pass."""
        return self.micro * self.seq


@dataclass(frozen=True)
class Spread:
    """How a model lies on the ranks."""

    kind: str = "single"  # "single", "ddp", "fsdp2", or "zero1" to "zero3"
    shards: int = 1  # ranks over which weights, gradients and moments are cut
    copies: int = 1  # HSDP: of the sharded model
    tp: int = 1  # tensor-parallel ranks
    recompute: bool = False  # each block's pass is computed again in the backward pass
    reshard: bool = True  # a block is freed after its forward pass
    low: int = 2  # bytes of a number in products: 2 or 4
    offload: bool = False  # weights, gradients and moments rest in the host's memory
    pp: int = 1  # stages of a pipeline
    ep: int = 1  # ranks that share experts; each has some of them whole, cut over the others
    lora: int = 0  # rank of adapters, which alone are trained; 0 where all weights are
    # what a block keeps where only the rest is computed again: "products" (attention and every
    # matrix product: hpctrain's `selective`), "half" (attention and every second product:
    # torchtitan's `op`); empty where nothing is, or all
    selective: str = ""
    # FSDP2 reduces gradients in each pass of a step, not only in the last one
    each_pass: bool = False
    # bytes of a weight between steps; of a frozen one where adapters are trained
    stored: int = FP32
    moment: int = FP32  # bytes of each of Adam's two moments
    fused: bool = False  # norms, activation functions and the loss are one kernel each
    loss: int = FP32  # bytes of a number in the loss
    loss_parallel: bool = False  # each tensor-parallel rank has a part of the classes
    casts: bool = False  # adapters compute in fp32, and cast each matrix' input for themselves

    @property
    def autocast(self) -> bool:
        """Whether weights stay in fp32, with copies of 16 bits for a pass."""
        return self.kind in {"single", "ddp"} and self.low != FP32 and self.stored == FP32

    @property
    def gradient(self) -> int:
        """Bytes of a gradient that waits for the update."""
        return FP32 if self.lora else self.stored


Parts = dict[str, float]


@dataclass(frozen=True)
class Peak:
    """The fullest moment: its name, and its bytes by part."""

    moment: str
    parts: Parts

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return round(sum(self.parts.values()))

    @property
    def allowance(self) -> int:
        """Bytes kept free for the allocator and the driver."""
        rests = self.parts.get(WEIGHTS, 0) + self.parts.get(MOMENTS, 0)
        return round((self.nbytes - rests) * FRAGMENTED) + CONTEXT_BYTES

    @property
    def needed(self) -> int:
        """What a GPU must have."""
        return self.nbytes + self.allowance


def at(moment: str, base: Parts, **parts: float) -> Peak:
    """Return a moment in which `parts` are there, beside what rests (`base`)."""
    held = {GATHERED if name == "gathered" else name: n for name, n in parts.items()}
    return Peak(moment, base | held)


def cut(model: ModelFacts, tp: int) -> ModelFacts:
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


def widths_of(model: ModelFacts, layout: Spread) -> Widths:
    """What a token keeps, as a model is spread."""
    return widths(
        model,
        low=layout.low,
        autocast=layout.autocast,
        tp=layout.tp,
        lora=layout.lora,
        ep=layout.ep,
        fused=layout.fused,
        casts=layout.casts,
    )


def logit_bytes(layout: Spread) -> int:
    """Return bytes of a logit at the loss.

    A loss of one kernel turns the model's own logits, and one copy of them, into gradients. One in
    16 bits has the logits, their log-softmax, its gradient and theirs.
    """
    if layout.fused:
        return layout.low + FP32
    if layout.loss != FP32:
        return 4 * layout.loss
    return max(LOGITS_BACKWARD, LOGITS_FORWARD + layout.low)


def own_matrix(model: ModelFacts, layout: Spread) -> float:
    """Elements of the matrix whose gradient is first there in a block's backward pass.

    It is the MLP's last; of experts, those of this rank are one.
    """
    if model.expert_params:
        return model.expert_params / 3 / layout.ep
    return (layout.lora or model.hidden) * model.inner / layout.tp


def edges(layers: int) -> list[int]:
    """Return the blocks of which one is the fullest: what a block holds is convex in its number.

    The first and the last differ from those between them, so that both neighbours count too.
    """
    return sorted({0, min(1, layers - 1), max(0, layers - 2), layers - 1})


class StepMemory:
    """What all layouts share: activations and logits."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread) -> None:
        self.kept = widths_of(model, layout)
        model = cut(model, layout.tp)
        self.adapters = model.adapter_params(layout.lora)
        self.learnt_params = model.layers * self.adapters if layout.lora else model.params
        self.model, self.batch, self.layout = model, batch, layout
        self.tokens = batch.tokens
        self.block = self.kept.block * self.tokens
        of_block = self.kept.of_block(recompute=layout.recompute, selective=layout.selective)
        self.of_block = of_block * self.tokens
        self.outside = self.kept.outside * self.tokens
        self.logits = self.tokens * model.vocab / (layout.tp if layout.loss_parallel else 1)
        self.logit_bytes = logit_bytes(layout)

    def activations(self, blocks: int, *, outside: bool = False) -> float:
        """Kept for the backward pass by the first so many blocks."""
        again = self.layout.recompute or self.layout.selective
        spared = self.kept.spared * self.tokens if blocks and not again else 0.0
        return blocks * self.of_block - spared + (self.outside if outside else 0.0)

    def in_block(self, block: int) -> float:
        """As a block's backward pass runs: those before it, its own, and what it takes."""
        own = self.block + self.kept.block_backward * self.tokens
        return (
            self.activations(block) + own + (self.kept.entry * self.tokens * self.layout.recompute)
        )


class Whole(StepMemory):
    """Every rank has the whole model: one process, or DDP."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread) -> None:
        super().__init__(model, batch, layout)
        model, learnt = self.model, self.learnt_params
        self.is_ddp = layout.kind == "ddp"
        tied_head = model.vocab * model.hidden if model.tied else 0
        self.head_copy = model.head_params + tied_head
        self.block_copy = model.matrix_params + model.expert_params
        weights = layout.stored * model.params + FP32 * model.layers * self.adapters
        self.rest: Parts = {WEIGHTS: weights, MOMENTS: 2 * layout.moment * learnt}
        self.whole_gradients = layout.gradient * learnt
        self.from_start = self.is_ddp or batch.passes > 1

    def base(self, blocks: int, *, head: bool = True) -> Parts:
        """What rests, and the copies in 16 bits that so many blocks are left with, and the head.

        Autocast keeps those of what is trained to its end; of frozen weights each product keeps
        its own, which goes with the product, or with the block that is computed again.
        """
        low, model, layout = self.layout.low, self.model, self.layout
        if not layout.autocast:
            return {**self.rest, COPIES: 0.0}
        if not layout.lora:
            return {**self.rest, COPIES: low * (model.layers * self.block_copy + self.head_copy)}
        blocks = min(blocks, 1 - head) if layout.recompute else blocks
        # The first block's queries, keys and values pass no gradient on, and keep no weights.
        first = model.hidden * (model.query + 2 * model.key) if blocks else 0
        copied = blocks * self.block_copy - first + head * self.head_copy
        return {**self.rest, COPIES: low * (copied + self.learnt_params)}

    def gradients(self, blocks: int) -> float:
        """Of the blocks that the backward pass is through with, and the head."""
        if self.from_start:
            return self.whole_gradients
        if self.layout.lora:
            return FP32 * blocks * self.adapters
        own = 0 if self.model.tied else self.model.head_params
        return self.layout.gradient * (blocks * self.model.block_params + own)

    def moments(self) -> Iterator[Peak]:
        """Of a step, each full in its way."""
        layers = self.model.layers
        begun = self.gradients(0) if self.from_start else 0.0
        saved = self.activations(layers, outside=True)
        yield at(
            "the loss",
            self.base(layers),
            gradients=begun,
            activations=saved,
            logits=self.logits * self.logit_bytes,
        )
        head = {**self.base(layers), GRADIENTS: self.gradients(0)}
        yield at(
            "the head's backward pass",
            head,
            activations=saved + self.kept.head_backward * self.tokens,
        )
        for done in edges(layers):
            yield at(
                "a block's backward pass",
                self.base(layers - done, head=False),
                gradients=self.gradients(done),
                activations=self.in_block(layers - 1 - done),
                buffers=self._moving(),
            )
        yield from self._end()

    def _end(self) -> Iterator[Peak]:
        """The embedding's gradients, and the update."""
        model = self.model
        # A tied matrix has gradients from both of its ends, and their sum.
        matrix = 0 if self.layout.lora else self.layout.gradient * model.vocab * model.hidden
        ends = matrix * (2 * model.tied + self.from_start)
        yield at(
            "the end of the backward pass",
            self.base(0, head=False),
            gradients=self.whole_gradients,
            buffers=ends,
        )
        yield at(
            "the update",
            self.rest,
            gradients=self.whole_gradients,
            update=self.layout.moment * self.learnt_params,
        )

    def _moving(self) -> float:
        """A matrix' gradient on its way: in 16 bits, and before it is added in fp32."""
        rows = self.layout.lora or self.model.hidden
        largest = rows * self.model.inner
        return (self.layout.low + self.layout.gradient * self.from_start) * largest


class Sharded(StepMemory):
    """FSDP2: every parameter is cut over ranks, and gathered unit by unit."""

    def __init__(self, model: ModelFacts, batch: Batch, layout: Spread) -> None:
        super().__init__(model, batch, layout)
        model = self.model
        # What is offloaded rests on the host: the device has it for no more than a copy's time.
        rests = 0.0 if layout.offload else 1 / layout.shards
        self.own = rests * self.learnt_params
        self.base: Parts = {
            WEIGHTS: rests * (layout.stored * model.params + FP32 * model.layers * self.adapters),
            MOMENTS: 2 * layout.moment * self.own,
        }
        self.waits = batch.passes > 1 and not layout.each_pass
        # Shards of the passes before are there from the start on, where each pass reduces.
        added_up = batch.passes > 1 and layout.each_pass
        self.begun = layout.gradient * self.own * added_up
        away = model.expert_params * (1 - 1 / layout.ep)  # on other ranks, gathered there
        self.unit = model.block_params - away + self.adapters
        self.learnt = float(self.adapters) if layout.lora else self.unit
        tied = model.embed_params if model.tied else 0
        self.root = model.head_params + tied  # gathered from the head on until it is over
        self.free = 0 if model.tied else model.embed_params
        ends = not layout.lora  # whether they are trained
        self.apart = 0 if model.tied else ends * self.root  # reduced before the blocks
        self.last = ends * (self.root if model.tied else self.free)  # and behind them
        # A tied matrix' gradient from the head waits in 16 bits for the embedding's.
        self.of_head = layout.low * model.tied * ends * model.vocab * model.hidden / layout.tp
        # The gradient of the MLP's last matrix, in 16 bits, as the pass is within the MLP.
        self.moving = layout.low * own_matrix(model, layout)

    def gradients(self, blocks: int) -> float:
        """This rank's shards, of the blocks that are through, and those that wait in whole."""
        through = blocks * self.learnt + self.apart
        own = self.layout.gradient * through / self.layout.shards * (not self.layout.offload)
        return max(own, self.begun) + self.waiting(through)

    def waiting(self, through: float) -> float:
        """Gradients in fp32 that are not reduced before the last pass of several."""
        whole = self.model.layers * self.learnt + self.apart + self.last
        return FP32 * (whole - through) if self.waits else 0.0

    def reduced(self, whole: float) -> float:
        """In fp32: what is reduced, in one piece, and this rank's shard that comes out of it.

        Of a unit whose last parameter is a large matrix, as head and embedding are. Of a block the
        gradients in 16 bits go before the shard comes, and these are no less: `foreach_reduce` of
        torch 2.13 keeps none but its last parameter's, a norm's.
        """
        return FP32 * whole * (1 + 1 / self.layout.shards)

    def gathered(self, blocks: int, *, beside: float = 0.0) -> float:
        """Bytes of blocks that are whole, beside the root."""
        return self.layout.low * (self.root + blocks * self.unit + beside)

    def moments(self) -> Iterator[Peak]:
        """Of a step, each full in its way."""
        yield from self._forward()
        for done in edges(self.model.layers):
            yield from self._block(done)
        yield from self._end()
        yield at(
            "the update",
            self.base,
            gradients=self.layout.gradient * self.own,
            update=self.layout.moment * self.own,
        )

    def _forward(self) -> Iterator[Peak]:
        """The loss, units that are gathered, and the head's reduction ahead of all others."""
        layout, layers = self.layout, self.model.layers
        saved = self.activations(layers, outside=True)
        stays = 0 if layout.reshard else layers
        free = 0.0 if layout.reshard else self.free
        yield at(
            "the loss",
            self.base,
            gradients=self.begun + self.waiting(0),
            activations=saved,
            logits=self.logits * self.logit_bytes,
            gathered=self.gathered(stays, beside=free),
        )
        # A unit is gathered into one piece, and copied out of it; the one before is there still.
        for name, unit in (("a block", self.unit), ("the head", self.root)):
            before = (stays or 1) * self.unit + free
            own = 0.0 if stays and unit is self.unit else unit
            yield at(
                f"{name} is gathered",
                self.base,
                gradients=self.begun + self.waiting(0),
                activations=self.activations(layers - (unit is self.unit)),
                gathered=layout.low * (before + own),
                buffers=layout.low * unit,
            )
        if self.apart:
            yield at(
                "the head's reduction",
                self.base,
                gradients=self.waiting(0) or self.begun + layout.low * self.root,
                activations=saved,
                gathered=layout.low * (max(1, stays) * self.unit + free),
                buffers=self.reduced(self.root),
            )

    def _block(self, done: int) -> Iterator[Peak]:
        """A block's backward pass, behind which its gradients are reduced."""
        model, layout, layers = self.model, self.layout, self.model.layers
        block = layers - 1 - done
        unit, learnt, low = self.unit, self.learnt, layout.low
        ahead = low * unit if block and layout.reshard else 0.0
        free = 0.0 if layout.reshard else self.free
        stays = 1 if layout.reshard else block + 1
        held = low * ((self.root if model.tied else 0) + free + unit * stays)
        # What was reduced before, the head at first, is let go of as the next reduction begins.
        last_reduced = FP32 * (learnt if done else self.apart)
        yield at(
            "a block's backward pass",
            self.base,
            gradients=self.gradients(done) + self.of_head + self.moving,
            activations=self.in_block(block),
            gathered=held,
            buffers=ahead + last_reduced,
        )
        own = self.of_head + low * learnt
        yield at(
            "the end of a block's backward pass",
            self.base,
            gradients=self.gradients(done) + own,
            activations=self.activations(block) + self.kept.block_end * self.tokens,
            gathered=held,
            buffers=ahead + last_reduced,
        )
        # Of several passes' the last has been added to those that wait, in fp32.
        added = low * learnt * (not self.waits)
        yield at(
            "a block's reduction",
            self.base,
            gradients=self.gradients(done) + self.of_head + added,
            activations=self.activations(block),
            gathered=held - low * unit,
            buffers=FP32 * learnt + ahead,
        )

    def _end(self) -> Iterator[Peak]:
        """The embedding's gradients, with the root's where they are one matrix."""
        layout, last, tied = self.layout, self.last, self.model.tied
        through = self.gradients(self.model.layers)
        held = layout.low * last if tied else 0.0
        if self.of_head:
            yield at(
                "a tied matrix' gradients are added",
                self.base,
                gradients=through + layout.low * last + 2 * self.of_head,
                gathered=held,
                buffers=FP32 * self.learnt,
            )
        # Of several passes' the last has been added to those that wait, in fp32.
        own = layout.low * last * (not self.waits)
        yield at(
            "the last reduction",
            self.base,
            gradients=through + own,
            gathered=held,
            buffers=FP32 * last if tied else self.reduced(last),
        )
