"""One strategy with its batch, memory, traffic and time: a row of a plan. Pure.

tests/unit/strategy/test_batch.py holds the batch, test_choice.py the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.memory import Batch, Peak
from hpctrain.advise.strategy.peaks import host_bytes, peak
from hpctrain.advise.strategy.timing import (
    Links,
    StepTime,
    Traffic,
    flops_of_step,
    step_time,
    traffic_of_step,
)
from hpctrain.core.base.text import one_of
from hpctrain.errors import UsageError
from hpctrain.ledger.plan.mesh import divisors

if TYPE_CHECKING:
    from hpctrain.advise.strategy.facts import ModelFacts
    from hpctrain.advise.strategy.hardware import Accelerator
    from hpctrain.advise.strategy.strategies import Machines, Strategy

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
    fits: bool  # whether it does
    why: str  # why not; or by how much
    traffic: Traffic | None = None  # of a step
    time: StepTime | None = None  # of a step
    host: int = 0  # bytes of a node's own memory that offloaded state takes
    measured: int | None = None  # the exact peak of tensors, bytes; None where it was not measured
    is_held: bool = False  # whether a GPU's memory holds it, in hpctrain's or another engine


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
    """Return what a rank may be given, the largest micro-batch first.

    Refuse a batch that cannot be shared so, or not in passes enough for a pipeline.
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
    return f"{gigabytes(over)} over {asked.gpu.shown}; most is {part} ({nbytes / 1e9:.1f} GB)"


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
