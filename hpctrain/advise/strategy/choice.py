"""Every strategy with its memory, traffic and time; and the simplest that fits. Pure.

tests/unit/strategy/test_choice.py holds the seeds' four rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32
from hpctrain.advise.strategy.remedies import remedies, with_siblings
from hpctrain.advise.strategy.rows import PlanRequest, Row, row_of
from hpctrain.advise.strategy.strategies import adapted, candidates, of_other_engines
from hpctrain.core.base.text import count
from hpctrain.errors import ChecksFailed, UsageError

if TYPE_CHECKING:
    from hpctrain.advise.strategy.budget import CheckpointPlan, Cost


@dataclass(frozen=True)
class StrategyPlan:
    """All rows, and the one that is taken.

    Attributes:
        asked: For what.
        rows: Every strategy, the simplest first.
        chosen: The first that fits; None where none does.
        saving: Its checkpoints.
        cost: Of the run by it.
        notes: What is worth knowing.
    """

    asked: PlanRequest
    rows: list[Row]
    chosen: Row | None
    saving: CheckpointPlan | None = None
    cost: Cost | None = None
    notes: list[str] = field(default_factory=list)


def rows_of(asked: PlanRequest) -> list[Row]:
    """Every strategy, the simplest first.

    Raises:
        UsageError: the batch cannot be shared by any of them.
    """
    rows, refused = [], list[UsageError]()
    ways = candidates(asked.model, asked.cluster, low=asked.low) if not asked.lora else []
    rank = asked.lora or SHOWN_RANK
    shown = adapted(asked.model, asked.cluster, rank, asked=bool(asked.lora), low=asked.low)
    theirs = of_other_engines(asked.model, asked.cluster, low=asked.low, lora=asked.lora)
    for way in (*ways, *shown, *theirs):
        try:
            rows.append(row_of(asked, way))
        except UsageError as error:
            refused.append(error)
            rows.append(Row(way, None, None, fits=False, why=str(error)))
    possible = [row for row in rows if row.batch is not None and not row.way.aside]
    if refused and not possible:
        raise refused[-1] if asked.cluster.ranks == 1 else refused[1]  # the first is for one GPU
    return with_siblings(rows)


SHOWN_RANK = 16
"""Of the adapters that are shown beside what trains all weights."""


def choose(rows: list[Row], wanted: str | None = None) -> Row | None:
    """The simplest that fits, on the GPUs if it can be; or the one that is wanted, fitting or not.

    Raises:
        UsageError: there is none of that name.
    """
    if wanted is None:
        # What rests on the host is slow in each step, so that it comes last.
        fitting = sorted((row for row in rows if row.fits), key=lambda row: row.way.layout.offload)
        return fitting[0] if fitting else None
    named = {row.way.key: row for row in rows}
    if wanted not in named:
        raise UsageError(f"--strategy {wanted}: there is none here; choose from {', '.join(named)}")
    if not named[wanted].way.is_trained:
        raise UsageError(f"--strategy {wanted} cannot be had: {named[wanted].way.aside}")
    if named[wanted].batch is None:
        raise UsageError(f"--strategy {wanted} cannot be had: {named[wanted].why}")
    return named[wanted]


def require_chosen(plan: StrategyPlan) -> Row:
    """The chosen row.

    Raises:
        ChecksFailed: none fits; with what comes nearest, and with what would fit.
    """
    if plan.chosen is not None:
        return plan.chosen
    tried = [row for row in plan.rows if row.peak is not None and not row.way.aside]
    nearest = min(tried, key=lambda row: row.peak.needed if row.peak else 0)
    assert nearest.peak is not None  # noqa: S101 - chosen so
    ways = remedies(plan.asked, plan.rows)
    fits = f"What fits: {'; '.join(ways)}" if ways else "Give shorter sequences (--seq)"
    raise ChecksFailed(
        f"no strategy of hpctrain's engines fits {plan.asked.gpu.shown} on "
        f"{count(plan.asked.cluster.ranks, 'GPU')}; the nearest is {nearest.way.title} with "
        f"{nearest.peak.needed / 1e9:.1f} GB. {fits}"
    )


def saved_params(asked: PlanRequest, row: Row) -> int:
    """What a checkpoint holds: all parameters, or those of adapters alone."""
    lora = row.way.layout.lora
    return asked.model.layers * asked.model.adapter_params(lora) if lora else asked.model.params


def advice(asked: PlanRequest, row: Row) -> list[str]:
    """What is worth knowing of the chosen row."""
    notes = []
    batch, layout = row.batch, row.way.layout
    assert batch is not None  # noqa: S101 - a chosen row has one
    if layout.each_pass:
        notes.append(
            f"{batch.passes} passes: set engine.reduce_each_pass to true, so that each GPU holds "
            "shards of the gradients between passes; reducing once a step needs "
            f"{FP32 * asked.model.params / layout.tp / 1e9:.1f} GB for them"
        )
    elif layout.kind == "fsdp2" and batch.passes > 1 and layout.pp == 1 and not layout.lora:
        whole = FP32 * asked.model.params / layout.tp / 1e9
        notes.append(
            f"{batch.passes} passes: gradients wait in whole until the last one, {whole:.1f} GB; a "
            "larger --micro-batch, or a smaller --global-batch, saves them"
        )
    if layout.offload and asked.cluster.memory is None:
        notes.append(
            f"each node's own memory has to hold {row.host / 1e9:.0f} GB of state, and its size is "
            "not known: give --node-mem, or --site with a partition that says it"
        )
    if asked.gpu.bf16 is False:
        notes.append(f"{asked.gpu.name} has no bf16: fp16 with a loss scale, engine.precision fp16")
    time = row.time
    if time is not None and time.traffic_s and time.compute_s and time.traffic_s > time.compute_s:
        notes.append("traffic takes longer than the products: more tokens a GPU would help")
    if asked.model.layers and batch.tokens < SMALL and row.way.ranks > 1:
        notes.append(f"only {batch.tokens:,} tokens a GPU in each pass: too few to keep it busy")
    return notes


SMALL = 1024
"""Tokens of a pass below which a large GPU waits for its own kernels to start."""
