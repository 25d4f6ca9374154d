"""What ends are written by: the ledger, read once, and the one place that carries an end out.

The decision is written down before it is carried out, because carrying it out (`scontrol requeue`)
is what gets the agent killed. Standard library only, so that the batch side starts at once.
tests/unit/agent/test_ending.py and test_full_disk.py hold the promises.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.core.base import clock
from hpctrain.core.base.files import read_plain
from hpctrain.core.base.records import EndReason, Next, StopCause
from hpctrain.errors import ClusterError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import event_types as kinds
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.attempt_files import read_heartbeat
from hpctrain.ledger.run.event_fields import count, member

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.cluster.scheduler.base import JobControl
    from hpctrain.ledger.history.run_records import AttemptRecord
    from hpctrain.ledger.plan.decide import (
        EndDecision,
        EndFacts,
    )
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.layout import RunDir

_FROM_OUTSIDE = frozenset({EndReason.PREEMPTED, EndReason.TIMED_OUT})
"""Ends that come at the scheduler's pace."""
T = TypeVar("T", bound="LedgerFact")


def read_outcome(run: RunDir, attempt: int) -> dict[str, Any]:
    """What rank 0 left behind; empty for a program that does not use hpctrain."""
    try:
        outcome = json.loads(read_plain(run.outcome(attempt)))
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(outcome, dict) or outcome.get("outcome") not in {
        "done",
        "failed",
        "left",
        "stopped",
    }:
        return {}
    return {
        "outcome": outcome["outcome"],
        "step": count(outcome.get("step")),
        "cause": member(StopCause, outcome.get("cause")),
    }


class EndWriter:
    """Reads the ledger for an end, once, and is the one place that writes and carries out ends.

    Attributes:
        events: What was read, and what was added here: also what had no room on the disk.
        history: The same, put together.
        missed: What had no room on the disk, for `write_missed`.
    """

    def __init__(
        self, run: RunDir, control: JobControl, missed: list[ledger.Event] | None = None
    ) -> None:
        self._run = run
        self._control = control
        self.missed: list[ledger.Event] = [] if missed is None else missed
        self._tail = ledger.Tail(run.events, marks="few")
        self.events: list[ledger.Event] = []
        self.history = RunHistory()

    def look(self) -> None:
        """Read what has come since the last look. What was added meanwhile comes once more."""
        self._take_in(self._tail.new())

    def add(self, fact: LedgerFact, attempt: int | None) -> bool:
        """Write a fact down; returns whether there was room for it."""
        event = ledger.Event(round(clock.now(), 3), attempt, fact)
        self._take_in([event])
        if ledger.record(self._run, fact, attempt=attempt):
            return True
        self.missed.append(event)
        return False

    def write_missed(self) -> None:
        """Write what had no room before, with its own time.

        Raises:
            OSError: there is no room yet; what was written is not written again.
        """
        while self.missed:
            event = self.missed[0]
            ledger.append(self._run, event.fact, attempt=event.attempt, t=event.t)
            del self.missed[0]

    def _take_in(self, events: list[ledger.Event]) -> None:
        self.events += events
        self.history.extend(events)

    def last(self, kind: type[T], attempt: int | None) -> T | None:
        """The newest fact of a kind about this attempt."""
        own = (e.fact for e in reversed(self.events) if e.attempt == attempt)
        newest = (fact for fact in own if isinstance(fact, kind))
        return None if attempt is None else next(newest, None)

    def carry_out(
        self,
        facts: EndFacts,
        decision: EndDecision,
        *,
        exclude: Sequence[str] = (),
        pause: Callable[[], None] | None = None,
    ) -> tuple[bool, bool]:
        """Write an attempt's end down, then do what follows; keep `exclude` from the next start.

        A requeue that could not be written down is not counted, so `pause` waits before it. None
        leaves such a requeue to the batch side, except those at the scheduler's pace.

        Returns:
            Whether the end was written down, and whether the job was asked to run again and will.
        """
        attempt, following = facts.attempt, decision.next
        is_done = decision.reason is EndReason.COMPLETED and facts.by != "successor"
        if is_done and self.last(kinds.TrainingDone, attempt) is None:
            own = self.history.attempt(attempt)
            step = own.highest_step if own and facts.step is None else facts.step
            self.add(kinds.TrainingDone(step=step), attempt)
        recorded = attempt is not None and self.add(
            kinds.AttemptEnded(
                reason=decision.reason,
                next=following,
                **self._last_seen(attempt, facts.seen_step),
                ended_at=facts.ended_at,
                detail=facts.why,
                facts={} if facts.scheduler is None else dict(vars(facts.scheduler)),
                by=facts.by,
            ),
            attempt,
        )
        if decision.stopped:
            code, why = decision.exit_code, decision.stopped
            self.add(kinds.RunStopped(reason=decision.reason, exit_code=code, detail=why), attempt)
        if facts.has_successor:
            return recorded, False
        if following is Next.LEAVE:
            self.add(_requeued(facts, by="scheduler"), attempt)
        if following is Next.REQUEUE and (recorded or pause or decision.reason in _FROM_OUTSIDE):
            if pause is not None and not recorded:
                pause()
            requeued = self.requeue(facts)
            self._exclude(attempt, exclude)
            return recorded, requeued
        return recorded, False

    def requeue(self, facts: EndFacts) -> bool:
        """Have the job run again; returns whether it does."""
        try:
            self._control.requeue()
        except ClusterError as error:
            self.add(kinds.RequeueFailed(by=facts.by, why=str(error)), facts.attempt)
            return False
        self.add(_requeued(facts, by=facts.by), facts.attempt)
        return True

    def _exclude(self, attempt: int | None, nodes: Sequence[str]) -> None:
        """Where it does not work the job may get the same nodes again, and looks at them again."""
        if not nodes:
            return
        try:
            self._control.exclude(nodes)
        except ClusterError as error:
            self.add(kinds.ExcludeFailed(why=str(error)), attempt)
            return
        self.add(kinds.NodesExcluded(nodes=tuple(nodes)), attempt)

    def last_step(self, attempt: int, seen_step: int | None) -> int | None:
        """The last step that an attempt is known to have come to, as its end will say it."""
        step: int | None = self._last_seen(attempt, seen_step)["step"]
        return step

    def _last_seen(self, attempt: int, seen_step: int | None) -> dict[str, Any]:
        """How far an attempt came and when it was last heard of, as fields of its end."""
        beat, own = read_heartbeat(self._run, attempt), self.history.attempt(attempt)
        step, heard = (own.highest_step, own.last_t) if own else (None, None)
        if beat is not None:
            step, heard = max(beat.step, step or 0), max(beat.t, heard or 0.0)
        return {"step": max(step or 0, seen_step) if seen_step else step, "heard": heard}


def is_replaced(attempt: AttemptRecord) -> bool:
    """Whether its ranks started again in their allocation for a node that was lost."""
    return attempt.reason is EndReason.NODE_FAILED and attempt.next is Next.RESTART


def _requeued(facts: EndFacts, *, by: str) -> kinds.Requeued:
    return kinds.Requeued(by=by, job_id=facts.job_id, restarts=facts.restarts)
