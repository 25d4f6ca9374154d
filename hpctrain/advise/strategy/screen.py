"""A plan as people read it, as programs do (plan.json), and as `hpctrain submit` does. Pure.

parts.toml has the formula of each part of a peak. tests/unit/cli/test_plan.py, test_explain.py and
test_writing.py in tests/unit/strategy hold the promises.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.facts import FAMILIES
from hpctrain.advise.strategy.memory import CONTEXT_BYTES, FRAGMENTED, logit_bytes, widths_of
from hpctrain.advise.strategy.timing import bubble
from hpctrain.core.base.text import duration, step_time

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.advise.strategy.choice import PlanRequest, Row, StrategyPlan
    from hpctrain.advise.strategy.memory import Spread

PARTS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("parts.toml").read_text("utf-8")
)
"""Part of a peak to how it is counted, and where that comes from."""
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
    if plan.chosen is None:  # all that is worth a look
        wanted = bool(plan.asked.lora)
        return [r for r in plan.rows if wanted or not r.way.layout.lora or r.is_held or r.may_fit]
    considered = [
        row
        for row in plan.rows
        if (not row.way.layout.lora or plan.asked.lora) and not row.way.elsewhere
    ]
    if plan.chosen not in considered:
        return [*considered, plan.chosen]
    if plan.chosen.way.layout.offload:
        return considered
    return considered[: considered.index(plan.chosen) + 1]


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
    spans = (time.seconds, time.least_s, time.most_s, time.compute_s, time.traffic_s)
    step, least, most, products, traffic = (step_time(each or 0.0) for each in spans)
    return (
        f"{step} ({least} to {most}): products {products}, traffic {traffic} beside them; "
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


_OF_LAYOUT = ("shards", "copies", "tp", "pp", "ep", "offload", "recompute")


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
        **{name: getattr(layout, name) for name in _OF_LAYOUT},
        "lora_rank": layout.lora or None,
        "trained_by_hpctrain": not row.way.elsewhere,
        "other_engine": row.way.elsewhere or None,
        "memory_fits": row.is_held,
        "may_fit": row.may_fit,
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


def explained(asked: PlanRequest, row: Row) -> list[str]:
    """Return lines for people: the fullest moment, its parts with formula and source."""
    assert row.peak is not None  # noqa: S101 - what has no peak is not explained
    most, numbers = row.peak, _numbers(asked, row)
    lines = [
        f"{row.way.title}: fullest at {most.moment}, {most.nbytes / GB:.2f} GB of tensors",
        "",
    ]
    for part, nbytes in most.parts.items():
        if nbytes:
            lines += [
                f"  {part:<14} {nbytes / GB:8.2f} GB  {PARTS[part]['counted'].format(**numbers)}",
                f"  {'':<26} from: {PARTS[part]['source']}",
            ]
    if away := [part for part in PARTS if not most.parts.get(part)]:
        lines += ["", f"  not at this moment: {', '.join(away)}"]
    comes = f"{FRAGMENTED:.0%} of all but weights and moments for fragments"
    beside = f"{comes}, {CONTEXT_BYTES / GB:g} GB for context and NCCL"
    allowed = f"an allowance, no measurement: {beside}"
    lines += [
        "",
        f"  beside tensors {most.allowance / GB:8.2f} GB  {allowed}",
        f"  needed         {most.needed / GB:8.2f} GB  of {asked.gpu.shown} ({asked.gpu.source})",
    ]
    if row.host:
        what = "weights, gradients and moments of its GPUs, not what its processes take beside"
        lines += ["", f"  each node's own memory holds {row.host / GB:.2f} GB: {what}"]
    return lines


def _numbers(asked: PlanRequest, row: Row) -> dict[str, Any]:
    """Return what the formulas of parts.toml have names for."""
    assert row.batch is not None  # noqa: S101 - what has no batch is not explained
    model, batch, layout = asked.model, row.batch, row.way.layout
    widths, lora = widths_of(model, layout), model.layers * model.adapter_params(layout.lora)
    again = layout.recompute or layout.selective
    return {
        "params": model.params,
        "learnt": lora if layout.lora else model.params,
        "cut": layout.shards * layout.tp * layout.pp,
        "stored": layout.stored,
        "low": layout.low,
        "gradient": layout.gradient,
        "moments": 2 * layout.moment,
        "update": layout.moment,
        "tokens": batch.tokens,
        "layers": model.layers,
        "kept": widths.of_block(recompute=layout.recompute, selective=layout.selective),
        "block": widths.block if again else 0,
        "outside": widths.outside,
        "family": FAMILIES[model.family],
        "logit": logit_bytes(layout),
        "vocab": model.vocab,
        "unit": model.block_params,
    }


def hpctrain_toml(
    plan: StrategyPlan, row: Row, *, time: str, partition: str, precision: str
) -> str:
    """Return the settings that `hpctrain submit` reads from the working directory.

    `time` is the job's limit, as sbatch takes it. An empty `partition` is SLURM's default.
    `precision` is "bf16", "fp16" or "fp32".
    """
    layout, cluster, batch = row.way.layout, plan.asked.cluster, row.batch
    assert batch is not None  # noqa: S101 - a chosen row has one
    slurm: dict[str, str | int] = {
        "nodes": str(cluster.nodes),
        "gpus_per_node": cluster.gpus,
        "time": time,
    }
    if partition:
        slurm["partition"] = partition
    adapters = f"# Adapters of rank {layout.lora} are your program's: peft's get_peft_model."
    lines = [
        f"# {row.way.title}: written by hpctrain plan.",
        f"# {heading(plan)}",
        f"# {batch.micro} samples x {batch.passes} passes x {row.way.data_ranks} ranks a step.",
        *([adapters] if layout.lora else []),
        "",
        *_table("slurm", slurm),
        *_table("engine", _engine(layout, precision)),
    ]
    if plan.saving is not None:
        lines += _table("checkpoint", {"interval_s": round(plan.saving.interval_s, 1)})
    return "\n".join(lines).rstrip() + "\n"


def _engine(layout: Spread, precision: str) -> dict[str, str | float | bool]:
    """Return the settings of [engine]."""
    kind = "ddp" if layout.kind == "single" else layout.kind
    engine: dict[str, str | float | bool] = {"kind": kind, "precision": precision}
    if layout.recompute or layout.selective:
        engine["activation_checkpointing"] = "full" if layout.recompute else "selective"
    if layout.each_pass:
        engine["reduce_each_pass"] = True
    if layout.kind == "fsdp2":
        engine["reshard_after_forward"] = layout.reshard
    if layout.tp > 1:
        engine["tp"] = str(layout.tp)
    if layout.copies > 1:
        engine["dp_replicate"] = str(layout.copies)
    if layout.pp > 1:
        engine |= {"pp": str(layout.pp), "pp_schedule": "1f1b"}
    if layout.ep > 1:
        engine["ep"] = str(layout.ep)
    if layout.offload:
        engine["offload"] = "cpu"
    return engine


def _table(name: str, values: Mapping[str, str | float | bool]) -> list[str]:
    return [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
