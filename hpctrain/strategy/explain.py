"""`hpctrain plan --explain memory`: the formulas of one row with their numbers and their sources.

Pure. tests/unit/strategy/test_explain.py holds that every part of a peak is explained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.plan.deepspeed import BUCKET_ELEMENTS
from hpctrain.strategy.activations import LOGITS_BACKWARD, widths
from hpctrain.strategy.facts import FAMILIES
from hpctrain.strategy.memory import (
    ACTIVATIONS,
    BUFFERS,
    CONTEXT_BYTES,
    COPIES,
    FRAGMENTED,
    GATHERED,
    GRADIENTS,
    LIVE_ELEMENTS,
    LOGITS,
    MOMENTS,
    UPDATE,
    WEIGHTS,
)

if TYPE_CHECKING:
    from hpctrain.strategy.choice import PlanRequest, Row

SOURCES = {
    WEIGHTS: "masters in fp32: Micikevicius et al., Mixed Precision Training, 2018; sharded: "
    "Rajbhandari et al., ZeRO, 2020, section 5",
    COPIES: "torch.autocast keeps a 16-bit copy of each matrix until its context ends "
    "(aten/src/ATen/autocast_mode.cpp, cached_cast)",
    GRADIENTS: "fp32 after the reduction; without a reduction FSDP2 keeps them whole "
    "(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, unsharded_accumulated_grad)",
    MOMENTS: "Adam's two, in fp32: Kingma and Ba, 2015",
    ACTIVATIONS: "tensors that autograd keeps, counted in the models' code (docs/plan.md); that "
    "attention keeps no square of the sequence: Dao et al., FlashAttention, 2022",
    LOGITS: "the loss in fp32: log-softmax, its gradient and the logits' gradient at once",
    GATHERED: "16-bit weights of what is being computed, and of what comes next "
    "(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, prefetch)",
    BUFFERS: "of gathers in 16 bits and reductions in fp32 "
    "(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)",
    UPDATE: "AdamW's foreach form, the default on GPUs, makes one more tensor for each parameter "
    "(torch/optim/adamw.py)",
}
"""Part to where its formula comes from."""


def formulas(asked: PlanRequest, row: Row) -> dict[str, str]:
    """Part to its formula, with this row's numbers put in."""
    assert row.batch is not None  # noqa: S101 - what has no batch is not explained
    model, batch, layout = asked.model, row.batch, row.way.layout
    kept = widths(model, low=layout.low, autocast=layout.autocast, tp=layout.tp)
    cut = layout.shards * layout.tp
    own = f"{model.params:,} parameters" + (f" / {cut}" if cut > 1 else "")
    in_block = kept.entry if layout.recompute else kept.block
    again = f" + {kept.block:,.0f} for the one that is computed again" if layout.recompute else ""
    unit = f"{model.block_params:,} parameters of a block" + (
        f" / {layout.tp}" if layout.tp > 1 else ""
    )
    zero = layout.kind.startswith("zero")
    low = f" + {layout.low} B x {own if layout.kind == 'zero3' else f'{model.params:,} parameters'}"
    return {
        WEIGHTS: f"4 B x {own}{low if zero else ''}",
        COPIES: f"{layout.low} B x the matrices' parameters",
        GRADIENTS: f"4 B x {own}"
        + (" (whole until the last of several passes)" if batch.passes > 1 else ""),
        MOMENTS: f"8 B x {own}",
        ACTIVATIONS: f"{batch.tokens:,} tokens x ({model.layers} blocks x {in_block:,.0f} B{again} "
        f"+ {kept.outside:,.0f} B outside), {FAMILIES[model.family]}",
        LOGITS: f"{LOGITS_BACKWARD} B x {batch.tokens:,} tokens x {model.vocab:,} classes",
        GATHERED: f"{layout.low} B x all parameters, up to {LIVE_ELEMENTS:,}"
        if zero
        else f"{layout.low} B x {unit}, two at a time, and the head's"
        if layout.reshard
        else f"{layout.low} B x all parameters",
        BUFFERS: f"{layout.low} B x {BUCKET_ELEMENTS:,} elements of a bucket, twice at stage 2"
        if zero
        else f"({layout.low} + 4) B x {unit}",
        UPDATE: f"4 B x {own}, only during the update",
    }


def explained(asked: PlanRequest, row: Row) -> list[str]:
    """Lines for people: the fullest moment, its parts with formula and source."""
    assert row.peak is not None  # noqa: S101 - what has no peak is not explained
    most, said = row.peak, formulas(asked, row)
    lines = [
        f"{row.way.title}: fullest at {most.moment}, {most.nbytes / 1e9:.2f} GB of tensors",
        "",
    ]
    for part, nbytes in most.parts.items():
        if nbytes:
            lines += [
                f"  {part:<14} {nbytes / 1e9:8.2f} GB  {said[part]}",
                f"  {'':<26} from: {SOURCES[part]}",
            ]
    if away := [part for part in said if not most.parts.get(part)]:
        lines += ["", f"  not at this moment: {', '.join(away)}"]
    beside = f"{FRAGMENTED:.0%} of the peak for fragments, {CONTEXT_BYTES / 1e9:g} GB for context"
    allowed = f"an allowance, no measurement: {beside} and NCCL"
    there = f"of {asked.gpu.memory / 1e9:g} GB ({asked.gpu.source})"
    return [
        *lines,
        "",
        f"  beside tensors {most.allowance / 1e9:8.2f} GB  {allowed}",
        f"  needed         {most.needed / 1e9:8.2f} GB  {there}",
    ]
