"""Which tensors a transformer's pass keeps for its backward pass, and how many bytes of a token.

Counted in the code of the models (transformers 5.23) and of torch's autograd, operator by operator;
attention is a flash kernel, as F.scaled_dot_product_attention takes it without a mask: it keeps its
inputs, its output and one number per head and position, and no square of the sequence. Dropout is
taken as 0; each place of it keeps 1 byte per element more. Pure.
tests/engines/test_strategy_measured.py holds the sums against what autograd kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.advise.strategy.facts import BERT, GPT2, LLAMA, MOE, ModelFacts

FP32 = 4
LOGITS_FORWARD = 2 * FP32
"""Bytes of a logit in fp32 as the loss is computed: the logit and its log-softmax. The model's own
16-bit logit comes on top."""
LOGITS_BACKWARD = 3 * FP32
"""As its gradient is: the log-softmax, its gradient, and the logit's gradient."""

RMS_NORM = 22
"""Bytes of a position that an RMSNorm's backward pass takes: five tensors in fp32, one in bf16."""


@dataclass(frozen=True)
class Widths:
    """Bytes that a token keeps, or takes for a moment."""

    block: float  # kept by one block
    entry: float  # kept of a block that is computed again: what goes into it
    outside: float  # kept outside of blocks: embedding, last norm, head
    block_backward: float  # taken by a block's backward pass beyond what the block has kept
    head_backward: float  # the same of the last norm's
    block_end: float = 0.0  # taken by the backward pass of a block's first norm
    spared: float = 0.0  # not kept by the first block, whose input needs no gradient
    # kept of a block where all but attention and matrix products is computed again
    products: float = 0.0
    # the same where every second product is computed again too, as torchtitan does it
    half: float = 0.0

    def of_block(self, *, recompute: bool, selective: str) -> float:
        """Return what a block keeps until its backward pass begins."""
        if recompute:
            return self.entry
        return {"": self.block, "products": self.products, "half": self.half}[selective]


def widths(
    model: ModelFacts,
    *,
    low: int,
    autocast: bool,
    tp: int = 1,
    lora: int = 0,
    ep: int = 1,
    fused: bool = False,
    casts: bool = False,
) -> Widths:
    """Return the widths of a token, whatever of a block is computed again.

    `low` is 2 bytes for products in 16 bits, 4 for fp32. With `autocast`, weights and the residual
    stream stay in fp32. `tp` ranks share each matrix, and the positions between matrices; `ep`
    ranks share experts. `lora` is the rank of adapters, which alone are trained; 0 means all
    weights; with `casts` these compute in fp32. With `fused`, norms and activation functions are
    one kernel each.
    """
    if lora:
        whole = widths(model, low=low, autocast=autocast, fused=fused)
        return _adapted(whole, model, low, lora, autocast=autocast, casts=casts)
    if tp > 1:
        return _shared(model, low, tp, fused=fused)
    if not autocast and low == FP32:
        return _scaled(model)
    whole = _in_16_bits(model, low, ep, autocast=autocast)
    products, half = _kept_products(model, low)
    entry = whole.entry
    block = whole.block - (_spared_by_fusion(model, low, autocast=autocast) if fused else 0)
    return replace(whole, block=block, products=entry + products, half=entry + half)


def _kept_products(model: ModelFacts, low: int) -> tuple[float, float]:
    """Return bytes of a block's attention and matrix products: of all, and of every second one.

    In the forward pass's order (query, key, value, output, MLP), torchtitan keeps the first, the
    third and so on (`torchtitan/distributed/activation_checkpoint.py`).
    """
    sizes = [size for size, _ in products_of(model)]
    attention = low * model.query + FP32 * model.heads
    return attention + low * sum(sizes), attention + low * sum(sizes[::2])


def products_of(model: ModelFacts) -> list[tuple[int, int]]:
    """Widths of result and input of each matrix product in a block, in the order of the pass."""
    hidden, routed = model.hidden, max(1, model.routed)
    projected = [(model.query, hidden), (model.key, hidden), (model.key, hidden)]
    if model.family == GPT2:  # one matrix for query, key and value
        projected = [(model.query + 2 * model.key, hidden)]
    inner = [(model.inner, hidden)] * (1 if model.family in {GPT2, BERT} else 2)
    return [*projected, (hidden, model.query), *inner * routed, (hidden, model.inner * routed)]


def _spared_by_fusion(model: ModelFacts, low: int, *, autocast: bool) -> float:
    """What a block keeps less where norms and activation functions are one kernel each."""
    if model.family == GPT2:
        return 3 * low * model.inner  # of GELU's five operators its input and result stay
    if model.family != LLAMA:
        return 0.0
    norms = 0 if autocast else 4 * low * model.hidden
    return norms + low * model.inner  # SiLU's result is computed again from its input


def _in_16_bits(model: ModelFacts, low: int, ep: int, *, autocast: bool) -> Widths:
    """As counted in the code of each family."""
    hidden, inner = float(model.hidden), float(model.inner)
    stats: float = FP32 * model.heads  # one number per head, of the attention's softmax
    attention = 2 * low * (model.query + model.key)  # query, key, value, and what comes out
    if model.family == GPT2:
        mlp = 5 * low * inner  # its GELU is five operators
        block = mlp + (20 if autocast else 16) * hidden + stats + (16 if autocast else 8)
        outside = (6 if autocast else 4) * hidden
        return Widths(
            block, _entry(hidden, autocast), outside,
            max(4 * inner, 8 * hidden) if autocast else 4 * inner - 0.3 * hidden,
            10 * hidden,
        )  # fmt: skip
    if model.family == BERT:
        block = (
            2 * low * inner + (24 if autocast else 16) * hidden + stats + (16 if autocast else 8)
        )
        outside = (12 if autocast else 10) * hidden
        return Widths(
            block, _entry(hidden, autocast), outside,
            18 * hidden if autocast else 4.5 * hidden + 0.5 * inner,
            10 * hidden,
        )  # fmt: skip
    norms = (26 if autocast else 16) * hidden + 8  # two, with a copy in fp32 each
    outside = (10 if autocast else 8) * hidden
    if model.family == MOE:
        routed = model.routed
        block = norms + attention + stats + low * routed * (4 * inner + 2 * hidden)
        block += FP32 * model.experts + 42 * routed  # the router's choice
        more = (8 + 6 * routed) * hidden + routed * inner
        if ep > 1:  # tokens as they have come, and as they are back
            more += 2 * low * routed * hidden
        return Widths(
            block, _entry(hidden, autocast), outside, more, 10 * hidden, RMS_NORM * hidden
        )
    assert model.family == LLAMA  # noqa: S101 - there are no others
    block = norms + attention + stats + 4 * low * inner
    more = max(4 * inner, 6.2 * hidden) if autocast else max(4 * inner + hidden, 8.2 * hidden)
    return Widths(block, _entry(hidden, autocast), outside, more, 10 * hidden, RMS_NORM * hidden)


def _entry(hidden: float, autocast: bool) -> float:
    return (FP32 if autocast else 2) * hidden


def _shared(model: ModelFacts, low: int, tp: int, *, fused: bool) -> Widths:
    """With tensor and sequence parallelism: all but what goes into matrices is a rank's part."""
    alone = widths(model, low=low, autocast=False, fused=fused)
    inputs = 2 * low * model.hidden  # of attention and MLP, gathered from all ranks' positions
    return Widths(
        block=(alone.block - inputs) / tp + inputs,
        entry=alone.entry / tp,
        outside=(alone.outside - inputs / 2) / tp + inputs / 2,
        block_backward=alone.block_backward / tp + 2 * inputs,
        head_backward=alone.head_backward / tp + inputs,
        products=alone.products / tp,
        half=alone.half / tp,
    )


def _adapted(
    whole: Widths, model: ModelFacts, low: int, rank: int, *, autocast: bool, casts: bool
) -> Widths:
    """Return widths for frozen weights: norms keep their input alone, adapters what is between.

    Adapters that cast keep each matrix' input in fp32, in place of those in 16 bits that query, key
    and value share, that the MLP's first two share, and that its last has.
    """
    hidden = float(model.hidden)
    norms = 8 * hidden if autocast else 2 * low * hidden
    more = float(low * model.query if autocast else 0)
    if casts:
        inputs = sum(into for _, into in products_of(model))
        more += FP32 * inputs + (FP32 - low) * 7 * rank - low * (2 * hidden + model.inner)
    return replace(
        whole,
        block=whole.block - norms + more + 7 * low * rank,
        outside=FP32 * hidden,
        spared=FP32 * hidden,
    )


def _scaled(model: ModelFacts) -> Widths:
    """In fp32 throughout: what is in 16 bits else takes twice the room, fp32 copies are none."""
    half = widths(model, low=2, autocast=False)
    copies = 8 * model.hidden if model.family in {LLAMA, MOE} else 0
    stats = FP32 * model.heads
    return Widths(
        2 * (half.block - copies - stats) + copies + stats,
        2 * half.entry,
        2 * half.outside,
        2 * half.block_backward,
        half.head_backward,
        products=2 * (half.products - stats) + stats,
        half=2 * (half.half - stats) + stats,
    )
