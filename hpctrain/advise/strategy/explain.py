"""`hpctrain plan --explain memory`: the formulas of one row with their numbers and their sources.

Pure. tests/unit/strategy/test_explain.py holds that every part of a peak is explained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32, LOGITS_BACKWARD
from hpctrain.advise.strategy.facts import FAMILIES
from hpctrain.advise.strategy.memory import (
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
    QUANTISED,
    UPDATE,
    WEIGHTS,
)
from hpctrain.advise.strategy.stages import stages_of
from hpctrain.advise.strategy.steps import widths_of
from hpctrain.ledger.plan.deepspeed import BUCKET_ELEMENTS

if TYPE_CHECKING:
    from hpctrain.advise.strategy.facts import ModelFacts
    from hpctrain.advise.strategy.memory import Batch, Spread
    from hpctrain.advise.strategy.rows import PlanRequest, Row

SOURCES = {
    WEIGHTS: "masters in fp32: Micikevicius et al., Mixed Precision Training, 2018; sharded: "
    "Rajbhandari et al., ZeRO, 2020, section 5",
    COPIES: "torch.autocast keeps a 16-bit copy of each matrix until its context ends "
    "(aten/src/ATen/autocast_mode.cpp, cached_cast)",
    GRADIENTS: "fp32 after the reduction; without a reduction FSDP2 keeps them whole "
    "(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, unsharded_accumulated_grad)",
    MOMENTS: "Adam's two, in fp32: Kingma and Ba, 2015",
    ACTIVATIONS: "tensors that autograd keeps, counted in the models' code; that "
    "attention keeps no square of the sequence: Dao et al., FlashAttention, 2022",
    LOGITS: "the loss in fp32: log-softmax, its gradient and the logits' gradient at once",
    GATHERED: "16-bit weights of what is being computed, and of what comes next "
    "(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, prefetch)",
    BUFFERS: "of gathers in 16 bits and reductions in fp32 "
    "(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); of stages what each microbatch is "
    "received in (torch/distributed/pipelining/stage.py, _setup_forward_recv_info)",
    UPDATE: "AdamW's foreach form, the default on GPUs, makes one more tensor for each parameter "
    "(torch/optim/adamw.py)",
}
"""Part to where its formula comes from."""


def formulas(asked: PlanRequest, row: Row) -> dict[str, str]:
    """Part to its formula, with this row's numbers put in."""
    assert row.batch is not None  # noqa: S101 - what has no batch is not explained
    model, batch, layout = asked.model, row.batch, row.way.layout
    said = {
        WEIGHTS: _weights(model, layout),
        COPIES: f"{layout.low} B x the matrices' parameters",
        **_learnt(model, batch, layout),
        ACTIVATIONS: _activations(model, batch, layout),
        LOGITS: f"{layout.low + FP32 if layout.fused else LOGITS_BACKWARD} B x {batch.tokens:,} "
        f"tokens x {model.vocab:,} classes",
        **_gathered(model, batch, layout),
    }
    if layout.quantised:
        said[COPIES] = f"{layout.low} B x the largest matrix, which is 16 bits wide for a moment"
    elif layout.lora and layout.recompute:
        said[COPIES] = f"{layout.low} B x the matrices of the block that is computed again"
    return said


def _own(model: ModelFacts, layout: Spread, count: float, of: str = "parameters") -> str:
    """A rank's part of so many parameters."""
    cut = layout.shards * layout.tp
    if layout.pp > 1:
        count, of = max(stage.params for stage in stages_of(model, layout.pp)), f"{of} of a stage"
    return f"{count:,.0f} {of}" + (f" / {cut}" if cut > 1 else "")


def _weights(model: ModelFacts, layout: Spread) -> str:
    adapters = model.layers * model.adapter_params(layout.lora)
    if layout.quantised:
        matrices = model.layers * model.matrix_params
        return (
            f"{QUANTISED:.3f} B x {matrices:,} parameters in 4 bits + {layout.low} B x "
            f"{model.params - matrices:,} others + 4 B x {adapters:,} of adapters"
        )
    text = f"{layout.stored} B x {_own(model, layout, model.params)}"
    if layout.offload:
        text += ", which rest on the host"
    if layout.lora:
        return f"{text} + 4 B x {_own(model, layout, adapters, 'of adapters')}"
    if layout.kind.startswith("zero"):
        all_of = _own(model, layout, model.params)
        text += f" + {layout.low} B x "
        text += all_of if layout.kind == "zero3" else f"{model.params:,} parameters"
    return text


def _learnt(model: ModelFacts, batch: Batch, layout: Spread) -> dict[str, str]:
    """What is there for what is trained."""
    count, of = model.params, "parameters"
    if layout.lora:
        count, of = model.layers * model.adapter_params(layout.lora), "parameters of adapters"
    own = _own(model, layout, count, of)
    away = ", which rest on the host" if layout.offload else ""
    gradients = f"{layout.gradient} B x {own}{away}"
    if batch.passes > 1 and not layout.kind.startswith("zero") and not layout.each_pass:
        whole = _own(model, replace(layout, shards=1), count, of)
        gradients = f"4 B x {whole}, whole until the last of several passes"
    return {
        GRADIENTS: gradients,
        MOMENTS: f"{2 * layout.moment} B x {own}{away}",
        UPDATE: f"{layout.moment} B x {own}, only during the update{away}",
    }


def _activations(model: ModelFacts, batch: Batch, layout: Spread) -> str:
    kept = widths_of(model, layout)
    in_block = kept.of_block(recompute=layout.recompute, selective=layout.selective)
    recomputes = layout.recompute or layout.selective
    again = f" + {kept.block:,.0f} for the one that is computed again" if recomputes else ""
    blocks, flights = model.layers, ""
    if layout.pp > 1:
        blocks = max(stage.blocks for stage in stages_of(model, layout.pp))
        flights = f" x up to {layout.pp} microbatches in flight"
    return (
        f"{batch.tokens:,} tokens x ({blocks} blocks x {in_block:,.0f} B{again} "
        f"+ {kept.outside:,.0f} B outside){flights}, {FAMILIES[model.family]}"
    )


def _gathered(model: ModelFacts, batch: Batch, layout: Spread) -> dict[str, str]:
    """What is whole for a while, and what travels."""
    low = layout.low
    if layout.kind.startswith("zero"):
        return {
            GATHERED: f"{low} B x all parameters, up to {LIVE_ELEMENTS:,}",
            BUFFERS: f"{low} B x {BUCKET_ELEMENTS:,} elements of a bucket, twice at stage 2",
        }
    if layout.pp > 1:
        received = batch.passes * low * model.hidden * batch.tokens
        return {
            GATHERED: f"{low} B x the stage's parameters, gathered for all of a step",
            BUFFERS: f"{received:,} B for each neighbour, what {batch.passes} microbatches hand "
            "on, and a unit's reduction",
        }
    unit = f"{model.block_params:,} parameters of a block"
    if layout.ep > 1:
        unit += f", of its experts one in {layout.ep}"
    if layout.tp > 1:
        unit += f" / {layout.tp}"
    whole = f"{low} B x all parameters"
    return {
        GATHERED: f"{low} B x {unit}, two at a time, and the head's" if layout.reshard else whole,
        BUFFERS: f"({low} + 4) B x {unit}",
    }


def _on_host(asked: PlanRequest, row: Row) -> str:
    layout = row.way.layout
    low = f" + {layout.low}" if layout.kind.startswith("zero") else ""
    own = _own(asked.model, layout, asked.model.params)
    return f"(4 + 4 + 8{low}) B x {own}, of each GPU of a node; not what its processes take beside"


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
    there = f"of {asked.gpu.shown} ({asked.gpu.source})"
    lines += [
        "",
        f"  beside tensors {most.allowance / 1e9:8.2f} GB  {allowed}",
        f"  needed         {most.needed / 1e9:8.2f} GB  {there}",
    ]
    if row.host:
        lines += [
            "",
            f"  each node's own memory holds {row.host / 1e9:.2f} GB: {_on_host(asked, row)}",
        ]
    return lines
