"""A plan as people read it, and as programs do; and the formulas of one row with their sources.

Pure. tests/unit/cli/test_plan.py holds the first, tests/unit/strategy/test_explain.py that every
part of a peak is explained.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.facts import FAMILIES, ModelFacts
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
    Batch,
    Spread,
    logit_bytes,
    widths_of,
)
from hpctrain.advise.strategy.peaks import stages_of
from hpctrain.advise.strategy.timing import bubble
from hpctrain.core.base.text import duration, step_time
from hpctrain.ledger.plan.deepspeed import BUCKET_ELEMENTS

if TYPE_CHECKING:
    from hpctrain.advise.strategy.choice import PlanRequest, Row, StrategyPlan

_TABLE = tomllib.loads(Path(__file__).with_name("templates.toml").read_text("utf-8"))
SOURCES: dict[str, str] = _TABLE.pop("sources")
"""Part to where its formula comes from."""
TEXTS: dict[str, str] = _TABLE
"""Long texts of a plan's files."""
GB = 1e9
WHOSE = (
    "GB/GPU is what hpctrain's engines hold, with masters and moments in fp32. Other engines hold "
    "other amounts: --compare shows them in rows marked ~."
)
ROUND = 10
"""GB from which on a number has no decimals."""
SHOWN = 6
"""Rows before the chosen one that are shown without --compare."""


def heading(plan: StrategyPlan) -> str:
    """What was asked for, in a line."""
    asked = plan.asked
    steps = f" · {asked.steps:,} steps" if asked.steps else ""
    cluster = f"{asked.cluster.nodes} x {asked.cluster.gpus} {asked.gpu.name}"
    return (
        f"{asked.model.name} · {asked.model.params / GB:.3g}B parameters ({asked.model.basis}) · "
        f"seq {asked.seq:,} · global batch {asked.global_batch:,}{steps} · {cluster}, "
        f"{asked.gpu.shown} each"
    )


def shown_rows(plan: StrategyPlan, *, compare: bool) -> list[Row]:
    """All; or those up to the chosen one, and all that do not offload before one that does."""
    if compare:
        return plan.rows
    considered = [
        row
        for row in plan.rows
        if (not row.way.layout.lora or plan.asked.lora) and not row.way.elsewhere
    ]
    if plan.chosen is None or plan.chosen not in considered:
        considered = (
            considered if plan.chosen else [row for row in plan.rows if _is_near(plan, row)]
        )
        return considered if plan.chosen is None else [*considered, plan.chosen]
    if plan.chosen.way.layout.offload:
        return considered
    return considered[: considered.index(plan.chosen) + 1]


def _is_near(plan: StrategyPlan, row: Row) -> bool:
    """Return whether a row is worth a look where nothing fits."""
    return not row.way.layout.lora or bool(plan.asked.lora) or row.is_held or row.may_fit


def cells(row: Row, plan: StrategyPlan) -> tuple[str, ...]:
    """Of a row: strategy, batch, states, activations, all, step, verdict."""
    if row.batch is None or row.peak is None:
        return (row.way.title, "", "", "", "", "", f"✗ {row.why}")
    parts = row.peak.parts
    held = sum(parts.get(name, 0) for name in ("activations", "logits"))
    rest = row.peak.nbytes - held
    whole = row.measured if row.measured is not None else row.peak.nbytes
    batch = f"{row.batch.micro} x {row.batch.passes} x {row.way.data_ranks}"
    seconds = row.time.seconds if row.time else None
    step = "not known" if seconds is None else step_time(seconds)
    is_chosen = row is plan.chosen
    mark = "✗ "
    if row.fits:
        mark = "✓ chosen: the simplest that fits, " if is_chosen else "✓ "
    elif row.way.elsewhere and row.is_held:
        mark = "~ fits, "
    elif row.may_fit:
        mark = "? chosen: " if is_chosen else "? "
    verdict = mark + row.why
    memory = [f"{nbytes / GB:.1f}" for nbytes in (rest, held, whole)]
    return (row.way.title, batch, *memory, step, verdict)


HEADER = ("STRATEGY", "MICRO x PASSES x RANKS", "STATES", "ACTIVATIONS", "GB/GPU", "STEP", "")


def closing(plan: StrategyPlan, row: Row) -> list[str]:
    """What follows from the chosen row."""
    assert row.batch is not None  # noqa: S101 - a chosen row has one
    assert row.time is not None  # noqa: S101 - the same
    assert row.traffic is not None  # noqa: S101 - the same
    sent = row.traffic
    host = f", {_gigabytes(sent.host)} to and from the host" if sent.host else ""
    traffic = (
        f"{_gigabytes(sent.inside)} in the node, {_gigabytes(sent.between)} between nodes{host}"
    )
    lines = [
        f"step      {_step(row)}",
        f"traffic   {traffic}, sent by each GPU in a step",
    ]
    if row.way.layout.pp > 1:
        waits = bubble(row.batch, row.way)
        lines.append(f"bubble    {waits:.0%} of a step, in which a stage waits for the others")
    if plan.saving is not None:
        saved = plan.saving
        lines.append(
            f"saving    {saved.nbytes / GB:.3g} GB each, every {duration(saved.interval_s)} "
            f"({saved.why}); {saved.kept} on disk take {saved.disk / GB:.3g} GB"
        )
    if plan.cost is not None and plan.cost.gpu_hours is not None and plan.cost.hours is not None:
        jobs = ""
        if plan.cost.jobs is not None and plan.cost.limit_s:
            many = "1 job" if plan.cost.jobs == 1 else f"{plan.cost.jobs} jobs"
            jobs = f"; {many} of at most {duration(plan.cost.limit_s)}, one after the other"
        lines.append(
            f"budget    {plan.cost.hours:,.1f} h on {plan.asked.cluster.nodes} nodes = "
            f"{plan.cost.gpu_hours:,.0f} GPU-h{_span(plan.cost.gpu_hours, row)}{jobs}"
        )
    elif plan.asked.steps:
        lines.append("budget    not known: the step's time is not")
    return lines


def _gigabytes(nbytes: float) -> str:
    """In GB with two digits that count, and never as a power of ten."""
    number = nbytes / GB
    return f"{number:,.0f} GB" if number >= ROUND else f"{number:.2g} GB"


def _span(hours: float, row: Row) -> str:
    """The range of a run's cost, as that of its step."""
    time = row.time
    if time is None or not (time.seconds and time.least_s and time.most_s):
        return ""
    least, most = (hours * edge / time.seconds for edge in (time.least_s, time.most_s))
    return f" ({least:,.0f} to {most:,.0f})"


def _step(row: Row) -> str:
    time = row.time
    assert time is not None  # noqa: S101 - a chosen row has one
    if time.seconds is None:
        return time.basis
    assert time.compute_s is not None  # noqa: S101 - both are known where the sum is
    assert time.traffic_s is not None  # noqa: S101 - the same
    assert time.least_s is not None  # noqa: S101 - the same
    assert time.most_s is not None  # noqa: S101 - the same
    return (
        f"{step_time(time.seconds)} ({step_time(time.least_s)} to {step_time(time.most_s)}): "
        f"products {step_time(time.compute_s)}, traffic {step_time(time.traffic_s)} beside them; "
        f"{time.basis}"
    )


def as_plain(plan: StrategyPlan) -> dict[str, Any]:
    """For --json and plan.json."""
    asked, saved, cost = plan.asked, plan.saving, plan.cost
    return {
        "model": {
            "name": asked.model.name,
            "params": asked.model.params,
            "family": asked.model.family,
            "basis": asked.model.basis,
        },
        "nodes": asked.cluster.nodes,
        "gpus_per_node": asked.cluster.gpus,
        "gpu": {
            "name": asked.gpu.name,
            "memory_bytes": asked.gpu.memory,
            "source": asked.gpu.source,
        },
        "seq": asked.seq,
        "global_batch": asked.global_batch,
        "chosen": plan.chosen.way.key if plan.chosen else None,
        "rows": [row_as_plain(row) for row in plan.rows],
        "checkpoint": None
        if saved is None
        else {
            "bytes": saved.nbytes,
            "save_s": saved.save_s,
            "interval_s": saved.interval_s,
            "why": saved.why,
            "disk_bytes": saved.disk,
        },
        "budget": None
        if cost is None
        else {"hours": cost.hours, "gpu_hours": cost.gpu_hours, "jobs": cost.jobs},
        "notes": plan.notes,
    }


def row_as_plain(row: Row) -> dict[str, Any]:
    """One strategy. Memory in bytes, times in seconds; null where something is not known."""
    layout, batch, most, time = row.way.layout, row.batch, row.peak, row.time
    return {
        "strategy": row.way.key,
        "title": row.way.title,
        "fits": row.fits,
        "why": row.why,
        "micro_batch": batch.micro if batch else None,
        "passes": batch.passes if batch else None,
        "data_ranks": row.way.data_ranks,
        "shards": layout.shards,
        "copies": layout.copies,
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "offload": layout.offload,
        "lora_rank": layout.lora or None,
        "trained_by_hpctrain": row.way.is_trained,
        "other_engine": row.way.elsewhere or None,
        "memory_fits": row.is_held,
        "may_fit": row.may_fit,
        "recompute": layout.recompute,
        "selective": layout.selective or None,
        "reduce_each_pass": layout.each_pass,
        "reshard_after_forward": layout.reshard,
        "peak_bytes": most.nbytes if most else None,
        "measured_bytes": row.measured,
        "allowance_bytes": most.allowance if most else None,
        "moment": most.moment if most else None,
        "parts": {name: round(n) for name, n in most.parts.items()} if most else None,
        "host_bytes_per_node": row.host,
        "traffic_bytes": round(row.traffic.nbytes) if row.traffic else None,
        "host_traffic_bytes": round(row.traffic.host) if row.traffic else None,
        "bubble": bubble(batch, row.way) if batch else None,
        "step_s": time.seconds if time else None,
        "step_range_s": [time.least_s, time.most_s] if time and time.seconds else None,
        "step_basis": time.basis if time else None,
    }


def formulas(asked: PlanRequest, row: Row) -> dict[str, str]:
    """Part to its formula, with this row's numbers put in."""
    assert row.batch is not None  # noqa: S101 - what has no batch is not explained
    model, batch, layout = asked.model, row.batch, row.way.layout
    said = {
        WEIGHTS: _weights(model, layout),
        COPIES: f"{layout.low} B x the matrices' parameters",
        **_learnt(model, batch, layout),
        ACTIVATIONS: _activations(model, batch, layout),
        LOGITS: f"{logit_bytes(layout)} B x {batch.tokens:,} tokens x {model.vocab:,} classes",
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
    comes = f"{FRAGMENTED:.0%} of all but weights and moments for fragments"
    beside = f"{comes}, {CONTEXT_BYTES / 1e9:g} GB for context"
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
