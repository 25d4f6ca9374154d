"""Every strategy with memory, traffic and time; the simplest that fits, and its costs. Pure.

A plan's memory is that of hpctrain's engines, so that "does not fit" is no word on the hardware:
`remedies` says what would make it fit. Costs are checkpoints, their interval and disk, GPU-hours,
and jobs of the queue. tests/unit/strategy/test_choice.py holds the seeds' four rules,
test_remedies.py and test_budget.py the rest.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32
from hpctrain.advise.strategy.hardware import GPUS, Accelerator
from hpctrain.advise.strategy.memory import ELSEWHERE_ERROR, FORMULA_ERROR, Batch, Peak
from hpctrain.advise.strategy.peaks import host_bytes, peak
from hpctrain.advise.strategy.strategies import (
    Machines,
    Strategy,
    adapted,
    candidates,
    of_other_engines,
)
from hpctrain.advise.strategy.timing import (
    Links,
    StepTime,
    Traffic,
    step_time,
    traffic_of_step,
    work_of_step,
)
from hpctrain.core.base.text import count, one_of
from hpctrain.errors import ChecksFailed, UsageError
from hpctrain.ledger.plan import interval
from hpctrain.ledger.plan.interval import Failures
from hpctrain.ledger.plan.mesh import divisors

if TYPE_CHECKING:
    from hpctrain.advise.strategy.facts import ModelFacts

LITTLE = 50_000_000
"""Bytes below which a number in GB with one digit says 0."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for."""

    model: ModelFacts  # to be trained
    cluster: Machines  # nodes and their GPUs
    gpu: Accelerator  # which
    links: Links  # between them
    seq: int  # positions of a sample
    global_batch: int  # samples of a step, over all ranks
    micro: int = 0  # samples of a rank's pass; 0 chooses the most that fit
    low: int = 2  # bytes of a number in products
    steps: int | None = None  # of the run; None where nobody said
    lora: int = 0  # rank of adapters, which alone are to be trained; 0 for all weights


@dataclass(frozen=True)
class Row:
    """A strategy, and what became of it."""

    way: Strategy  # the strategy
    batch: Batch | None  # what a rank is given; None where it cannot be had
    peak: Peak | None  # its fullest moment; by formula, or measured
    why: str  # why it does not fit; or by how much it does
    traffic: Traffic | None = None  # of a step
    time: StepTime | None = None  # of a step
    host: int = 0  # bytes of a node's own memory that offloaded state takes
    measured: int | None = None  # the exact peak of tensors, bytes; None where it was not measured
    is_held: bool = False  # whether a GPU's memory holds it, in hpctrain's or another engine
    may_fit: bool = False  # whether it fits if the plan's error is in its favour; not if it fits

    @property
    def fits(self) -> bool:
        """Whether it does, and may be taken."""
        return self.is_held and not self.way.aside


def row_of(asked: PlanRequest, way: Strategy) -> Row:
    """One strategy: with the batch that was asked for, or the largest micro-batch that fits.

    Raises:
        UsageError: the batch cannot be shared by its ranks.
    """
    if way.impossible:
        return Row(way, None, None, way.impossible)
    ways = [(batch, each) for batch in _tried(asked, way) for each in _reducing(way, batch)]
    peaks = [(batch, each, peak(asked.model, batch, each.layout)) for batch, each in ways]
    fitting = [tried for tried in peaks if tried[2].needed <= asked.gpu.memory]
    batch, way, most = fitting[0] if fitting else min(peaks, key=lambda tried: tried[2].needed)
    error = ELSEWHERE_ERROR if way.elsewhere else FORMULA_ERROR
    over, may_fit = excess(asked.gpu, most.nbytes, most.allowance, error)
    why = _too_much(asked, most, over) if over > 0 else f"{gigabytes(-over)} free"
    if may_fit:
        why = _uncertain(asked.gpu, most.nbytes, most.needed, f"known to {error:.0%}")
    if way.elsewhere:
        why = f"{why}; {way.aside}"
    host = host_bytes(asked.model, way.layout) * min(asked.cluster.gpus, way.ranks)
    is_held, of_host = on_host(host, asked.cluster.memory)
    traffic = traffic_of_step(asked.model, batch, way, asked.cluster)
    work = work_of_step(asked.model, batch, way)
    time = step_time(work, traffic, asked.gpu, asked.links, way.layout)
    return Row(
        way,
        batch,
        most,
        why=why + of_host if way.elsewhere or not way.aside else way.aside,
        traffic=traffic,
        time=time,
        host=host,
        is_held=over <= 0 and is_held,
        may_fit=may_fit and is_held,
    )


def excess(gpu: Accelerator, tensors: int, allowance: int, error: float) -> tuple[int, bool]:
    """Return bytes that a GPU has too few, and whether it may hold the peak all the same.

    It may, if tensors without `allowance`, less the share `error` by which they may be too high,
    are no more than its memory.
    """
    over = tensors + allowance - gpu.memory
    return over, over > 0 and tensors * (1 - error) <= gpu.memory


def _uncertain(gpu: Accelerator, tensors: int, needed: int, error: str) -> str:
    return (
        f"may fit: {gigabytes(tensors)} of tensors, {error}; with allowances "
        f"{gigabytes(needed)} of {gpu.shown}"
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
    """Return what a rank may be given, the largest micro-batch first."""
    share = _samples_per_rank(asked.global_batch, way.data_ranks)
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
    return f"{gigabytes(over)} over {asked.gpu.shown}; most is {part} ({nbytes / 1e9:.1f} GB)"


# ---- global batch = micro batch x passes x data-parallel ranks


def _samples_per_rank(global_batch: int, data_ranks: int) -> int:
    """Samples of one rank in a step."""
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
    share = _samples_per_rank(global_batch, data_ranks)
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


STATE_BYTES = 3 * FP32
"""A parameter's in a checkpoint: its master and two moments, whatever the strategy."""


@dataclass(frozen=True)
class CheckpointPlan:
    """The checkpoints of a run."""

    nbytes: int  # of one
    save_s: float | None  # to write it; None where the disk's rate is not known
    interval_s: float  # between two
    why: str  # what decided on it
    kept: int  # on disk at most, one that is being written among them

    @property
    def disk(self) -> int:
        """Bytes that all of them need."""
        return self.nbytes * self.kept


@dataclass(frozen=True)
class Cost:
    """Of the whole run; None where the step's time is not known."""

    hours: float | None  # of training
    gpu_hours: float | None  # of all GPUs
    jobs: int | None  # that the queue has to give, one after the other
    limit_s: float | None  # time limit of each


def saving(
    params: int,
    cluster: Machines,
    *,
    save_gbs: float | None,
    max_loss_s: float,
    keep_last: int,
    limit_s: float | None,
) -> CheckpointPlan:
    """Return how often to save, and what that takes.

    `save_gbs` is the job's GB/s to the file system, None if nobody measured it. `max_loss_s` is
    what a hard kill may cost. `limit_s` is the time limit of a job.
    """
    nbytes = params * STATE_BYTES
    save_s = nbytes / (save_gbs * 1e9) if save_gbs else None
    chosen = interval.choose(
        save_s,
        interval.mtbf_s(Failures(), cluster.nodes),
        max_loss_s=max_loss_s,
        job_s=limit_s,
        write_s=save_s or 0.0,
    )
    return CheckpointPlan(nbytes, save_s, chosen.seconds, chosen.why, keep_last + 1)


def cost(steps: int | None, step_s: float | None, ranks: int, limit_s: float | None) -> Cost:
    """Of so many steps, without waiting in the queue, saves and what failures throw away."""
    if not steps or step_s is None:
        return Cost(None, None, None, limit_s)
    seconds = steps * step_s
    jobs = None if not limit_s else max(1, math.ceil(seconds / limit_s))
    return Cost(seconds / 3600, seconds / 3600 * ranks, jobs, limit_s)


SIBLINGS = (
    *("selective", "recompute", "loss-parallel", "fused", "half", "bf16-weights", "bf16"),
    "recompute+bf16",
)
"""What a key may be followed by, the least costly first."""
MOST_TIMES = 64
"""Times the nodes that there are: a plan proposes no more."""
NAMED = 4
"""GPUs that a line names: the smallest that do."""


def with_siblings(rows: list[Row]) -> list[Row]:
    """Return the rows; each that is too large names its nearest relative that fits."""
    held = {row.way.key: row for row in rows if row.is_held}
    named = []
    for row in rows:
        near = next((name for name in SIBLINGS if f"{row.way.key}+{name}" in held), "")
        if near and not (row.peak is None or row.is_held or row.way.aside or row.host):
            other = held[f"{row.way.key}+{near}"]
            whose = ", with another engine" if other.way.elsewhere else ""
            row = replace(row, why=f"{row.why}; fits with {near}{whose}")  # noqa: PLW2901
        named.append(row)
    return named


def remedies(asked: PlanRequest, rows: list[Row]) -> list[str]:
    """Return what makes a set-up fit for which no row of hpctrain's does; in a line each."""
    lines = []
    if asked.micro > 1 and (title := _taken(replace(asked, micro=1))):
        lines.append(f"--micro-batch 1: {title}")
    lines += _more_nodes(asked)
    for row in rows:
        if row.is_held and row.peak is not None and (row.way.elsewhere or row.way.layout.lora):
            needed = row.peak.needed / 1e9
            lines.append(f"{row.way.title}: {needed:.1f} GB ({row.way.aside or row.way.key})")
    return [*lines, *_larger_gpu(asked, rows)]


def _more_nodes(asked: PlanRequest) -> list[str]:
    """The smallest multiple of the nodes, by doubling; each GPU keeps its samples."""
    times = 2
    while times <= MOST_TIMES:
        cluster = replace(asked.cluster, nodes=asked.cluster.nodes * times)
        more = replace(asked, cluster=cluster, global_batch=asked.global_batch * times)
        if title := _taken(more):
            flags = f"--nodes {cluster.nodes} --global-batch {more.global_batch}"
            return [f"{cluster.ranks} GPUs ({flags}): {title}"]
        times *= 2
    return []


def ways_of(asked: PlanRequest) -> list[Strategy]:
    """Return hpctrain's ways to train what was asked for, the simplest first."""
    if asked.lora:
        return adapted(asked.model, asked.cluster, asked.lora, asked=True, low=asked.low)
    return candidates(asked.model, asked.cluster, low=asked.low)


def _taken(asked: PlanRequest) -> str:
    """Return the title of the simplest way that fits on the GPUs; empty if none does."""
    asked = replace(asked, micro=asked.micro or 1)
    for way in ways_of(asked):
        if way.layout.offload or way.aside:
            continue
        with contextlib.suppress(UsageError):
            row = row_of(asked, way)
            if row.fits:
                return row.way.title
    return ""


def _larger_gpu(asked: PlanRequest, rows: list[Row]) -> list[str]:
    """GPUs of the table with the memory that the smallest row needs."""
    needed = [row.peak.needed for row in rows if row.peak is not None and not row.way.aside]
    least = min(needed, default=0)
    enough = [(gpu.memory, key) for key, gpu in GPUS.items() if gpu.memory >= least]
    if not enough or least <= asked.gpu.memory:
        return []
    keys = ", ".join(key for _, key in sorted(enough)[:NAMED])
    return [f"a GPU with {least / 1e9:.1f} GB or more ({keys})"]


def elsewhere_notes(asked: PlanRequest, rows: list[Row], chosen: Row) -> list[str]:
    """Return notes where a lighter way than the chosen one needs another engine, or more GPUs."""
    layout = chosen.way.layout
    if not (layout.recompute or layout.offload):
        return []
    alone = _more_nodes(asked) if layout.offload else []
    lighter = [
        row
        for row in rows
        if row.way.elsewhere and row.is_held and row.peak and not row.way.layout.recompute
    ]
    notes = [f"without the host's memory: {each}" for each in alone]
    return notes + [
        f"another engine fits without recomputing all: {row.way.title}, {row.peak.needed / 1e9:.1f}"
        f" GB with {row.way.elsewhere}"
        for row in lighter[:1]
        if row.peak is not None
    ]


@dataclass(frozen=True)
class StrategyPlan:
    """All rows, and the one that is taken."""

    asked: PlanRequest  # for what
    rows: list[Row]  # every strategy, the simplest first
    chosen: Row | None  # the first that fits; None where none does
    saving: CheckpointPlan | None = None  # its checkpoints
    cost: Cost | None = None  # of the run by it
    notes: list[str] = field(default_factory=list)  # what is worth knowing


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
            rows.append(Row(way, None, None, str(error)))
    possible = [row for row in rows if row.batch is not None and not row.way.aside]
    if refused and not possible:
        raise refused[-1] if asked.cluster.ranks == 1 else refused[1]  # the first is for one GPU
    return with_siblings(rows)


SHOWN_RANK = 16
"""Of the adapters that are shown beside what trains all weights."""


def choose(rows: list[Row], wanted: str | None = None) -> Row | None:
    """The simplest that fits, on the GPUs if it can be; or the one that is wanted, fitting or not.

    Where none fits for sure, one that may fit.

    Raises:
        UsageError: there is none of that name.
    """
    if wanted is None:
        fitting = [row for row in rows if row.fits]
        fitting = fitting or [row for row in rows if row.may_fit and not row.way.aside]
        # What rests on the host is slow in each step, so that it comes last.
        return min(fitting, key=lambda row: row.way.layout.offload, default=None)
    named = {row.way.key: row for row in rows}
    if wanted not in named:
        raise UsageError(f"--strategy {wanted}: there is none here; choose from {', '.join(named)}")
    if named[wanted].way.elsewhere:
        raise UsageError(f"--strategy {wanted} cannot be had: {named[wanted].way.aside}")
    if named[wanted].batch is None:
        raise UsageError(f"--strategy {wanted} cannot be had: {named[wanted].why}")
    return named[wanted]


def require_chosen(plan: StrategyPlan) -> None:
    """Refuse a plan without a chosen row.

    Raises:
        ChecksFailed: none fits; with what comes nearest, and with what would fit.
    """
    if plan.chosen is not None:
        return
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
    if row.may_fit:
        notes.append(
            "the strategy may run out of memory: --measure gives its exact peak; a smaller "
            "--micro-batch leaves room"
        )
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
