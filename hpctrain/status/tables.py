"""The ranks of an attempt as a table: which one is slow, where its time and memory go. Pure.

tests/unit/test_speed.py holds the promises.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.base.text import Column, count, duration, fit, pack, percent, size, step_time
from hpctrain.status.as_json import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.history.rank_samples import RankSample
    from hpctrain.status.status import RunStatus

RANKS_SHOWN = 32


def ranks_as_text(status: RunStatus, sample: RankSample | None, width: int) -> str:
    """A row for each rank of the newest sample; of many the slowest, by their own work.

    Own work is what a rank does before it first waits for others: in wall time all are alike.
    """
    if sample is None:
        lines = ["ranks       the newest attempt has told no times of its ranks so far"]
        if status.cpus:
            lines += pack([f"CPUs of a node's ranks: {'; '.join(status.cpus)}"], width)
        return "\n".join(lines)
    busy = sample.busy_s
    ranks = sorted(range(len(busy)), key=lambda rank: -busy[rank])[:RANKS_SHOWN]
    if len(busy) <= RANKS_SHOWN:
        ranks.sort()
    columns = [
        Column("rank", [str(rank) for rank in ranks], right=True),
        Column("node", _nodes(status, sample, ranks), shrink=True),
        *_bound(status, sample, ranks),
        Column("step", [step_time(sample.wall_s[r] / sample.steps) for r in ranks], right=True),
        *_optional("data wait", sample.data_s, ranks, lambda r, s: _of(s, sample.wall_s[r])),
        *_optional("own work", sample.own_s, ranks, lambda _, s: step_time(s / sample.steps)),
        Column("to median", _deviations(busy, ranks), right=True),
        *_optional("memory", sample.peak_bytes, ranks, lambda _, b: size(round(b))),
        *_optional("reserved", sample.reserved_bytes, ranks, lambda _, b: size(round(b)), drop=3),
        *_optional("retries", sample.retries, ranks, lambda _, n: f"{n:.0f}", drop=2),
    ]
    age = duration(status.now - sample.t)
    title = [
        f"ranks of attempt {sample.attempt}",
        f"{count(sample.steps, 'step')} up to step {sample.step:,}",
        f"{age} ago",
    ]
    if sample.own_s is None:
        title.append("nobody can tell a rank's own work from its waiting here")
    lines = [*pack(title, width), *fit(columns, width)]
    if len(busy) > len(ranks):
        lines.append(f"the slowest {len(ranks)} of {len(busy)} ranks (--json has all)")
    return "\n".join(lines)


def _nodes(status: RunStatus, sample: RankSample, ranks: Sequence[int]) -> list[str]:
    """Ranks go node by node, as many on each."""
    attempt = next((one for one in status.attempts if one.number == sample.attempt), None)
    nodes = attempt.nodes if attempt is not None else ()
    each = len(sample.wall_s) // len(nodes) if nodes else 0
    if not each or each * len(nodes) != len(sample.wall_s):
        return ["-" for _ in ranks]
    return [nodes[rank // each] for rank in ranks]


def _bound(status: RunStatus, sample: RankSample, ranks: Sequence[int]) -> list[Column]:
    """Nodes of a job are alike; each rank's log says where a rank could not be bound."""
    newest = status.attempts[-1].number if status.attempts else None
    if not status.cpus or newest != sample.attempt:
        return []
    each = len(status.cpus)
    return [Column("cpus", [status.cpus[rank % each] for rank in ranks], shrink=True, drop=1)]


def _optional(
    title: str,
    values: Sequence[float] | None,
    ranks: Sequence[int],
    cell: Callable[[int, float], str],
    *,
    drop: int = 0,
) -> list[Column]:
    if values is None:
        return []
    return [Column(title, [cell(rank, values[rank]) for rank in ranks], right=True, drop=drop)]


def _of(part: float, whole: float) -> str:
    return percent(part / whole, 1) if whole > 0 else "-"


def _deviations(busy: Sequence[float], ranks: Sequence[int]) -> list[str]:
    middle = statistics.median(busy)
    return [f"{100 * (busy[r] / middle - 1):+.1f} %" if middle > 0 else "-" for r in ranks]


def ranks_as_json(sample: RankSample | None) -> dict[str, Any] | None:
    """The newest sample of every rank; null where there is none."""
    if sample is None:
        return None
    found: dict[str, Any] = plain(asdict(sample))
    return found
