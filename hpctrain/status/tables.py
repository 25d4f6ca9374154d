"""The tables of a run's attempts and of an attempt's ranks. Pure.

The first says where, when and how far each attempt went and what followed; the second which rank is
slow, and where its time and memory go. tests/unit/cli/test_status.py and
tests/unit/history/test_speed.py hold the promises.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.base.text import (
    Column,
    clock,
    count,
    duration,
    fit,
    fold_nodes,
    pack,
    percent,
    size,
    step_time,
)
from hpctrain.history.run_state import RunState
from hpctrain.status.as_json import plain
from hpctrain.status.status import ALIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.history.attempts import AttemptView
    from hpctrain.history.rank_samples import RankSample
    from hpctrain.status.status import RunStatus

ATTEMPTS_SHOWN = 20
RANKS_SHOWN = 32


def attempts_table(status: RunStatus, width: int, *, every: bool = False) -> str:
    """What became of each attempt; the last 20 unless `every` is asked for."""
    shown = list(status.attempts) if every else list(status.attempts)[-ATTEMPTS_SHOWN:]
    if not shown:
        return ""
    one_job = len({attempt.job_id for attempt in status.attempts}) == 1
    pairs = zip(shown, [*shown[1:], None], strict=True)
    back = [_back(status, one, following) for one, following in pairs]
    columns = [
        Column("#", [str(one.number) for one in shown], right=True),
        Column("job", [one.job_id or "-" for one in shown], drop=1 if one_job else 3),
        Column("where", [fold_nodes(one.nodes) or "-" for one in shown], shrink=True),
        Column("started", [clock(one.started, status.now) for one in shown]),
        Column("ran", [_ran(status, one) for one in shown], right=True),
        Column("ended", [_ended(status, one) for one in shown]),
        Column("steps", [_steps(one) for one in shown], short=_plain_steps(shown)),
        Column("lost", [_or_dash(one.steps_lost) for one in shown], right=True),
        Column(
            "recovered in",
            [long for long, _ in back],
            short=Column("back in", [short for _, short in back], right=True),
        ),
    ]
    lines = fit(columns, width)
    hidden = len(status.attempts) - len(shown)
    if hidden:
        lines.insert(1, f"... {count(hidden, 'earlier attempt')} (--attempts shows all)")
    lost = sum(one.steps_lost or 0 for one in status.attempts)
    if len(status.attempts) > 1:
        lines.append(f"{len(status.attempts)} attempts, {lost:,} steps lost in all")
    return "\n".join(lines)


def _plain_steps(shown: Sequence[AttemptView]) -> Column:
    return Column("steps", [_steps(one).replace(",", "") for one in shown])


def _back(
    status: RunStatus, attempt: AttemptView, following: AttemptView | None
) -> tuple[str, str]:
    """From the end of an attempt until the next had done its first step: in parts, and in all."""
    if following is None:
        if attempt.ended is None or status.state is not RunState.REQUEUED:
            return "-", "-"
        so_far = duration(status.now - attempt.ended)
        return f"queued for {so_far}", f"{so_far}.."
    queued, ready = following.queued_s, following.ready_s
    parts = [] if queued is None else [f"{duration(queued)} queue"]
    if ready is None:
        came = "starting" if following.ended is None else "no step"
        return " + ".join([*parts, came]), came
    return " + ".join([*parts, duration(ready)]), duration((queued or 0) + ready)


def _ran(status: RunStatus, attempt: AttemptView) -> str:
    """Until its end; where that is not known, until it was last heard of."""
    end = attempt.ended
    if end is None:
        heard = max(attempt.heard or 0.0, status.progress.seen or 0.0)
        end = status.now if status.state in ALIVE else heard
    return duration(end - attempt.started)


def _ended(status: RunStatus, attempt: AttemptView) -> str:
    if attempt.cause is not None:
        return attempt.cause.value
    if attempt.reason is not None:
        return attempt.reason.value
    if attempt.ended is not None or status.state not in ALIVE:
        return "unknown"
    ends = status.state is RunState.COMPLETING
    return status.state.value if ends else RunState.RUNNING.value


def _steps(attempt: AttemptView) -> str:
    if attempt.first_step is None:
        return "-"
    return f"{attempt.first_step:,}-{attempt.last_step:,}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


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
