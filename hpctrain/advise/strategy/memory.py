"""What one GPU's memory holds at its fullest moment, by part: the words for it.

A step is walked through moment by moment (`steps`, `stages`, `adapters`): the loss, the backward
pass of each block, the end of the backward pass, the update. Each moment is a sum of parts; the
fullest decides (`peaks`). Not in it: what the allocator and the driver take beyond tensors
(`Peak.allowance`). Pure.
tests/unit/strategy/test_memory.py holds single terms, tests/engines/test_strategy_measured.py the
sums against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.advise.strategy.activations import FP32

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
QUANTISED = 4 / 8 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: 4 bits, a constant of 8 bits for 64 of them, and one of 32 bits for 256
constants (Dettmers et al., QLoRA, 2023, section 3)."""
SHARDS_GRADIENTS = 2
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
    """How a model lies on the ranks.

    Attributes:
        kind: "single", "ddp", "fsdp2", or "zero1" to "zero3".
        shards: Ranks over which weights, gradients and moments are cut.
        copies: HSDP: of the sharded model.
        tp: Tensor-parallel ranks.
        recompute: Each block's pass is computed again in the backward pass.
        reshard: A block is freed after its forward pass.
        low: Bytes of a number in products: 2 or 4.
        offload: Weights, gradients and moments rest in the host's memory.
        pp: Stages of a pipeline.
        ep: Ranks that share experts; each has some of them whole, cut over the others.
        lora: Rank of adapters, which alone are trained; 0 where all weights are.
        quantised: What is not trained lies in 4 bits.
        selective: What a block keeps where only the rest is computed again: "products" (attention
            and every matrix product: hpctrain's `selective`), "half" (attention and every second
            product: torchtitan's `op`); empty where nothing is, or all.
        each_pass: FSDP2 reduces gradients in each pass of a step, not only in the last one.
        stored: Bytes of a weight between steps; of a frozen one where adapters are trained.
        moment: Bytes of each of Adam's two moments.
        fused: Norms, activation functions and the loss are one kernel each.
    """

    kind: str = "single"
    shards: int = 1
    copies: int = 1
    tp: int = 1
    recompute: bool = False
    reshard: bool = True
    low: int = 2
    offload: bool = False
    pp: int = 1
    ep: int = 1
    lora: int = 0
    quantised: bool = False
    selective: str = ""
    each_pass: bool = False
    stored: int = FP32
    moment: int = FP32
    fused: bool = False

    @property
    def autocast(self) -> bool:
        """Whether weights stay in fp32, with copies of 16 bits for a pass."""
        in_fp32 = self.stored == FP32 or self.quantised
        return self.kind in {"single", "ddp"} and self.low != FP32 and in_fp32

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
        return round(self.nbytes * FRAGMENTED) + CONTEXT_BYTES

    @property
    def needed(self) -> int:
        """What a GPU must have."""
        return self.nbytes + self.allowance
