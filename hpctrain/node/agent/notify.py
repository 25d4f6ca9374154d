"""Notifications of an attempt's end: what there is to tell, and the start of who tells it.

The telling is a process of its own (`notify_child.py`), in a session of its own: it may hang, flood
its output or be missing, and nobody here waits for it. docs/watching.md documents every field;
tests/unit/agent/test_notify.py holds the promises.
"""

from __future__ import annotations

import logging
import math
import shlex
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.process import own_program
from hpctrain.core.base.records import INCIDENT, EndReason, Next
from hpctrain.core.base.text import count, fold_ranks
from hpctrain.ledger.run import event_types as kinds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.core.settings.schema import NotifySettings
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.agent")

SPARE_S = 5.0
"""Beyond `notify.timeout_s`: for the child's own start and its line in the ledger."""
MOST_WHY = 2000
"""Characters of a reason: an argument and a chat message have their limits."""
_ENDED_ON_WISH = frozenset({EndReason.STOPPED, EndReason.CANCELLED})
_started: list[subprocess.Popen[bytes]] = []  # kept: a Popen that is collected warns


@dataclass(frozen=True)
class Notification:
    """What a [notify] command and webhook get."""

    what: str
    """done, failed, stopped: the run is over; attempt: an attempt ended and the run continues;
    incident: something happened in the middle of one."""
    run: str
    run_dir: str
    attempt: int
    job_id: str | None
    reason: str
    """Why the attempt ended, as `hpctrain status` has it; of an incident, what it is."""
    step: int | None
    """The last step that it is known to have done."""
    saved_step: int | None
    """The newest step that a committed checkpoint has."""
    steps_lost: int | None
    """What a resume from there does again."""
    loss: float | None
    left_out: int
    """Batches whose update guards have left out, in the state that is kept."""
    why: str
    next: str
    """A command that helps now."""
    text: str
    """All that matters in one line; chat services that take `text` show it."""


def notify(
    run: RunDir, settings: NotifySettings, attempt: int, *, incident: Sequence[str] = ()
) -> subprocess.Popen[bytes] | None:
    """Start to report an attempt's end from the ledger; None if nobody asked for it.

    This costs the start of a process, never more; the result is in the ledger as `notified`.
    `incident` (see `incident_of`) is reported instead of the end.
    """
    if not settings.on or not (settings.command or settings.webhook_file):
        return None
    words = [str(run.root), str(attempt), *incident]
    command = own_program("hpctrain.node.agent.notify_child", *words)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:  # no memory, no process to be had: the run's end continues without it
        log.warning("nobody is notified: %s", error)
        return None
    _started.append(child)
    return child


def notifying() -> set[int]:
    """The processes that tell news just now."""
    return {child.pid for child in _started if child.poll() is None}


def wait_for(child: subprocess.Popen[bytes] | None, limit_s: float) -> None:
    """Let it finish where its end would come with ours; leaves it alone after the limit."""
    if child is not None:
        try:
            child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return


def notification_of(run: RunDir, history: RunHistory, number: int) -> Notification | None:
    """The news of an attempt; None where it has not ended."""
    attempt = history.attempt(number)
    if attempt is None or (attempt.reason is None and attempt.stuck is None):
        return None
    stuck = "" if attempt.stuck is None else f"the job could not be requeued: {attempt.stuck}"
    what = "failed" if stuck else _what(attempt)
    failure = "" if attempt.failure is None else attempt.failure.summary
    why = stuck or attempt.stopped_for_good or failure or attempt.detail
    step = attempt.end_step
    reason = (attempt.reason or EndReason.UNKNOWN).value
    return news_of(
        run,
        history,
        attempt,
        what=what,
        reason=reason,
        step=step,
        steps_lost=_lost(step, _newest_saved(history), is_done=what == "done"),
        why=why[:MOST_WHY],
        next=_next(run, what),
        text=_text(run.name, what, attempt=number, reason=reason, step=step, why=why)
        + _guarded(len(history.holes)),
    )


def news_of(
    run: RunDir, history: RunHistory, attempt: AttemptRecord, **occasion: Any
) -> Notification:
    """Return what the ledger says of an attempt; `occasion` has `Notification`'s other fields."""
    return Notification(
        run=run.name,
        run_dir=str(run.root),
        attempt=attempt.number,
        job_id=attempt.job_id or None,
        saved_step=_newest_saved(history),
        loss=_loss(attempt),
        left_out=len(history.holes),
        **occasion,
    )


def _newest_saved(history: RunHistory) -> int | None:
    """The newest step that a committed checkpoint has."""
    return max((save.step or 0 for save in history.saves if save.committed), default=None)


def _lost(step: int | None, saved: int | None, *, is_done: bool) -> int | None:
    """What a resume does again; none where the program came to its end."""
    if step is None:
        return None
    return 0 if is_done else max(0, step - (saved or 0))


def _what(attempt: AttemptRecord) -> str:
    if attempt.ended_by == "successor":  # the run continues already
        return "attempt"
    reason = attempt.reason
    if attempt.stopped_for_good is not None:
        return "failed" if reason is EndReason.USER_ERROR else "stopped"
    if attempt.next is not Next.STOP:
        return "attempt"
    if reason is EndReason.COMPLETED:
        return "done"
    return "stopped" if reason in _ENDED_ON_WISH else "failed"


def _loss(attempt: AttemptRecord) -> float | None:
    """The last loss that was reported; None also for one that JSON has no word for."""
    losses = (mark.fact.loss for mark in reversed(attempt.marks))
    return next((loss for loss in losses if loss is not None and math.isfinite(loss)), None)


def _next(run: RunDir, what: str) -> str:
    path = shlex.quote(str(run.root))
    if what == "failed":
        return f"hpctrain logs {path} --err"
    return f"hpctrain {'resume' if what == 'stopped' else 'status'} {path}"


def _guarded(left_out: int) -> str:
    return f"; {count(left_out, 'update')} left out by guards" if left_out else ""


def _text(name: str, what: str, *, attempt: int, reason: str, step: int | None, why: str) -> str:
    at = "" if step is None else f" at step {step}"
    if what == "done":
        return f"{name}: done{at}"
    because = f": {' '.join(why.split())}" if why else ""
    head = f"{name}: attempt {attempt} ended" if what == "attempt" else f"{name}: {what}"
    return f"{head}{at} ({reason}){because}"[:MOST_WHY]


REASONS: Mapping[type[LedgerFact], str] = {
    kinds.HangFound: "hang",
    kinds.RanksAwaited: "hang_at_end",
    kinds.RanksOutOfStep: "desync",
    kinds.StragglerFound: "straggler",
    kinds.NodeLost: "node_lost",
}
"""What is an incident; a suspicion is none, since half of them are a long compilation."""
STANDING = frozenset({"hang", "hang_at_end", "desync"})
"""In these the stacks of the ranks tell more."""


class Incidents:
    """Has each incident of a job told once in an attempt, however often it comes and goes."""

    def __init__(self, run: RunDir, settings: NotifySettings) -> None:
        self._run = run
        self._settings = settings
        self._notified: set[tuple[object, ...]] = set()

    def notify(self, fact: LedgerFact, attempt: int) -> None:
        """Start to tell of a fact that is in the ledger, where it is an incident and asked for."""
        reason = REASONS.get(type(fact))
        if reason is None or INCIDENT not in self._settings.on:
            return
        node = str(getattr(fact, "node", ""))
        about = (attempt, reason, node, getattr(fact, "ranks", ()), getattr(fact, "left", ()))
        if about not in self._notified:
            self._notified.add(about)
            notify(self._run, self._settings, attempt, incident=(reason, node))


def incident_of(
    run: RunDir, history: RunHistory, number: int, reason: str, node: str
) -> Notification | None:
    """Return the news of an attempt's last incident of a kind; None if it is over already.

    `reason` is one of `REASONS`. `node` is the lost one: several may be, before the first is
    reported.
    """
    attempt = history.attempt(number)
    why, is_ended = ("", True) if attempt is None else _seen(attempt, reason, node)
    if attempt is None or not why:
        return None
    at = "" if attempt.last_step is None else f", step {attempt.last_step}"
    to_look_at = reason in STANDING and not is_ended and not attempt.is_over
    return news_of(
        run,
        history,
        attempt,
        what=INCIDENT,
        reason=reason,
        step=attempt.last_step,
        steps_lost=None,
        why=why[:MOST_WHY],
        next=f"hpctrain {'stacks' if to_look_at else 'status'} {shlex.quote(str(run.root))}",
        text=f"{run.name}: {' '.join(why.split())} (attempt {number}{at})"[:MOST_WHY],
    )


def _seen(attempt: AttemptRecord, reason: str, node: str) -> tuple[str, bool]:
    """What is the matter, on one line, and whether the ranks were ended; "" where nothing is."""
    match reason:
        case "hang" if isinstance(attempt.hang, kinds.HangFound):
            why, is_ended = f"it hangs: {attempt.hang.summary}", attempt.hang.ended
        case "hang_at_end" if attempt.awaited is not None:
            seen, is_ended = attempt.awaited, attempt.awaited.ended
            left = fold_ranks(seen.left) if seen.left else "others"
            why = f"{count(seen.returned or 0, 'rank')} returned and {left} did not"
        case "desync" if attempt.out_of_step is not None:
            odd, is_ended = attempt.out_of_step, attempt.out_of_step.ended
            why = f"ranks are out of step: {odd.summary}"
        case "straggler" if attempt.straggler is not None:
            why, is_ended = f"it is slow: {attempt.straggler.summary}", False
        case "node_lost":
            why, is_ended = _loss_of(attempt, node), False
        case _:
            return "", False
    return f"{why}; its ranks were ended" if is_ended else why, is_ended


def _loss_of(attempt: AttemptRecord, node: str) -> str:
    for lost in reversed(attempt.lost_nodes):
        if lost.node == node:
            why = f" ({lost.why})" if lost.why else ""
            return f"{'spare ' if lost.was_spare else ''}node {node} was lost{why}"
    return ""
