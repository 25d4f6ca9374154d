"""The state of a run: what the ledger says, and the scheduler where the ledger has no end. Pure.

tests/unit/history/test_attempts.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.records import EndReason, JobState, Next
from hpctrain.ledger.run import event_types as facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.core.base.records import JobInfo
    from hpctrain.ledger.run.event_fields import LedgerFact

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
    SUSPENDED = "suspended"
    """Its job keeps its nodes and stands still, until the scheduler lets it go on."""
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


def after(now: LedgerState, t: float, attempt: int | None, fact: LedgerFact) -> LedgerState:
    """Where the run stands after one more event, of a kind in `STATE_CHANGES`.

    Args:
        now: Where it stood before.
        t: The event's time.
        attempt: The attempt that it belongs to.
        fact: What it says.
    """
    if (attempt or now.attempt or 0) < (now.attempt or 0):
        return now
    changes = STATE_CHANGES[type(fact)](now, fact)
    if type(fact) is facts.AttemptStarted:
        changes["attempt"] = attempt
    moment = t if changes.get("phase", now.phase) is not now.phase else now.t
    return replace(now, t=moment, **changes)


def run_state(now: LedgerState, job: JobInfo | None, *, asked: bool = True) -> RunState:
    """Where the run stands.

    An end in the ledger is final; without one the scheduler's word counts.

    Args:
        now: Where it stands by the ledger alone.
        job: What the scheduler knows of the run's newest job; None when it knows of none.
        asked: False where the scheduler gave no answer; then the ledger alone must do.
    """
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
    if job.state == JobState.SUSPENDED:
        return RunState.SUSPENDED
    if job.state == JobState.COMPLETING and now.phase is RunState.REQUEUED:
        return RunState.REQUEUED
    if job.state == JobState.COMPLETING and now.cancel == "cancel":
        return RunState.COMPLETING
    return RunState.RUNNING


# What each kind of event changes.


def _intent(now: LedgerState, fact: facts.SubmitIntent) -> dict[str, Any]:
    fresh = LedgerState(RunState.SUBMITTING, token=fact.token, attempt=now.attempt)
    return {name: value for name, value in vars(fresh).items() if name != "t"}


def _submitted(now: LedgerState, fact: facts.Submitted | facts.SubmitAdopted) -> dict[str, Any]:
    changes = {"job_id": fact.job_id, "token": fact.token}
    # A job may start, or be held back, before sbatch's answer is written down.
    is_heard = now.phase is RunState.RUNNING or now.job_id == fact.job_id
    return changes if is_heard else changes | {"phase": RunState.PENDING}


def _refused(_: LedgerState, fact: facts.SubmitFailed) -> dict[str, Any]:
    return {"phase": RunState.FAILED, "detail": f"the job was not accepted: {fact.why}"}


def _held_back(now: LedgerState, fact: facts.HeldBack) -> dict[str, Any]:
    if now.job_id not in {None, fact.job_id}:
        return {}  # an older submission's job
    return {"phase": RunState.FAILED, "job_id": fact.job_id, "detail": fact.why}


def _started(now: LedgerState, fact: facts.AttemptStarted) -> dict[str, Any]:
    job_id = fact.job_id or now.job_id
    return {
        "phase": RunState.RUNNING,
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


def _ended(now: LedgerState, fact: facts.AttemptEnded) -> dict[str, Any]:
    if now.phase is RunState.DONE or now.exit_code is not None:
        return {"reason": fact.reason}
    phase = RunState.REQUEUED
    if fact.next is Next.RESTART:
        phase = RunState.RUNNING
    elif fact.next is Next.STOP:
        phase = _BY_REASON.get(fact.reason, RunState.FAILED)
    return {"phase": phase, "reason": fact.reason, "detail": fact.detail}


def _requeued(now: LedgerState, _: facts.Requeued) -> dict[str, Any]:
    return {} if now.phase in OVER else {"phase": RunState.REQUEUED, "detail": ""}


def _not_requeued(_: LedgerState, fact: facts.RequeueFailed) -> dict[str, Any]:
    return {"detail": f"could not be requeued: {fact.why}"}


def _done(_: LedgerState, __: facts.TrainingDone) -> dict[str, Any]:
    return {"phase": RunState.DONE, "detail": ""}


def _stopped(_: LedgerState, fact: facts.RunStopped) -> dict[str, Any]:
    phase = RunState.STOPPED if fact.exit_code == EXIT_FOR_GOOD else RunState.FAILED
    return {"phase": phase, "exit_code": fact.exit_code, "detail": fact.detail}


def _cancel(_: LedgerState, fact: facts.CancelRequested) -> dict[str, Any]:
    return {"cancel": "save" if fact.save else "cancel"}


STATE_CHANGES: dict[type[LedgerFact], Callable[[LedgerState, Any], dict[str, Any]]] = {
    facts.SubmitIntent: _intent,
    facts.Submitted: _submitted,
    facts.SubmitAdopted: _submitted,
    facts.SubmitFailed: _refused,
    facts.HeldBack: _held_back,
    facts.AttemptStarted: _started,
    facts.AttemptEnded: _ended,
    facts.Requeued: _requeued,
    facts.RequeueFailed: _not_requeued,
    facts.TrainingDone: _done,
    facts.RunStopped: _stopped,
    facts.CancelRequested: _cancel,
}
"""What moves a run from one state to another, and how."""
