"""May the run start once more? One budget per cause, and a stop where nothing moves.

SLURM gives no guard against crash loops (a job that requeues itself ran 11 times unheld,
`launch.md` section 2A), and one counter for all causes lets preemptions use up the budget meant
for crashes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.records import EndReason
from hpctrain.settings.schema import BudgetSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.run.events import Event

EXIT_STOPPED = 93

_LIMITS = {
    EndReason.PREEMPTED: "preemptions",
    EndReason.REQUEUED: "preemptions",
    EndReason.TIMED_OUT: "time_limits",
    EndReason.NODE_FAILED: "nodes",
    EndReason.CRASHED: "crashes",
    EndReason.STORAGE_FAILED: "storage",
    EndReason.USER_ERROR: "crashes",
    EndReason.UNKNOWN: "crashes",
}


@dataclass(frozen=True)
class Verdict:
    """Whether the run may start again, and if not, why."""

    ok: bool
    exit_code: int = 0
    why: str = ""


def allow(
    events: Sequence[Event], reason: EndReason, budget: BudgetSettings | None = None
) -> Verdict:
    """Whether one more attempt is within the budgets.

    Args:
        events: The run's ledger, without the end of the attempt in question.
        reason: Why that attempt ended.
        budget: The run's limits.
    """
    budget = budget or BudgetSettings()
    ended = Counter(e.data.get("reason") for e in since_resume(events) if e.kind == "attempt_ended")
    name = _LIMITS.get(reason)
    if name is not None:
        used = 1 + sum(ended[r.value] for r, n in _LIMITS.items() if n == name)
        limit: int = getattr(budget, name)
        if limit and used > limit:
            why = f"{used} attempts ended by {reason.value}, budget.{name} is {limit}"
            return Verdict(ok=False, exit_code=EXIT_STOPPED, why=why)
    idle = attempts_without_progress(events)
    if budget.no_progress and idle >= budget.no_progress:
        why = (
            f"{idle} attempts in a row without one new committed step "
            f"(budget.no_progress is {budget.no_progress})"
        )
        return Verdict(ok=False, exit_code=EXIT_STOPPED, why=why)
    return Verdict(ok=True)


def attempts_without_progress(events: Sequence[Event]) -> int:
    """How many attempts in a row, counted from the newest, committed no new step.

    Only attempts whose ranks reached the restore count: one that the scheduler took away before
    that has cost next to nothing, and a script that does not use hpctrain's checkpoints cannot be
    judged by them.
    """
    newest_saved = 0
    idle: dict[int, bool] = {}
    for event in since_resume(events):
        if event.attempt is None:
            continue
        if event.kind == "restored":
            idle[event.attempt] = True
            newest_saved = max(newest_saved, event.data.get("step") or 0)
        elif event.kind == "saved" and event.data["step"] > newest_saved:
            newest_saved = event.data["step"]
            idle[event.attempt] = False
    count = 0
    for attempt in sorted(idle, reverse=True):
        if not idle[attempt]:
            break
        count += 1
    return count


def since_resume(events: Sequence[Event]) -> Sequence[Event]:
    """The ledger from the last submit or resume on: a person who resumes starts a new budget."""
    start = 0
    for position, event in enumerate(events):
        if event.kind == "submitted":
            start = position
    return events[start:]
