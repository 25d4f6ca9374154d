"""Tables of a run's attempts and of its ranks, for a console."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.text import Text

from hpctrain.core.base.text import (
    count,
    duration,
    fold_nodes,
    pack,
    percent,
    size,
    step_time,
    time_of_day,
)
from hpctrain.core.drawing import Column, fitted
from hpctrain.ledger.history.run_state import RunState
from hpctrain.observe.status.status import ALIVE, RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.progress import (
        RankSample,
        StepsLost,
    )

ATTEMPTS_SHOWN = 20
RANKS_SHOWN = 32
_GOOD = frozenset({RunState.RUNNING, "completed"})
_EXPECTED = frozenset(
    {"hung_end", "preempted", "walltime", "timed_out", "cancelled", "stopped", "requeued", "fenced"}
)


def attempts_table(
    status: RunStatus, width: int, *, every: bool = False
) -> Sequence[RenderableType]:
    """What became of each attempt; the last 20 unless `every` is asked for."""
    shown = list(status.attempts) if every else list(status.attempts)[-ATTEMPTS_SHOWN:]
    if not shown:
        return []
    parts: list[RenderableType] = [fitted(attempt_columns(status, shown), width)]
    hidden = len(status.attempts) - len(shown)
    if hidden:
        parts.insert(0, Text(f"... {count(hidden, 'earlier attempt')} (--attempts shows all)"))
    if len(status.attempts) > 1:
        lost = "" if status.reported.is_silent else f", {lost_in_all(status.steps_lost)}"
        parts.append(Text(f"{len(status.attempts)} attempts{lost}"))
    return parts


def attempt_columns(status: RunStatus, shown: Sequence[AttemptView]) -> list[Column]:
    """A row for each of these attempts, for a console or a page."""
    one_job = len({attempt.job_id for attempt in status.attempts}) == 1
    pairs = zip(shown, [*shown[1:], None], strict=True)
    back = [_back(status, one, following) for one, following in pairs]
    steps = [_steps(one) for one in shown]
    plain_steps = Column("steps", [text.replace(",", "") for text in steps])
    columns = [
        Column("#", [str(one.number) for one in shown], right=True),
        Column("job", [one.job_id or "-" for one in shown], drop=1 if one_job else 3),
        Column("where", [fold_nodes(one.nodes) or "-" for one in shown], shrink=True),
        Column("started", [time_of_day(one.started, status.now) for one in shown], drop=4),
        Column("ran", [_ran(status, one) for one in shown], right=True, drop=5),
        Column("ended", [_ended(status, one) for one in shown]),
    ]
    if not status.reported.is_silent or any(one.first_step is not None for one in shown):
        columns += [
            Column("steps", steps, short=plain_steps),
            *_sources(shown),
            Column("lost", [_or_dash(one.steps_lost) for one in shown], right=True),
            Column(
                "recovered in",
                [long for long, _ in back],
                short=Column("back in", [short for _, short in back], right=True),
            ),
        ]
    return columns


def _sources(shown: Sequence[AttemptView]) -> list[Column]:
    """Where each attempt's state came from, where not all of it came from disk."""
    if not {one.read_from for one in shown} - {"", "disk"}:
        return []
    return [Column("from", [one.read_from or "-" for one in shown])]


def lost_in_all(lost: StepsLost) -> str:
    """How many steps were done in vain, as far as anybody can tell."""
    if lost.steps is None:
        return f"steps lost not known ({lost.why})"
    steps = f"{lost.steps:,} steps lost in all"
    return f"{steps} but what is not known ({lost.why})" if lost.why else steps


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
        if following.number in status.reported.silent:
            came = "not known"
        return " + ".join([*parts, came]), came
    return " + ".join([*parts, duration(ready)]), duration((queued or 0) + ready)


def _ran(status: RunStatus, attempt: AttemptView) -> str:
    """Until its end; where that is not known, until it was last heard of."""
    end = attempt.ended
    if end is None:
        heard = max(attempt.heard or 0.0, status.progress.seen or 0.0)
        end = status.now if status.state in ALIVE else heard
    return duration(end - attempt.started)


def _ended(status: RunStatus, attempt: AttemptView) -> Text:
    word: str = attempt.cause or attempt.reason or ""
    if not word:
        over = attempt.ended is not None or status.state not in ALIVE
        ends = status.state is RunState.COMPLETING
        word = "unknown" if over else status.state if ends else RunState.RUNNING
    style = "green" if word in _GOOD else "yellow" if word in _EXPECTED else "red"
    return Text(word, "" if word == "unknown" else style)


def _steps(attempt: AttemptView) -> str:
    if attempt.first_step is None:
        return "-"
    last = "?" if attempt.last_step is None else f"{attempt.last_step:,}"
    return f"{attempt.first_step:,}-{last}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def ranks_table(
    status: RunStatus, sample: RankSample | None, width: int
) -> Sequence[RenderableType]:
    """A row for each rank of the newest sample; of many the slowest, by their own work.

    Own work is what a rank does before it first waits for others: in wall time all are alike.
    """
    if sample is None:
        silent = "ranks       the newest attempt has reported no times of its ranks so far"
        cpus = f"CPUs of a node's ranks: {'; '.join(status.cpus)}"
        return [Text(silent), *([Text(cpus)] if status.cpus else [])]
    busy = sample.busy_s
    ranks = sorted(range(len(busy)), key=lambda rank: -busy[rank])[:RANKS_SHOWN]
    if len(busy) <= RANKS_SHOWN:
        ranks.sort()
    columns = [
        Column("rank", [str(rank) for rank in ranks], right=True),
        Column("node", _nodes(status, sample, ranks), shrink=True),
        *_bound(status, sample, ranks),
        Column("step", [step_time(sample.wall_s[r] / sample.steps) for r in ranks], right=True),
        *_optional("data wait", sample.data_s, ranks, lambda r, s: _share(s, sample.wall_s[r])),
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
    parts: list[RenderableType] = [Text(pack(title, width)), fitted(columns, width)]
    if len(busy) > len(ranks):
        parts.append(Text(f"the slowest {len(ranks)} of {len(busy)} ranks (--json has all)"))
    return parts


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


def _share(part: float, whole: float) -> str:
    return percent(part / whole, 1) if whole > 0 else "-"


def _deviations(busy: Sequence[float], ranks: Sequence[int]) -> list[str]:
    middle = statistics.median(busy)
    return [f"{100 * (busy[r] / middle - 1):+.1f} %" if middle > 0 else "-" for r in ranks]
