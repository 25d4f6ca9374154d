"""Every strategy with its memory, traffic and time; and the simplest that fits. Pure.

tests/unit/strategy/test_choice.py holds the seeds' four rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpctrain.base.text import one_of
from hpctrain.errors import ChecksFailed, UsageError
from hpctrain.plan.mesh import divisors
from hpctrain.strategy.activations import FP32
from hpctrain.strategy.memory import Batch, Peak
from hpctrain.strategy.peaks import host_bytes, peak
from hpctrain.strategy.remedies import remedies, with_siblings
from hpctrain.strategy.strategies import adapted, candidates, of_other_engines
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

LITTLE = 50_000_000
"""Bytes below which a number in GB with one digit says 0."""


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
        lora: Rank of adapters, which alone are to be trained; 0 for all weights.
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
    lora: int = 0


@dataclass(frozen=True)
class Row:
    """A strategy, and what became of it.

    Attributes:
        way: The strategy.
        batch: What a rank is given; None where it cannot be had.
        peak: Its fullest moment; by formula, or measured.
        host: Bytes of a node's own memory that offloaded state takes.
        measured: The exact peak of tensors, bytes; None where it was not measured.
        is_held: Whether a GPU's memory holds it, whoever trains so.
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
    host: int = 0
    measured: int | None = None
    is_held: bool = False


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


def row_of(asked: PlanRequest, way: Strategy) -> Row:
    """One strategy: with the batch that was asked for, or the largest micro-batch that fits.

    Raises:
        UsageError: the batch cannot be shared by its ranks.
    """
    if way.impossible:
        return Row(way, None, None, fits=False, why=way.impossible)
    ways = [(batch, each) for batch in _tried(asked, way) for each in _reducing(way, batch)]
    peaks = [(batch, each, peak(asked.model, batch, each.layout)) for batch, each in ways]
    fitting = [tried for tried in peaks if tried[2].needed <= asked.gpu.memory]
    batch, way, most = fitting[0] if fitting else min(peaks, key=lambda tried: tried[2].needed)
    over = most.needed - asked.gpu.memory
    why = _too_much(asked, most, over) if over > 0 else f"{gigabytes(-over)} free"
    if way.elsewhere:
        why = f"{why}; {way.aside}"
    host = host_bytes(asked.model, way.layout) * min(asked.cluster.gpus, way.ranks)
    is_held, of_host = on_host(host, asked.cluster.memory)
    traffic = traffic_of_step(asked.model, batch, way, asked.cluster)
    flops = flops_of_step(asked.model, batch, way)
    time = step_time(flops, traffic, asked.gpu, asked.links, way.layout)
    return Row(
        way,
        batch,
        most,
        fits=over <= 0 and is_held and not way.aside,
        why=why + of_host if way.elsewhere or not way.aside else way.aside,
        traffic=traffic,
        time=time,
        host=host,
        is_held=over <= 0 and is_held,
    )


def _reducing(way: Strategy, batch: Batch) -> list[Strategy]:
    """The way itself; and where FSDP2 has several passes, with gradients reduced in each."""
    layout = way.layout
    once = batch.passes == 1 or layout.pp > 1 or layout.offload or layout.lora
    if layout.kind != "fsdp2" or once:
        return [way]
    title = f"{way.title}, reduced each pass"
    return [way, replace(way, title=title, layout=replace(layout, each_pass=True))]


def _tried(asked: PlanRequest, way: Strategy) -> list[Batch]:
    """What a rank may be given, the largest micro-batch first.

    Raises:
        UsageError: no batch can be shared so, or not in passes enough for a pipeline.
    """
    share = samples_per_rank(asked.global_batch, way.data_ranks)
    if asked.micro:
        passes = passes_per_step(asked.global_batch, way.data_ranks, asked.micro)
        tried = [Batch(asked.micro, asked.seq, passes)]
    else:
        tried = [Batch(n, asked.seq, share // n) for n in reversed(divisors(share))]
    enough = [batch for batch in tried if batch.passes >= way.least_passes]
    if not enough:
        most = max(batch.passes for batch in tried)
        least = way.least_passes * way.data_ranks * (asked.micro or 1)
        raise UsageError(
            f"{way.layout.pp} stages want {way.least_passes} passes a step, and there are "
            f"{most}: --global-batch {least}"
        )
    return enough


def on_host(needed: int, there: int | None) -> tuple[bool, str]:
    """Whether a node's memory holds what is offloaded, and what is said of it."""
    if not needed:
        return True, ""
    takes = f"; {needed / 1e9:.1f} GB of a node's memory"
    if there is None:
        return True, f"{takes}, whose size is not known (--node-mem)"
    if needed > there:
        return False, f"{takes}, which has {there / 1e9:.1f} GB"
    return True, f"{takes} of {there / 1e9:.1f} GB"


def gigabytes(nbytes: int) -> str:
    """In GB, and where it is little in MB: nothing that matters becomes a zero."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= LITTLE else f"{nbytes / 1e6:.3g} MB"


def _too_much(asked: PlanRequest, most: Peak, over: int) -> str:
    part, nbytes = max(most.parts.items(), key=lambda item: item[1])
    memory = asked.gpu.memory / 1e9
    return f"{gigabytes(over)} over {memory:g} GB; most is {part} ({nbytes / 1e9:.1f} GB)"


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
    found = remedies(plan.asked, plan.rows)
    fits = f"What fits: {'; '.join(found)}" if found else "Give shorter sequences (--seq)"
    raise ChecksFailed(
        f"no strategy of hpctrain's engines fits {plan.asked.gpu.memory / 1e9:g} GB on "
        f"{plan.asked.cluster.ranks} GPUs; the nearest is {nearest.way.title} with "
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


# ---- global batch = micro batch x passes x data-parallel ranks


def samples_per_rank(global_batch: int, data_ranks: int) -> int:
    """Samples of one rank in a step.

    Raises:
        UsageError: ranks would have unequal shares; with the nearest batches that all can share.
    """
    if global_batch % data_ranks:
        below = global_batch // data_ranks * data_ranks
        near = [n for n in (below, below + data_ranks) if n]
        fitting = [n for n in divisors(global_batch) if n <= data_ranks][-1]
        raise UsageError(
            f"--global-batch {global_batch} cannot be shared by {data_ranks} data-parallel ranks; "
            f"nearest: {one_of(near)}, or {fitting} data-parallel ranks"
        )
    return global_batch // data_ranks


def passes_per_step(global_batch: int, data_ranks: int, micro: int) -> int:
    """Passes of a step, of `micro` samples each.

    Raises:
        UsageError: they do not come out even; with the nearest values that do.
    """
    share = samples_per_rank(global_batch, data_ranks)
    if share % micro:
        near = _nearest(divisors(share), micro)
        raise UsageError(
            f"--micro-batch {micro} does not divide the {share} samples that each of {data_ranks} "
            f"data-parallel ranks has of --global-batch {global_batch}; nearest: {one_of(near)}"
        )
    return share // micro


def _nearest(values: list[int], wanted: int) -> list[int]:
    """The next lower and the next higher of ascending values, as far as there are."""
    below = [value for value in values if value < wanted][-1:]
    above = [value for value in values if value > wanted][:1]
    return below + above
