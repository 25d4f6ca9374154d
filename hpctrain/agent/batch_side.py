"""The second line of defence: runs beside the agents, on the batch side, after all of them are
gone.

It acts where node 0's agent could not: the agents were killed, or SLURM's commands are not in the
container that they run in. Standard library only, so that it starts within KillWait; safe to run
when there is nothing left to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import ClusterError
from hpctrain.ledger import events as ledger
from hpctrain.plan.budget import EXIT_STOPPED, Verdict, allow
from hpctrain.plan.decide import decide, is_cancelled, is_requeued
from hpctrain.records import EndReason, Next
from hpctrain.settings.spec import load_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.records import JobControl, JobFacts
    from hpctrain.rundir.layout import RunDir

START_FAILURES = 3
"""Job starts in a row that did not even begin an attempt; then something is wrong that waiting cannot mend."""


def conclude_job(
    run: RunDir, control: JobControl, *, job_id: str, restarts: int, exit_code: int
) -> int:
    """See that this start of the job ends as it must.

    Args:
        run: The run.
        control: The job's scheduler.
        job_id: This job.
        restarts: Which start of it.
        exit_code: Worst exit code of the agents.

    Returns:
        The exit code for the job.
    """
    events = ledger.read(run)
    attempt = _newest_attempt(events, job_id, restarts)
    ended = _event(events, "attempt_ended", attempt)
    if any(e.kind == "cancel_requested" and e.data.get("job_id") == job_id for e in events):
        if attempt is not None and ended is None:
            _end(run, attempt, EndReason.CANCELLED, Next.STOP, exit_code)
        return 0
    if ended is None:
        return _conclude_unfinished(run, control, attempt, (job_id, restarts), exit_code)
    following = Next(str(ended.data["next"]))
    if following is Next.ASK_BATCH:
        following = _decide_for_agent(run, control, ended, restarts)
    if following is Next.REQUEUE and _event(events, "requeued", attempt) is None:
        return _requeue(run, control, attempt)
    return _final_code(events, attempt, exit_code)


def _conclude_unfinished(
    run: RunDir,
    control: JobControl,
    attempt: int | None,
    start: tuple[str, int],
    exit_code: int,
) -> int:
    """The agents left no word: they were killed, or never came so far."""
    facts = _facts(control)
    if facts is None or is_requeued(facts, start[1]):
        return (
            exit_code  # nobody to ask, or coming back anyway: the next attempt writes the end down
        )
    if is_cancelled(facts, start[1]):
        if attempt is not None:
            _end(run, attempt, EndReason.CANCELLED, Next.STOP, exit_code)
        return exit_code
    if attempt is None:
        verdict = _after_failed_start(run, start, exit_code)
        reason = EndReason.CRASHED
    else:
        reason, _ = decide(facts, start[1], None, "crashed")
        events = ledger.read(run)
        verdict = allow(events, reason, load_spec(run.spec).settings.budget)
        _end(run, attempt, reason, Next.REQUEUE if verdict.ok else Next.STOP, exit_code)
    if not verdict.ok:
        ledger.append(
            run,
            "run_stopped",
            attempt=attempt,
            reason=reason.value,
            exit_code=verdict.exit_code,
            detail=verdict.why,
        )
        return verdict.exit_code
    return _requeue(run, control, attempt)


def _after_failed_start(run: RunDir, start: tuple[str, int], exit_code: int) -> Verdict:
    ledger.append(run, "start_failed", job_id=start[0], restarts=start[1], exit_code=exit_code)
    failures = 0
    for event in reversed(ledger.read(run)):
        if event.kind in {"attempt_started", "submitted"}:
            break
        failures += event.kind == "start_failed"
    if failures < START_FAILURES:
        return Verdict(ok=True)
    why = f"{failures} starts in a row failed before an attempt began (exit code {exit_code}); see {run.jobs}"
    return Verdict(ok=False, exit_code=EXIT_STOPPED, why=why)


def _decide_for_agent(run: RunDir, control: JobControl, ended: ledger.Event, restarts: int) -> Next:
    facts = _facts(control)
    reason = EndReason(str(ended.data["reason"]))
    if facts is None:
        return Next.STOP
    following = Next.REQUEUE
    if is_requeued(facts, restarts):
        following = Next.LEAVE
    elif is_cancelled(facts, restarts):
        following, reason = Next.STOP, EndReason.CANCELLED
    elif facts.preempt_time is not None:
        reason = EndReason.PREEMPTED
    ledger.append(
        run,
        "attempt_ended",
        attempt=ended.attempt,
        reason=reason.value,
        next=following.value,
        step=ended.data.get("step"),
        detail=ended.data.get("detail"),
        by="batch",
    )
    return following


def _requeue(run: RunDir, control: JobControl, attempt: int | None) -> int:
    try:
        control.requeue()
    except ClusterError as error:
        ledger.append(run, "requeue_failed", attempt=attempt, by="batch", why=str(error))
        return error.exit_code
    ledger.append(run, "requeued", attempt=attempt, by="batch")
    return 0


def _end(run: RunDir, attempt: int, reason: EndReason, following: Next, exit_code: int) -> None:
    ledger.append(
        run,
        "attempt_ended",
        attempt=attempt,
        reason=reason.value,
        next=following.value,
        detail=f"the agents left no word (exit code {exit_code})",
        by="batch",
    )


def _final_code(events: Sequence[ledger.Event], attempt: int | None, exit_code: int) -> int:
    stopped = _event(events, "run_stopped", attempt)
    return int(stopped.data["exit_code"]) if stopped is not None else exit_code


def _newest_attempt(events: Sequence[ledger.Event], job_id: str, restarts: int) -> int | None:
    numbers = [
        e.attempt
        for e in events
        if e.kind == "attempt_started"
        and e.data.get("job_id") == job_id
        and e.data.get("restarts") == restarts
        and e.attempt is not None
    ]
    return max(numbers, default=None)


def _event(events: Sequence[ledger.Event], kind: str, attempt: int | None) -> ledger.Event | None:
    """The newest event of that kind of an attempt."""
    for event in reversed(events):
        if event.kind == kind and attempt is not None and event.attempt == attempt:
            return event
    return None


def _facts(control: JobControl) -> JobFacts | None:
    try:
        return control.facts()
    except ClusterError:
        return None
