"""The end of an attempt, as node 0's agent sees to it: why it ended, and what follows.

The scheduler is asked, and `plan.decide` decides. The decision is written into the ledger before it
is carried out, because carrying it out (`scontrol requeue`) is what gets this process killed; where
it could not be carried out the batch side reads it there and does it (`agent/batch_side.py`). Where
it could not be written, on a full disk, it is carried out all the same.
tests/unit/agent/test_ending.py and tests/slurm/test_requeue_path.py hold the promises.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from hpctrain.agent.notify import notify
from hpctrain.agent.ranks import is_echo
from hpctrain.base.files import read_plain
from hpctrain.base.records import EndReason, Next, StopCause
from hpctrain.errors import ClusterError
from hpctrain.history.causes import EndCause, told_in
from hpctrain.plan.decide import (
    EXIT_STOPPED,
    Outcome,
    allow,
    decide,
    is_cancelled,
    is_requeued,
    is_users,
)
from hpctrain.run import events as ledger
from hpctrain.run.event_fields import count, member
from hpctrain.run.fence import read_fence
from hpctrain.run.heartbeat import read_heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.agent.node import RoundEnd
    from hpctrain.agent.stop_deadline import StopDeadline
    from hpctrain.base.records import FailureReport, JobContext, JobControl, JobFacts
    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec

_FROM_OUTSIDE = frozenset({EndReason.PREEMPTED, EndReason.TIMED_OUT})
"""Ends that come at the scheduler's pace. A requeue after another one that could not be written
down, and so is not counted, is left to the batch side, which pauses first."""


def read_outcome(run: RunDir, attempt: int) -> dict[str, Any]:
    """What rank 0 left behind; empty for a program that does not use hpctrain."""
    try:
        outcome = json.loads(read_plain(run.outcome(attempt)))
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(outcome, dict) or outcome.get("outcome") not in {"done", "stopped", "left"}:
        return {}
    return {
        "outcome": outcome["outcome"],
        "step": count(outcome.get("step")),
        "cause": member(StopCause, outcome.get("cause")),
    }


def last_step(events: list[ledger.Event], attempt: int) -> int | None:
    """The last step that an attempt is known to have done."""
    steps = [
        e.data.get("last" if e.kind == "steps" else "step")
        for e in events
        if e.attempt == attempt and e.kind in {"steps", "saved", "restored", "stopped", "done"}
    ]
    return max((step for step in steps if step is not None), default=None)


def last_seen(run: RunDir, events: list[ledger.Event], attempt: int) -> dict[str, Any]:
    """How far an attempt came and when it was last heard of, as fields of its end.

    By its heartbeat too: of one that was killed without a word, step marks may be a minute old.
    """
    beat = read_heartbeat(run, attempt)
    step = last_step(events, attempt)
    own = [e.t for e in events if e.attempt == attempt and e.kind != "attempt_ended"]
    if beat is not None:
        step = max(beat.step, step or 0)
        own.append(beat.t)
    return {"step": step, "heard": max(own, default=None)}


class AttemptEnding:
    """The end of attempts, as node 0's agent sees to it."""

    def __init__(
        self,
        run: RunDir,
        spec: Spec,
        context: JobContext,
        control: JobControl,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._now = now
        self._spec = spec
        self._context = context
        self._control = control

    def ask(self) -> JobFacts:
        """What the scheduler says of our job.

        Raises:
            ClusterUnreachable: it cannot be asked from here, or is silent.
        """
        return self._control.facts()

    def is_over(self) -> str:
        """Why this job must not run, or "": an older submission's job would be a second writer.

        Nor does a job start again that has ended the run, whoever ran it again.
        """
        events = ledger.read(self._run)
        return self._has_ended_it(events) or self._is_stale(events)

    def _has_ended_it(self, events: list[ledger.Event]) -> str:
        job_id = self._context.job_id
        ours = {e.attempt for e in events
                if e.kind == "attempt_started" and e.data.get("job_id") == job_id}  # fmt: skip
        for end in events:
            is_ours = end.kind == "attempt_ended" and end.attempt in ours
            if is_ours and end.data["next"] == Next.STOP:
                reason = end.data["reason"]
                return f"job {job_id} has ended the run ({reason}); it does not start again"
        return ""

    def _is_stale(self, events: list[ledger.Event]) -> str:
        token = self._context.token
        newest = ""
        for event in events:
            if event.kind in {"submit_intent", "submitted"}:
                newest = event.data["token"]
            if event.kind == "submit_failed" and event.data.get("token") == newest:
                newest = "refused"  # it came all the same, and nobody waits for it
            if event.kind == "cancel_requested" and not event.data.get("save"):
                newest = newest if event.data.get("job_id") != self._context.job_id else "cancelled"
        if not token or not newest or token == newest:
            return ""
        if newest == "cancelled":
            return f"job {self._context.job_id} was cancelled; it does not start again"
        return (
            f"job {self._context.job_id} belongs to an older submission of {self._run.name}; "
            "it leaves"
        )

    def record_lost_attempt(self) -> None:
        """Write down the end of an attempt that could not do so itself.

        Its node died, or it was killed without warning.
        """
        fence = read_fence(self._run)
        if fence is None:
            return
        events = ledger.read(self._run)
        if any(e.kind == "attempt_ended" and e.attempt == fence.number for e in events):
            return
        same_job = fence.job_id == self._context.job_id
        reason, ended_at = EndReason.UNKNOWN, None
        if same_job and self._context.restarts > fence.restarts:
            reason = self._control.previous_end()
        if reason is not EndReason.UNKNOWN:  # a scheduler that tells nothing is asked once only
            ended_at = self._control.previous_stop()
        ledger.record(
            self._run,
            "attempt_ended",
            attempt=fence.number,
            reason=reason.value,
            next=Next.LEAVE.value if same_job else Next.STOP.value,
            **last_seen(self._run, events, fence.number),
            ended_at=ended_at,
            detail="written by the next attempt: this one was killed without a word",
            by="successor",
        )
        notify(self._run, self._spec.settings.notify, fence.number)

    def after_crash(self, attempt: int, failure: FailureReport | None) -> bool:
        """Write down a failed round; whether the ranks may start again in this allocation."""
        events = ledger.read(self._run)
        outcome = self._crash_kind(attempt, failure)
        reason = decide(None, self._context.restarts, None, outcome)[0]
        restarts = sum(
            1
            for e in events
            if e.kind == "attempt_started"
            and e.data.get("by") == "restart"
            and e.data.get("job_id") == self._context.job_id
            and e.data.get("restarts") == self._context.restarts
        )
        may = (
            reason is EndReason.CRASHED
            and self._is_current(attempt)
            and restarts < self._spec.settings.run.restarts_in_job
            and allow(events, reason, self._spec.settings.budget).ok
            and not self._cancelled(events)
            and not self._is_left_behind(attempt)
        )
        if may:
            self._record_failure(attempt, failure)
            self._record_end(
                attempt, reason, Next.RESTART, None, failure.summary if failure else ""
            )
            # Of all other ends the batch side tells: what we started would die with us.
            notify(self._run, self._spec.settings.notify, attempt)
        return may

    def _is_left_behind(self, attempt: int) -> bool:
        """Whether the job goes on or has ended without us: a dead node's agent may live on."""
        fence = read_fence(self._run)
        if fence is None or fence.number != attempt:
            return True
        try:
            facts = self._control.facts()
        except ClusterError:
            return False  # nobody can tell; where a successor begins, the fence stops us
        own = self._context.restarts
        return is_requeued(facts, own) or is_cancelled(facts, own)

    def conclude(self, attempt: int, end: RoundEnd, deadline: StopDeadline) -> int:
        """Decide, write down, carry out. Returns the exit code of the task."""
        if not self._is_current(attempt):
            ledger.record(self._run, "fenced", attempt=attempt, job_id=self._context.job_id)
            return 0  # a zombie must not requeue the job that took over
        left = read_outcome(self._run, attempt)
        outcome = self._outcome(attempt, end, deadline, left)
        cause = left.get("cause") or deadline.cause
        if end.ending == "killed" and cause is None:
            cause = StopCause.CLOCK
        facts = self._facts_now(outcome)
        reason, following = decide(facts, self._context.restarts, cause, outcome)
        why = end.why
        if end.ending == "left" and outcome == "crashed":
            why = "every rank left with exit code 0 between two steps, without a word of its last"
        if end.silent_nodes:
            names = ", ".join(self._context.nodes[node] for node in end.silent_nodes)
            why = f"no sign of life from {names}; {end.why}"
            reason = EndReason.NODE_FAILED if reason is EndReason.CRASHED else reason
        if reason is EndReason.COMPLETED and left.get("outcome") != "done":
            ledger.record(self._run, "done", attempt=attempt, step=left.get("step"))
        if end.failure is not None and outcome in {"crashed", "storage_failed", "user_error"}:
            self._record_failure(attempt, end.failure)
        return self._carry_out(attempt, reason, following, facts, why)

    def unfit(self, attempt: int, bad: Mapping[str, str]) -> int:
        """End an attempt whose nodes are not fit, and run the job again without the bad ones.

        Returns the exit code of the task.
        """
        facts = self._facts_now("crashed")
        reason, following = decide(facts, self._context.restarts, None, "crashed")
        if reason is EndReason.CRASHED:
            reason = EndReason.NODE_FAILED
        why = "; ".join(f"{node}: {text}" for node, text in bad.items())
        return self._carry_out(
            attempt, reason, following, facts, f"preflight: {why}", without=list(bad)
        )

    def apart(self, attempt: int, why: str) -> int:
        """End an attempt whose nodes share no directory; nothing follows until that is mended.

        Returns the exit code of the task.
        """
        facts = self._facts_now("storage_failed")
        reason, following = decide(facts, self._context.restarts, None, "storage_failed")
        if reason is not EndReason.STORAGE_FAILED:  # e.g. preempted meanwhile
            return self._carry_out(attempt, reason, following, facts, why)
        self._record_end(attempt, reason, Next.STOP, facts, why)
        self._stop_for_good(attempt, reason.value, EXIT_STOPPED, why)
        return EXIT_STOPPED

    def _outcome(
        self, attempt: int, end: RoundEnd, deadline: StopDeadline, left: dict[str, Any]
    ) -> Outcome:
        if left.get("outcome") == "done":
            return "done"
        if left.get("outcome") == "stopped":
            return "stopped"
        if end.ending == "left":
            # A script that knows nothing of hpctrain and left after a signal may have saved and
            # gone, in which case it must come back; one that was really done ends at once in its
            # next attempt.
            if deadline.is_told_to_stop():
                return "stopped"
            return "crashed" if self._is_silent_end(attempt, left) else "done"
        if end.ending == "killed" or deadline.cause is not None:
            return "killed"
        return self._crash_kind(attempt, end.failure)

    def _is_silent_end(self, attempt: int, left: dict[str, Any]) -> bool:
        """Whether a program that told of its steps has gone without a word, so is not done."""
        own = [e for e in ledger.read(self._run) if e.attempt == attempt]
        has_told_steps = any(e.kind in {"restored", "steps", "saved"} for e in own)
        return has_told_steps and not left and not any(e.kind == "done" for e in own)

    def _crash_kind(self, attempt: int, failure: FailureReport | None) -> Outcome:
        """What the failure of a rank was to its attempt."""
        if failure is None or failure.kind == "signal" or is_echo(failure):
            return "crashed"
        if told_in(failure.summary) is EndCause.STORAGE_ERROR:
            return "storage_failed"  # also before the first step: it need not be so the next time
        users = is_users(ledger.read(self._run), attempt, failure.summary, self._now())
        return "user_error" if users else "crashed"

    def _facts_now(self, outcome: Outcome) -> JobFacts | None:
        if outcome == "done":
            return None
        try:
            return self._control.facts()
        except ClusterError:
            return None

    def _carry_out(
        self,
        attempt: int,
        reason: EndReason,
        following: Next,
        facts: JobFacts | None,
        why: str,
        *,
        without: Sequence[str] = (),
    ) -> int:
        events = ledger.read(self._run)
        if following is not Next.STOP and self._cancelled(events):
            reason, following = EndReason.CANCELLED, Next.STOP
        code = 1 if reason is EndReason.USER_ERROR else 0
        if following is not Next.STOP:
            verdict = allow(events, reason, self._spec.settings.budget)
            if not verdict.ok:
                self._record_end(attempt, reason, Next.STOP, facts, why)
                self._stop_for_good(attempt, reason.value, verdict.exit_code, verdict.why)
                return verdict.exit_code
        recorded = self._record_end(attempt, reason, following, facts, why)
        if reason is EndReason.USER_ERROR:
            self._stop_for_good(attempt, reason.value, code, why)
        if following is Next.STOP and not recorded:
            return EXIT_STOPPED  # all that the batch side has to tell it from a start that failed
        if following is Next.REQUEUE and (recorded or reason in _FROM_OUTSIDE):
            self._requeue(attempt)
            self._exclude(attempt, without)
        elif following is Next.LEAVE:
            ledger.record(self._run, "requeued", attempt=attempt, by="scheduler")
        return code

    def _stop_for_good(self, attempt: int, reason: str, code: int, why: str) -> None:
        ledger.record(
            self._run, "run_stopped", attempt=attempt, reason=reason, exit_code=code, detail=why
        )

    def _requeue(self, attempt: int) -> None:
        try:
            self._control.requeue()
        except ClusterError as error:
            ledger.record(self._run, "requeue_failed", attempt=attempt, by="agent", why=str(error))
            return
        ledger.record(self._run, "requeued", attempt=attempt, by="agent")

    def _exclude(self, attempt: int, nodes: Sequence[str]) -> None:
        """Where it does not work the job may get the same nodes again, and looks at them again."""
        if not nodes:
            return
        try:
            self._control.exclude(nodes)
        except ClusterError as error:
            ledger.record(self._run, "exclude_failed", attempt=attempt, why=str(error))
            return
        ledger.record(self._run, "excluded", attempt=attempt, nodes=list(nodes))

    def _is_current(self, attempt: int) -> bool:
        """Whether no newer attempt has taken the run over."""
        fence = read_fence(self._run)
        return fence is not None and fence.number == attempt

    def _cancelled(self, events: list[ledger.Event]) -> bool:
        return any(
            e.kind == "cancel_requested" and e.data.get("job_id") == self._context.job_id
            for e in events
        )

    def _record_failure(self, attempt: int, failure: FailureReport | None) -> None:
        if failure is None:
            return
        ledger.record(
            self._run,
            "failure",
            attempt=attempt,
            rank=failure.rank,
            node=failure.node,
            kind_of=failure.kind,
            summary=failure.summary,
            traceback=failure.traceback[-8000:],
            others=failure.others,
        )

    def _record_end(
        self, attempt: int, reason: EndReason, following: Next, facts: JobFacts | None, why: str
    ) -> bool:
        return ledger.record(
            self._run,
            "attempt_ended",
            attempt=attempt,
            reason=reason.value,
            next=following.value,
            **last_seen(self._run, ledger.read(self._run), attempt),
            detail=why,
            facts={} if facts is None else facts.__dict__,
            by="agent",
        )
