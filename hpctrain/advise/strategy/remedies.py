"""What makes a set-up fit: another row, a setting, another engine, more GPUs, a larger GPU. Pure.

A plan's memory is that of hpctrain's engines, so that "does not fit" is no word on the hardware.
tests/unit/strategy/test_remedies.py holds it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.hardware import GPUS
from hpctrain.advise.strategy.rows import row_of
from hpctrain.advise.strategy.strategies import adapted, candidates
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.advise.strategy.rows import PlanRequest, Row
    from hpctrain.advise.strategy.strategies import Strategy

SIBLINGS = ("selective", "recompute", "fused", "half", "bf16-weights", "bf16", "recompute+bf16")
"""What a key may be followed by, the least costly first."""
MOST_TIMES = 64
"""Times the nodes that there are: a plan proposes no more."""
NAMED = 4
"""GPUs that a line names: the smallest that do."""


def with_siblings(rows: list[Row]) -> list[Row]:
    """Return the rows; each that is too large names its nearest relative that fits."""
    by_key = {row.way.key: row for row in rows}
    return [_with_sibling(row, by_key) for row in rows]


def _with_sibling(row: Row, by_key: dict[str, Row]) -> Row:
    if row.peak is None or row.is_held or row.way.aside or row.host:
        return row
    for name in SIBLINGS:
        other = by_key.get(f"{row.way.key}+{name}")
        if other is not None and other.is_held:
            whose = ", with another engine" if other.way.elsewhere else ""
            return replace(row, why=f"{row.why}; fits with {name}{whose}")
    return row


def remedies(asked: PlanRequest, rows: list[Row]) -> list[str]:
    """Return what makes a set-up fit for which no row of hpctrain's does; in a line each."""
    lines = [*_smaller_pass(asked), *_more_nodes(asked)]
    for row in rows:
        if row.is_held and row.peak is not None and (row.way.elsewhere or row.way.layout.lora):
            needed = row.peak.needed / 1e9
            lines.append(f"{row.way.title}: {needed:.1f} GB ({row.way.aside or row.way.key})")
    return [*lines, *_larger_gpu(asked, rows)]


def _smaller_pass(asked: PlanRequest) -> list[str]:
    if asked.micro <= 1:
        return []
    title = _taken(replace(asked, micro=1))
    return [f"--micro-batch 1: {title}"] if title else []


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
    """Return the title of the simplest way that fits on the GPUs; empty if none does.

    If no micro-batch was asked for, the smallest decides.
    """
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
