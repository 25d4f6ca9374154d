"""Every strategy with its memory, traffic and time; and the simplest that fits. Pure.

tests/unit/strategy/test_choice.py holds the seeds' four rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.errors import ChecksFailed, UsageError
from hpctrain.plan.mesh import divisors
from hpctrain.strategy import batch as arithmetic
from hpctrain.strategy.activations import FP32
from hpctrain.strategy.memory import Batch, Peak, peak
from hpctrain.strategy.strategies import candidates
from hpctrain.strategy.timing import (
    StepTime,
    Traffic,
    flops_of_step,
    step_time,
    traffic_of_step,
)

if TYPE_CHECKING:
    from hpctrain.strategy.budget import CheckpointPlan, Cost
    from hpctrain.strategy.facts import ModelFacts
    from hpctrain.strategy.hardware import Accelerator
    from hpctrain.strategy.strategies import Machines, Strategy
    from hpctrain.strategy.timing import Links


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for.

    Attributes:
        model: To be trained.
        cluster: Nodes and their GPUs.
        gpu: Which.
        links: Between them.
        seq: Positions of a sample.
        global_batch: Samples of a step, over all ranks.
        micro: Samples of a rank's pass; 0 chooses the most that fit.
        low: Bytes of a number in products.
        steps: Of the run; None where nobody said.
    """

    model: ModelFacts
    cluster: Machines
    gpu: Accelerator
    links: Links
    seq: int
    global_batch: int
    micro: int = 0
    low: int = 2
    steps: int | None = None


@dataclass(frozen=True)
class Row:
    """A strategy, and what became of it.

    Attributes:
        way: The strategy.
        batch: What a rank is given; None where it cannot be had.
        peak: Its fullest moment; by formula, or measured.
        measured: The exact peak of tensors, bytes; None where it was not measured.
        fits: Whether it does.
        why: Why not; or by how much.
        traffic: Of a step.
        time: Of a step.
    """

    way: Strategy
    batch: Batch | None
    peak: Peak | None
    fits: bool
    why: str
    traffic: Traffic | None = None
    time: StepTime | None = None
    measured: int | None = None


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
    for way in candidates(asked.model, asked.cluster, low=asked.low):
        try:
            rows.append(row_of(asked, way))
        except UsageError as error:
            refused.append(error)
            rows.append(Row(way, None, None, fits=False, why=str(error)))
    possible = [row for row in rows if row.batch is not None and not row.way.impossible]
    if refused and not possible:
        raise refused[-1] if asked.cluster.ranks == 1 else refused[1]  # the first is for one GPU
    return rows


def row_of(asked: PlanRequest, way: Strategy) -> Row:
    """One strategy: with the batch that was asked for, or the largest micro-batch that fits.

    Raises:
        UsageError: the batch cannot be shared by its ranks.
    """
    if way.impossible and way.key.removesuffix("+recompute") != "single":
        return Row(way, None, None, fits=False, why=way.impossible)
    share = arithmetic.shares(asked.global_batch, way.data_ranks)
    if asked.micro:
        passes = arithmetic.passes(asked.global_batch, way.data_ranks, asked.micro)
        tried = [Batch(asked.micro, asked.seq, passes)]
    else:
        tried = [Batch(n, asked.seq, share // n) for n in reversed(divisors(share))]
    peaks = [(batch, peak(asked.model, batch, way.layout)) for batch in tried]
    fitting = [pair for pair in peaks if pair[1].needed <= asked.gpu.memory]
    batch, most = fitting[0] if fitting else min(peaks, key=lambda pair: pair[1].needed)
    over = most.needed - asked.gpu.memory
    why = _too_much(asked, most, over) if over > 0 else f"{-over / 1e9:.1f} GB free"
    if way.impossible:
        why = way.impossible
    traffic = traffic_of_step(asked.model, batch, way, asked.cluster)
    time = step_time(flops_of_step(asked.model, batch, way), traffic, asked.gpu, asked.links)
    return Row(way, batch, most, over <= 0 and not way.impossible, why, traffic, time)


def _too_much(asked: PlanRequest, most: Peak, over: int) -> str:
    part, nbytes = max(most.parts.items(), key=lambda item: item[1])
    memory = asked.gpu.memory / 1e9
    return f"{over / 1e9:.1f} GB over {memory:g} GB; most is {part} ({nbytes / 1e9:.1f} GB)"


def choose(rows: list[Row], wanted: str | None = None) -> Row | None:
    """The simplest that fits; or the one that is wanted, whether it fits or not.

    Raises:
        UsageError: there is none of that name.
    """
    if wanted is None:
        return next((row for row in rows if row.fits), None)
    named = {row.way.key: row for row in rows}
    if wanted not in named:
        raise UsageError(f"--strategy {wanted}: there is none here; choose from {', '.join(named)}")
    if named[wanted].batch is None:
        raise UsageError(f"--strategy {wanted} cannot be had: {named[wanted].why}")
    return named[wanted]


def require_chosen(plan: StrategyPlan) -> Row:
    """The chosen row.

    Raises:
        ChecksFailed: none fits; with what comes nearest.
    """
    if plan.chosen is not None:
        return plan.chosen
    tried = [row for row in plan.rows if row.peak is not None and not row.way.impossible]
    nearest = min(tried, key=lambda row: row.peak.needed if row.peak else 0)
    assert nearest.peak is not None  # noqa: S101 - chosen so
    raise ChecksFailed(
        f"nothing fits {plan.asked.gpu.memory / 1e9:g} GB on {plan.asked.cluster.ranks} GPUs; the "
        f"nearest is {nearest.way.title} with {nearest.peak.needed / 1e9:.1f} GB: give more nodes, "
        "shorter sequences (--seq) or GPUs with more memory"
    )


def advice(asked: PlanRequest, row: Row) -> list[str]:
    """What is worth knowing of the chosen row."""
    notes = []
    batch, layout = row.batch, row.way.layout
    assert batch is not None  # noqa: S101 - a chosen row has one
    if layout.kind == "fsdp2" and batch.passes > 1:
        whole = FP32 * asked.model.params / layout.tp / 1e9
        notes.append(
            f"{batch.passes} passes: gradients wait in whole until the last one, {whole:.1f} GB; a "
            "larger --micro-batch, or a smaller --global-batch, saves them"
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
