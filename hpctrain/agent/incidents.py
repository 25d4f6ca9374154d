"""Notifications of what happens in the middle of an attempt: hangs, lost nodes, slow ranks.

Node 0's agent writes such a fact into the ledger, and asks for the telling (`Incidents.tell`). The
process that tells (`notify_child.py`) puts the words together from the ledger (`incident_of`), as
it does for an attempt's end. tests/unit/agent/test_incidents.py holds the promises.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hpctrain.agent.notify import MOST_WHY, Notification, last_loss, newest_saved, notify
from hpctrain.base.text import count, fold_ranks
from hpctrain.run import event_types as kinds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.history.run_history import RunHistory
    from hpctrain.history.run_records import AttemptRecord
    from hpctrain.run.event_kind import LedgerFact
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import NotifySettings

INCIDENT = "incident"
"""In `notify.on`, and as a notification's `what`."""
REASONS: Mapping[type[LedgerFact], str] = {
    kinds.HangFound: "hang",
    kinds.RanksAwaited: "hang_at_end",
    kinds.RanksOutOfStep: "desync",
    kinds.StragglerFound: "straggler",
    kinds.NodeLost: "node_lost",
}
"""What is an incident; a suspicion is none, since half of them are a long compilation."""


class Incidents:
    """Has each incident of a job told once in an attempt, however often it comes and goes."""

    def __init__(self, run: RunDir, settings: NotifySettings) -> None:
        self._run = run
        self._settings = settings
        self._told: set[tuple[object, ...]] = set()

    def tell(self, fact: LedgerFact, attempt: int) -> None:
        """Start to tell of a fact that is in the ledger, where it is an incident and asked for."""
        reason = REASONS.get(type(fact))
        if reason is None or INCIDENT not in self._settings.on:
            return
        who = getattr(fact, "node", ""), getattr(fact, "ranks", ()), getattr(fact, "left", ())
        about = (attempt, reason, *who)
        if about not in self._told:
            self._told.add(about)
            notify(self._run, self._settings, attempt, incident=reason)


def incident_of(run: RunDir, history: RunHistory, number: int, reason: str) -> Notification | None:
    """The news of an attempt's last incident of a kind; None where it is over already.

    Args:
        run: The run.
        history: Its ledger.
        number: The attempt.
        reason: Which kind, one of `REASONS`.
    """
    attempt = history.attempt(number)
    why = "" if attempt is None else _words(attempt, reason)
    if attempt is None or not why:
        return None
    step = attempt.last_step
    at = "" if step is None else f", step {step}"
    looks = (
        "stacks" if reason in {"hang", "hang_at_end", "desync"} and _goes_on(attempt) else "status"
    )
    return Notification(
        what=INCIDENT,
        run=run.name,
        run_dir=str(run.root),
        attempt=number,
        job_id=attempt.job_id or None,
        reason=reason,
        step=step,
        saved_step=newest_saved(history),
        steps_lost=None,
        loss=last_loss(attempt),
        left_out=len(history.holes),
        why=why[:MOST_WHY],
        next=f"hpctrain {looks} {shlex.quote(str(run.root))}",
        text=f"{run.name}: {' '.join(why.split())} (attempt {number}{at})"[:MOST_WHY],
    )


def _goes_on(attempt: AttemptRecord) -> bool:
    hang, awaited, odd = attempt.hang, attempt.awaited, attempt.out_of_step
    ended = isinstance(hang, kinds.HangFound) and hang.ended
    ended = ended or (awaited is not None and awaited.ended) or (odd is not None and odd.ended)
    return not ended and not attempt.is_over


def _words(attempt: AttemptRecord, reason: str) -> str:
    """What is the matter, on one line; "" where nothing is any more."""
    match reason:
        case "hang" if isinstance(attempt.hang, kinds.HangFound):
            return _ended(f"it hangs: {attempt.hang.summary}", is_ended=attempt.hang.ended)
        case "hang_at_end" if attempt.awaited is not None:
            seen = attempt.awaited
            left = fold_ranks(seen.left) if seen.left else "others"
            what = f"{count(seen.returned or 0, 'rank')} returned and {left} did not"
            return _ended(what, is_ended=seen.ended)
        case "desync" if attempt.out_of_step is not None:
            odd = attempt.out_of_step
            return _ended(f"ranks are out of step: {odd.summary}", is_ended=odd.ended)
        case "straggler" if attempt.straggler is not None:
            return f"it is slow: {attempt.straggler.summary}"
        case "node_lost" if attempt.lost_nodes:
            lost = attempt.lost_nodes[-1]
            why = f" ({lost.why})" if lost.why else ""
            return f"{'spare ' if lost.was_spare else ''}node {lost.node} was lost{why}"
        case _:
            return ""


def _ended(words: str, *, is_ended: bool) -> str:
    return f"{words}; its ranks were ended" if is_ended else words
