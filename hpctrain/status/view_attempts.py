"""Attempts and ranks as tables. Pure.

tests/unit/test_status_cli.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.text import Column, clock, count, duration, fit, fold_nodes
from hpctrain.ledger.derive import RunState
from hpctrain.status.status import ALIVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.derive import AttemptView
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
