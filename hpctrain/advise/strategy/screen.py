"""A plan as people read it, and as programs do. Pure.

tests/unit/cli/test_plan.py holds both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.advise.strategy.timing import bubble
from hpctrain.core.base.text import duration, step_time

if TYPE_CHECKING:
    from hpctrain.advise.strategy.choice import StrategyPlan
    from hpctrain.advise.strategy.rows import Row

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
    return not row.way.layout.lora or bool(plan.asked.lora) or row.is_held


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
    mark = "✓ chosen: the simplest that fits, " if is_chosen and row.fits else "✓ "
    elsewhere = "~ fits, " if row.way.elsewhere and row.is_held else "✗ "
    verdict = (mark if row.fits else elsewhere) + row.why
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
