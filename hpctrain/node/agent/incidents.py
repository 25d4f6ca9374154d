"""Notifications of what happens in the middle of an attempt: hangs, lost nodes, slow ranks.

Node 0's agent writes such a fact into the ledger, and asks for the telling (`Incidents.tell`). The
process that tells (`notify_child.py`) puts the words together from the ledger (`incident_of`), as
it does for an attempt's end. tests/unit/agent/test_incidents.py holds the promises.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hpctrain.core.base.records import INCIDENT
from hpctrain.core.base.text import count, fold_ranks
from hpctrain.ledger.run import event_types as kinds
from hpctrain.node.agent.notify import MOST_WHY, news_of, notify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.core.settings.schema import NotifySettings
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.notify import Notification

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
        self._told: set[tuple[object, ...]] = set()

    def tell(self, fact: LedgerFact, attempt: int) -> None:
        """Start to tell of a fact that is in the ledger, where it is an incident and asked for."""
        reason = REASONS.get(type(fact))
        if reason is None or INCIDENT not in self._settings.on:
            return
        node = str(getattr(fact, "node", ""))
        about = (attempt, reason, node, getattr(fact, "ranks", ()), getattr(fact, "left", ()))
        if about not in self._told:
            self._told.add(about)
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
