"""The state of a run: what the ledger says, and the scheduler where the ledger has no end. Pure.

tests/unit/history/test_attempts.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hpctrain.base.records import EndReason, JobState, Next
from hpctrain.run.event_fields import member, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hpctrain.base.records import JobInfo
    from hpctrain.run.events import Event

EXIT_FOR_GOOD = 93
"""Exit code of a run that a budget or a lack of progress stopped."""


class RunState(StrEnum):
    """Where a run stands: a closed set."""

    CREATED = "created"
    """Its directory is there; nothing was submitted."""
    SUBMITTING = "submitting"
    """The scheduler was asked, and no answer is on record."""
    PENDING = "pending"
    RUNNING = "running"
    REQUEUED = "requeued"
    """Waiting to be started again."""
    COMPLETING = "completing"
    """Cancelled; the scheduler still ends its processes, which may still write."""
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """Ended for good: saved and left as asked, or by a budget, or for want of progress."""
    CANCELLED = "cancelled"
    LOST = "lost"
    """No end is on record, and no job is there that could write one."""


OVER = frozenset({RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.CANCELLED})
_WAITING = frozenset({JobState.PENDING, JobState.REQUEUED})
_FAILURES = frozenset(
    {JobState.FAILED, JobState.NODE_FAILED, JobState.OUT_OF_MEMORY, JobState.TIMED_OUT}
)


@dataclass(frozen=True)
class LedgerState:
    """Where the run stands by the ledger alone.

    Attributes:
        phase: The state as last written down; the scheduler may know better.
        token: Of the newest submission.
        job_id: Its job, as soon as it is known.
        attempt: The newest attempt.
        reason: Why the newest attempt ended.
        cancel: "cancel" or "save" once it was asked for, else "".
        exit_code: Of a run that was stopped for good.
        detail: Why, in a line.
        t: When the phase began.
    """

    phase: RunState = RunState.CREATED
    token: str | None = None
    job_id: str | None = None
    attempt: int | None = None
    reason: EndReason | None = None
    cancel: str = ""
    exit_code: int | None = None
    detail: str = ""
    t: float = 0.0


def live(events: Iterable[Event]) -> Iterator[Event]:
    """The events that count: without what an old attempt said after a newer one had begun."""
    newest = 0
    for event in events:
        if event.attempt is not None:
            if event.attempt < newest and event.kind != "attempt_ended":
                continue
            newest = max(newest, event.attempt)
        yield event


def condensed(events: Iterable[Event]) -> Iterator[Event]:
    """The events that count; of step marks in a row the last, which is most of a long ledger."""
    mark: Event | None = None
    for event in live(events):
        if mark is not None and not (event.kind == "steps" and event.attempt == mark.attempt):
            yield mark
        mark = event if event.kind == "steps" else None
        if mark is None:
            yield event
    if mark is not None:
        yield mark


def ledger_state(events: Iterable[Event]) -> LedgerState:
    """Where the run stands by the ledger alone."""
    now = LedgerState()
    for event in live(events):
        handler = _HANDLERS.get(event.kind)
        if handler is None or (event.attempt or now.attempt or 0) < (now.attempt or 0):
            continue
        changes = handler(now, event)
        moment = event.t if changes.get("phase", now.phase) is not now.phase else now.t
        now = replace(now, t=moment, **changes)
    return now


def run_state(events: Iterable[Event], job: JobInfo | None, *, asked: bool = True) -> RunState:
    """Where the run stands.

    An end in the ledger is final; without one the scheduler's word counts.

    Args:
        events: The run's ledger.
        job: What the scheduler knows of the run's newest job; None when it knows of none.
        asked: False where the scheduler gave no answer; then the ledger alone must do.
    """
    now = ledger_state(events)
    if now.phase in OVER:
        return now.phase
    if job is not None and job.alive:
        return _alive(job, now)
    if now.cancel == "cancel" or (job is not None and job.state == JobState.CANCELLED):
        return RunState.CANCELLED
    if not asked or now.phase in {RunState.CREATED, RunState.SUBMITTING}:
        return now.phase
    if job is not None and job.state in _FAILURES:
        return RunState.FAILED
    return RunState.LOST


def _alive(job: JobInfo, now: LedgerState) -> RunState:
    began = job.restarts > 0 or now.phase in {RunState.RUNNING, RunState.REQUEUED}
    if job.state in _WAITING:
        return RunState.REQUEUED if began else RunState.PENDING
    if job.state == JobState.COMPLETING and now.phase is RunState.REQUEUED:
        return RunState.REQUEUED
    if job.state == JobState.COMPLETING and now.cancel == "cancel":
        return RunState.COMPLETING
    return RunState.RUNNING


# What each kind of event changes.


def _intent(now: LedgerState, event: Event) -> dict[str, Any]:
    fresh = LedgerState(RunState.SUBMITTING, token=event.data.get("token"), attempt=now.attempt)
    return {name: value for name, value in vars(fresh).items() if name != "t"}


def _submitted(now: LedgerState, event: Event) -> dict[str, Any]:
    changes = {"job_id": text(event.data.get("job_id")), "token": event.data.get("token")}
    # A job may start before sbatch's answer is written down.
    return changes if now.phase is RunState.RUNNING else changes | {"phase": RunState.PENDING}


def _refused(now: LedgerState, event: Event) -> dict[str, Any]:
    del now
    why = text(event.data.get("why"))
    return {"phase": RunState.FAILED, "detail": f"the job was not accepted: {why}"}


def _started(now: LedgerState, event: Event) -> dict[str, Any]:
    job_id = text(event.data.get("job_id")) or now.job_id
    return {
        "phase": RunState.RUNNING,
        "attempt": event.attempt,
        "job_id": job_id,
        "reason": None,
        "cancel": now.cancel if now.job_id in {None, job_id} else "",
        "exit_code": None,
        "detail": "",
    }


_BY_REASON = {
    EndReason.COMPLETED: RunState.DONE,
    EndReason.STOPPED: RunState.STOPPED,
    EndReason.CANCELLED: RunState.CANCELLED,
}


def _ended(now: LedgerState, event: Event) -> dict[str, Any]:
    following = member(Next, event.data.get("next"))
    reason = member(EndReason, event.data.get("reason")) or EndReason.UNKNOWN
    if now.phase is RunState.DONE or now.exit_code is not None:
        return {"reason": reason}
    phase = RunState.REQUEUED
    if following is Next.RESTART:
        phase = RunState.RUNNING
    elif following is Next.STOP:
        phase = _BY_REASON.get(reason, RunState.FAILED)
    return {"phase": phase, "reason": reason, "detail": text(event.data.get("detail"))}


def _requeued(now: LedgerState, event: Event) -> dict[str, Any]:
    del event
    return {} if now.phase in OVER else {"phase": RunState.REQUEUED, "detail": ""}


def _not_requeued(now: LedgerState, event: Event) -> dict[str, Any]:
    del now
    return {"detail": f"could not be requeued: {text(event.data.get('why'))}"}


def _done(now: LedgerState, event: Event) -> dict[str, Any]:
    del now, event
    return {"phase": RunState.DONE, "detail": ""}


def _stopped(now: LedgerState, event: Event) -> dict[str, Any]:
    del now
    code = whole(event.data.get("exit_code"))
    phase = RunState.STOPPED if code == EXIT_FOR_GOOD else RunState.FAILED
    return {"phase": phase, "exit_code": code, "detail": text(event.data.get("detail"))}


def _cancel(now: LedgerState, event: Event) -> dict[str, Any]:
    del now
    return {"cancel": "save" if event.data.get("save") else "cancel"}


_HANDLERS: dict[str, Callable[[LedgerState, Event], dict[str, Any]]] = {
    "submit_intent": _intent,
    "submitted": _submitted,
    "submit_adopted": _submitted,
    "submit_failed": _refused,
    "attempt_started": _started,
    "attempt_ended": _ended,
    "requeued": _requeued,
    "requeue_failed": _not_requeued,
    "done": _done,
    "run_stopped": _stopped,
    "cancel_requested": _cancel,
}
