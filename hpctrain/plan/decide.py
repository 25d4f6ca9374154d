"""Why is the job being stopped, and what must follow?

A job that exits 0 inside its grace time is COMPLETED and never comes back, or comes back by itself
(SLURM since 24.05); a cancelled job that asks for a requeue rises from the dead. Only the scheduler
knows which it is, so it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpctrain.base.records import EndReason, Next, StopCause

if TYPE_CHECKING:
    from hpctrain.base.records import JobFacts

Outcome = Literal["done", "stopped", "killed", "crashed", "storage_failed", "user_error"]
"""How the ranks ended: the program returned; saved and left after a stop request; killed because
they did not leave in time; a rank died; the file system refused; the program raised before it had
done a step."""

_BY_OUTCOME: dict[Outcome, EndReason] = {
    "storage_failed": EndReason.STORAGE_FAILED,
    "user_error": EndReason.USER_ERROR,
}

ENDED_FOR_GOOD = frozenset({"CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE"})


def decide(  # noqa: PLR0911 - a decision table: each return is one of its rows
    facts: JobFacts | None, own_restarts: int, cause: StopCause | None, outcome: Outcome
) -> tuple[EndReason, Next]:
    """Why the attempt ended and what follows.

    Args:
        facts: What the scheduler says of our job now; None when it could not be asked.
        own_restarts: The restart count with which this attempt was started.
        cause: What asked for the stop; None where nothing did (a crash, or a program that
        returned).
        outcome: How the ranks ended.
    """
    if outcome == "done":
        return EndReason.COMPLETED, Next.STOP
    if cause is StopCause.USER:
        return EndReason.STOPPED, Next.STOP
    if facts is None:
        return _guess(cause, outcome), Next.ASK_BATCH
    if is_requeued(facts, own_restarts):
        dead = facts.reason == "NodeDown"
        return EndReason.NODE_FAILED if dead else EndReason.PREEMPTED, Next.LEAVE
    if is_cancelled(facts, own_restarts):
        return EndReason.CANCELLED, Next.STOP
    if facts.preempt_time is not None:
        return EndReason.PREEMPTED, Next.LEAVE if facts.comes_back else Next.REQUEUE
    if facts.reason == "TimeLimit":
        return EndReason.TIMED_OUT, Next.REQUEUE
    if cause is None and outcome == "user_error":
        return EndReason.USER_ERROR, Next.STOP
    if cause is StopCause.TERM and outcome == "killed":
        # SLURM knows of nothing: the SIGTERM is srun's own, after another node's agent had died.
        return EndReason.CRASHED, Next.REQUEUE
    return _guess(cause, outcome), Next.REQUEUE


def is_ending(facts: JobFacts) -> bool:
    """Whether the job is on its way out; SLURM says SIGNALING for a moment while it still runs."""
    return facts.state == "COMPLETING" or facts.state in ENDED_FOR_GOOD


def is_requeued(facts: JobFacts, own_restarts: int) -> bool:
    """Whether the scheduler has already decided to run this job again."""
    if facts.state == "CANCELLED":  # cancelled while it was being requeued: it stays cancelled
        return False
    return facts.restarts is not None and facts.restarts > own_restarts


def is_cancelled(facts: JobFacts, own_restarts: int) -> bool:
    """Whether somebody cancelled the job: it is ending, not requeued, and no time limit was met.

    Also during the grace time of a preemption. When that time is over SLURM sets COMPLETING and the
    higher restart count at once, so the two cannot be taken for each other (measured on 22.05).
    """
    if is_requeued(facts, own_restarts):
        return False
    if facts.state in ENDED_FOR_GOOD:
        return True
    return facts.state == "COMPLETING" and facts.reason != "TimeLimit"


def _guess(cause: StopCause | None, outcome: Outcome) -> EndReason:
    if cause in {StopCause.CLOCK, StopCause.WARNING}:
        return EndReason.TIMED_OUT
    if cause in {StopCause.TERM, StopCause.INTERRUPT}:
        return EndReason.PREEMPTED
    return _BY_OUTCOME.get(outcome, EndReason.CRASHED)
