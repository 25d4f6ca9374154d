"""The timeline of a run: what each attempt went through and when, and what was submitted. Pure.

Read from the ledger in one go. Times are as their writers' clocks had them; who uses them puts them
in order (`allocations_of`, `goodput.cut`). tests/unit/history/test_goodput.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.base.records import EndReason, Next
from hpctrain.history.run_state import live
from hpctrain.run.event_fields import finite, listed, member, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpctrain.run.events import Event


class TrainingPoint(NamedTuple):
    """Where an attempt's training was at one moment; seconds since its first step."""

    t: float
    step: int
    data_s: float
    save_s: float | None
    """None in a ledger that does not tell; then the saves themselves do."""


class Stall(NamedTuple):
    """A save that stopped the training for a while."""

    t: float
    step: int | None
    seconds: float


@dataclass
class AttemptTimeline:
    """One attempt.

    Attributes:
        number: Counted from 1.
        first_t: When it was first heard of.
        last_t: The same for the last time, by any writer but its successor.
        job_id: Whose job it ran in; where its beginning is torn, the newest that was submitted.
        restarts: How often the scheduler had restarted that job.
        nodes: How many there were.
        restart: Whether it was started again inside the allocation of the one before.
        initialised: Whether its program has called `hpctrain.init`.
        started: When its ranks were about to start.
        begun: When its job began, by SLURM or by the first process that could tell.
        restoring: When its ranks began to look for a checkpoint.
        restored: When they had it.
        restored_step: Its step, 0 for none.
        first_step: When the first step was done.
        base: Seconds of data and saves that count for the time before the first step was done.
        marks: Step marks, in order.
        stalls: Saves, in order.
        stopping: When its ranks agreed to stop.
        left: When they had saved and left, or were done.
        failed: When a failure was written down.
        ended: When its end was written down by those who saw it.
        ended_at: The scheduler's word on the end of its allocation.
        heard: When its ranks were last heard of.
        last_step: The last step that it is known to have done.
        saved_step: The newest checkpoint that it committed.
        reason: Why it ended; None while it runs.
        next: What followed.
    """

    number: int
    first_t: float
    last_t: float
    job_id: str = ""
    restarts: int = 0
    nodes: int = 1
    restart: bool = False
    initialised: bool = False
    started: float | None = None
    begun: float | None = None
    restoring: float | None = None
    restored: float | None = None
    restored_step: int | None = None
    first_step: float | None = None
    base: tuple[float, float] = (0.0, 0.0)
    marks: list[TrainingPoint] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    stopping: float | None = None
    left: float | None = None
    failed: float | None = None
    ended: float | None = None
    ended_at: float | None = None
    heard: float | None = None
    last_step: int | None = None
    saved_step: int | None = None
    reason: EndReason | None = None
    next: Next | None = None

    @property
    def is_over(self) -> bool:
        """Whether an end is on record."""
        return self.reason is not None

    @property
    def tells(self) -> bool:
        """Whether its ranks told anything: a program that does not use hpctrain tells nothing."""
        return self.initialised or self.restored is not None or self.first_step is not None

    def moved(self, step: int | None) -> None:
        """It is known to have done this step."""
        if step is not None:
            self.last_step = max(step, self.last_step or 0)


@dataclass
class Submission:
    """A job that was asked for.

    Attributes:
        asked: When.
        token: The submission's.
        job_id: "" where the answer is not on record.
        refused: Whether it was not accepted.
        cancelled: When it was asked to be cancelled.
    """

    asked: float
    token: str = ""
    job_id: str = ""
    refused: bool = False
    cancelled: float | None = None


@dataclass
class RunTimeline:
    """What became of a run's attempts, and what was submitted."""

    attempts: list[AttemptTimeline] = field(default_factory=list)
    """In the order in which they began."""
    submissions: list[Submission] = field(default_factory=list)
    gone: bool = False
    """Whether the scheduler says that nothing of it runs: an attempt without an end ended when it
    was last heard of."""


def timeline_of(events: Iterable[Event]) -> RunTimeline:
    """The timeline of every attempt, and every submission, in order.

    Facts whose time is no number are left out; nothing that an event holds is an error.
    """
    timeline = RunTimeline()
    by_number: dict[int, AttemptTimeline] = {}
    for event in live(events):
        if not math.isfinite(event.t):
            continue
        if event.kind in _SUBMITS:
            _SUBMITS[event.kind](timeline.submissions, event)
        if event.attempt is None:
            continue
        attempt = by_number.get(event.attempt)
        if attempt is None:
            attempt = by_number[event.attempt] = AttemptTimeline(event.attempt, event.t, event.t)
            # Its beginning says better, where it is not torn.
            attempt.job_id = timeline.submissions[-1].job_id if timeline.submissions else ""
            timeline.attempts.append(attempt)
        if event.kind != "attempt_ended" or event.data.get("by") != "successor":
            attempt.last_t = event.t
        change = _CHANGES.get(event.kind)
        if change is not None:
            change(attempt, event)
    return timeline


# What was asked for.


def _intent(submissions: list[Submission], event: Event) -> None:
    submissions.append(Submission(event.t, text(event.data.get("token"))))


def _accepted(submissions: list[Submission], event: Event) -> None:
    token, job_id = text(event.data.get("token")), text(event.data.get("job_id"))
    same = [one for one in submissions[-1:] if one.token == token and not one.job_id]
    if not same:
        same = [Submission(event.t, token)]
        submissions += same
    same[0].job_id = job_id


def _refused(submissions: list[Submission], event: Event) -> None:
    del event
    if submissions and not submissions[-1].job_id:
        submissions[-1].refused = True


def _cancelled(submissions: list[Submission], event: Event) -> None:
    job_id = text(event.data.get("job_id"))
    for one in submissions[::-1]:
        if one.job_id in {"", job_id}:
            one.cancelled = one.cancelled or event.t
            return


_SUBMITS: dict[str, Callable[[list[Submission], Event], None]] = {
    "submit_intent": _intent,
    "submitted": _accepted,
    "submit_adopted": _accepted,
    "submit_failed": _refused,
    "cancel_requested": _cancelled,
}


# What each kind of event tells of its attempt.


def _started(attempt: AttemptTimeline, event: Event) -> None:
    data = event.data
    attempt.started = event.t
    attempt.job_id = text(data.get("job_id"))
    attempt.restarts = whole(data.get("restarts")) or 0
    attempt.nodes = max(1, len(listed(data.get("nodes"))))
    attempt.restart = data.get("by") == "restart"
    moments = (finite(data.get(name)) for name in ("job_started", "batch_started", "agent_started"))
    attempt.begun = next((t for t in moments if t is not None), None)


def _phase(attempt: AttemptTimeline, event: Event) -> None:
    attempt.initialised = True
    if event.data.get("name") == "first_step" and attempt.first_step is None:
        attempt.first_step = event.t
        data_s, save_s = finite(event.data.get("data_s")), finite(event.data.get("save_s"))
        attempt.base = (max(0.0, data_s or 0.0), max(0.0, save_s or 0.0))


def _restored(attempt: AttemptTimeline, event: Event) -> None:
    attempt.restored = event.t
    attempt.restoring = event.t - max(0.0, finite(event.data.get("seconds")) or 0.0)
    attempt.restored_step = whole(event.data.get("step")) or 0
    attempt.moved(attempt.restored_step)


def _steps(attempt: AttemptTimeline, event: Event) -> None:
    data = event.data
    last = whole(data.get("last"))
    if last is None:
        return
    if not attempt.marks and attempt.first_step is None:  # an older ledger, or a torn one
        attempt.first_step = event.t - max(0.0, finite(data.get("seconds")) or 0.0)
    save_s = finite(data.get("save_s"))
    attempt.marks.append(TrainingPoint(event.t, last, finite(data.get("data_s")) or 0.0, save_s))
    attempt.moved(last)


def _saved(attempt: AttemptTimeline, event: Event) -> None:
    step = whole(event.data.get("step"))
    attempt.stalls.append(Stall(event.t, step, max(0.0, finite(event.data.get("stall_s")) or 0.0)))
    attempt.saved_step = step if step is not None else attempt.saved_step
    attempt.moved(step)


def _stopping(attempt: AttemptTimeline, event: Event) -> None:
    attempt.stopping = attempt.stopping or event.t


def _left(attempt: AttemptTimeline, event: Event) -> None:
    attempt.left = attempt.left or event.t
    attempt.moved(whole(event.data.get("step")))


def _failed(attempt: AttemptTimeline, event: Event) -> None:
    attempt.failed = attempt.failed or event.t


def _ended(attempt: AttemptTimeline, event: Event) -> None:
    data = event.data
    if data.get("by") != "successor" and attempt.ended is None:
        attempt.ended = event.t
    attempt.ended_at = _or_before(finite(data.get("ended_at")), attempt.ended_at)
    attempt.heard = _or_before(finite(data.get("heard")), attempt.heard)
    attempt.reason = member(EndReason, data.get("reason")) or EndReason.UNKNOWN
    attempt.next = member(Next, data.get("next"))
    attempt.moved(whole(data.get("step")))


def _or_before(value: float | None, before: float | None) -> float | None:
    return before if value is None else value


_CHANGES: dict[str, Callable[[AttemptTimeline, Event], None]] = {
    "attempt_started": _started,
    "phase": _phase,
    "restored": _restored,
    "steps": _steps,
    "saved": _saved,
    "stop_requested": _stopping,
    "stopped": _left,
    "done": _left,
    "failure": _failed,
    "attempt_ended": _ended,
}
