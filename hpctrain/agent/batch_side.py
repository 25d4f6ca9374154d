"""The batch script's side of an end: what is done once all agents of a job are gone.

Node 0's agent decides, writes the decision into the ledger and carries it out. Here it is carried
out where the agent could not (no scontrol in a container, killed too early), and decided where no
agent was left to do it. Standard library only, so that it starts within KillWait.
tests/unit/agent/test_batch_side.py and test_full_disk.py hold the promises.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.agent.ending import last_seen, last_step, read_outcome
from hpctrain.agent.notify import SPARE_S, notify, wait_for
from hpctrain.base.files import follow_folder
from hpctrain.base.records import EndReason, Next, StopCause
from hpctrain.errors import ClusterError
from hpctrain.plan.decide import EXIT_STOPPED, allow, decide
from hpctrain.run import events as ledger
from hpctrain.run.fence import read_fence, take_attempt
from hpctrain.run.ownership import job_spec

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from hpctrain.base.records import JobControl, JobFacts
    from hpctrain.plan.decide import Outcome
    from hpctrain.run.layout import RunDir

EXIT_TRY_LATER = 75
SUBMISSIONS = frozenset({"submit_intent", "submitted"})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 900.0
"""Before a requeue that no budget counts, since it could not be written down; twice as long after
each restart of the job, so that a full disk makes no crash loop."""
SPARE_END_S = 60.0
"""A job that pauses must be requeued before its time is over."""
UNREAD_S, READ_AGAIN_S = 60.0, 2.0
"""How long a file system is waited for that does not give the ledger, and how often it is asked."""


@dataclass(frozen=True)
class JobStartFacts:
    """This start of the job, as the batch script knows it."""

    job_id: str
    restarts: int
    token: str
    nodes: list[str]
    rc: int
    """srun's exit code."""
    term: bool
    """Whether SIGTERM came to the batch shell."""
    start_time: float | None = None
    """When the scheduler began it, seconds since the epoch; None where unknown."""
    end_time: float | None = None
    """When the scheduler will end it; None where unknown."""

    def pause_s(self) -> float:
        """Seconds to wait before a requeue that cannot be counted.

        None of them after SIGTERM: SIGKILL is near, and what ends a job so comes at its own pace.
        """
        if self.term:
            return 0.0
        pause: float = min(FIRST_PAUSE_S * 2 ** min(self.restarts, 10), LONGEST_PAUSE_S)
        if self.end_time is not None:
            pause = min(pause, self.end_time - SPARE_END_S - time.time())
        return max(pause, 0.0)


def finish(
    run: RunDir,
    start: JobStartFacts,
    control: JobControl,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Finish what the agents of this start began, and tell of it; returns the job's exit code.

    Also where the run's files cannot be read: then the scheduler's word alone decides.
    """
    deadline = time.monotonic() + (0.0 if start.term else UNREAD_S)
    while True:
        try:
            side = BatchScriptSide(run, start, control, sleep)
            code = side.finish()
            break
        except OSError as error:
            print(f"hpctrain: {run.root} cannot be read: {error}", file=sys.stderr, flush=True)
            if time.monotonic() > deadline:
                return _without_ledger(start, control, sleep)
        sleep(READ_AGAIN_S)
    side.wait_told()
    return code


def _without_ledger(
    start: JobStartFacts, control: JobControl, sleep: Callable[[float], None]
) -> int:
    """Requeue where the scheduler's word calls for it.

    If the run was over, the next start sees so in the ledger and ends.
    """
    if start.rc == EXIT_STOPPED:
        return EXIT_STOPPED
    cause = StopCause.TERM if start.term else None
    try:
        facts = control.facts()
        _, following = decide(facts, start.restarts, cause, "killed" if cause else "crashed")
        if following is Next.REQUEUE:
            sleep(start.pause_s())
            control.requeue()
    except ClusterError as error:
        print(f"hpctrain: the job is not requeued: {error}", file=sys.stderr, flush=True)
        return EXIT_TRY_LATER
    return 1 if following is Next.STOP else 0


class BatchScriptSide:
    """The end of one start of a job, seen from its batch script."""

    def __init__(
        self,
        run: RunDir,
        start: JobStartFacts,
        control: JobControl,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        follow_folder(run.root)
        self._sleep = sleep
        self._run = run
        self._start = start
        self._control = control
        self._events = ledger.read(run)
        self._telling: subprocess.Popen[bytes] | None = None
        self._tell_s = 0.0

    def finish(self) -> int:
        """Do what is still to be done, and begin to tell of it; returns the job's exit code."""
        code = self._finish()
        self._forbid_requeue()
        try:
            self._tell()
        except Exception as error:  # noqa: BLE001 - news are worth less than the job's exit code
            print(f"hpctrain: nobody is notified: {error}", flush=True)
        return code

    def wait_told(self) -> None:
        """Let those hear who are to be notified, where what we have started dies with us.

        As long as [notify] allows where the run is over, else for moments: the job's next start
        waits for us.
        """
        wait_for(self._telling, self._tell_s)

    def _tell(self) -> None:
        attempt = self._attempt()
        if attempt is not None:
            settings = job_spec(self._run).settings.notify
            self._telling = notify(self._run, settings, attempt)
            end = self._last("attempt_ended", attempt)
            over = end is not None and end["next"] == Next.STOP
            self._tell_s = (2 * settings.timeout_s if over else 0.0) + SPARE_S

    def _finish(self) -> int:
        attempt = self._attempt()
        if self._is_superseded(attempt):
            return 0
        end = self._last("attempt_ended", attempt)
        following = Next(end["next"]) if end else None
        if end is None or following in {Next.ASK_BATCH, Next.RESTART}:
            if self._start.rc == EXIT_STOPPED:  # decided by the agent, which could not write it
                return EXIT_STOPPED
            return self._decide(attempt)
        if following is Next.REQUEUE:
            return 0 if self._last("requeued", attempt) is not None else self._requeue(attempt)
        if following is Next.LEAVE:
            return 0
        return self._exit_code(attempt, EndReason(end["reason"]))

    def _forbid_requeue(self) -> None:
        """Where the run is over, or not ours, the scheduler is not to run the job again either.

        Where that cannot be said, a start that comes all the same ends itself (`AttemptEnding`).
        """
        end = self._last("attempt_ended", self._attempt())
        over = end is not None and end["next"] == Next.STOP
        if not (over or self._has_left() or self._start.rc == EXIT_STOPPED):
            return
        try:
            self._control.forbid_requeue()
        except ClusterError as error:
            print(f"hpctrain: the job may be started once more, in vain: {error}", flush=True)

    def _has_left(self) -> bool:
        """Whether our agent found the run in other hands, or over, and left it alone."""
        return any(
            event.kind == "orphan_left" and event.data.get("job_id") == self._start.job_id
            for event in self._events
        )

    def _attempt(self) -> int | None:
        """The newest attempt of this start; None where no agent came so far."""
        numbers = [
            event.attempt
            for event in self._events
            if event.kind == "attempt_started"
            and event.attempt is not None
            and event.data.get("job_id") == self._start.job_id
            and event.data.get("restarts") == self._start.restarts
        ]
        return max(numbers, default=None)

    def _is_superseded(self, attempt: int | None) -> bool:
        """Whether the run has gone on without this job: then nothing is ours to end or requeue."""
        if self._has_left():
            return True
        if attempt is None:
            tokens = [e.data.get("token") for e in self._events if e.kind in SUBMISSIONS]
            return bool(self._start.token and tokens and tokens[-1] != self._start.token)
        fence = read_fence(self._run)
        return fence is not None and fence.number > attempt

    def _last(self, kind: str, attempt: int | None) -> dict[str, Any] | None:
        """The newest event of a kind that this attempt has."""
        newest = [e.data for e in self._events if e.kind == kind and e.attempt == attempt]
        return newest[-1] if newest and attempt is not None else None

    def _decide(self, attempt: int | None) -> int:
        """Decide in the agents' place: they died, or could not ask SLURM."""
        cause, outcome = self._cause_and_outcome(attempt)
        try:
            facts = self._control.facts()
        except ClusterError as error:
            self._append("requeue_failed", attempt, by="batch", why=str(error))
            return EXIT_TRY_LATER
        reason, following = decide(facts, self._start.restarts, cause, outcome)
        if self._cancel_requested():
            reason, following = EndReason.CANCELLED, Next.STOP
        if following is Next.LEAVE and not facts.comes_back:
            # Our successor may be running already: it may not be fenced out by a new attempt of
            # ours.
            if attempt is not None:
                self._record_end(attempt, reason, following, facts)
            return 0
        return self._carry_out(attempt or self._take_attempt(), reason, following, facts)

    def _cause_and_outcome(self, attempt: int | None) -> tuple[StopCause | None, Outcome]:
        """What asked for the stop and how the ranks ended, from what they left behind."""
        left = {} if attempt is None else read_outcome(self._run, attempt)
        asked = self._last("stop_requested", attempt) or {}
        named = left.get("cause") or asked.get("cause")
        cause = StopCause(named) if named else StopCause.TERM if self._start.term else None
        said = left.get("outcome")
        outcome: Outcome = "killed" if cause else "crashed"
        if said in {"done", "stopped"}:
            outcome = said
        return cause, outcome

    def _carry_out(
        self, attempt: int | None, reason: EndReason, following: Next, facts: JobFacts
    ) -> int:
        if following in {Next.REQUEUE, Next.LEAVE}:
            before = [e for e in self._events if not _is_end_of(e, attempt)]
            verdict = allow(before, reason, job_spec(self._run).settings.budget)
            if not verdict.ok:
                self._record_end(attempt, reason, Next.STOP, facts)
                self._stop_for_good(attempt, reason, verdict.exit_code, verdict.why)
                return verdict.exit_code
        recorded = self._record_end(attempt, reason, following, facts)
        if following is Next.REQUEUE:
            if not recorded:
                self._sleep(self._start.pause_s())
            return self._requeue(attempt)
        if following is Next.LEAVE:
            self._append("requeued", attempt, by="scheduler")
            return 0
        if reason is EndReason.COMPLETED and self._last("done", attempt) is None:
            step = None if attempt is None else last_step(self._events, attempt)
            self._append("done", attempt, step=step)
        if reason is EndReason.USER_ERROR:
            self._stop_for_good(attempt, reason, 1, self._detail())
        return self._exit_code(attempt, reason)

    def _requeue(self, attempt: int | None) -> int:
        try:
            self._control.requeue()
        except ClusterError as error:
            self._append("requeue_failed", attempt, by="batch", why=str(error))
            return EXIT_TRY_LATER
        self._append("requeued", attempt, by="batch")
        return 0

    def _take_attempt(self) -> int | None:
        """A number for a start in which no agent came so far, so that it counts and can be seen.

        None where there is no room for it.
        """
        start = self._start
        try:
            taken = take_attempt(self._run, job_id=start.job_id, restarts=start.restarts)
        except OSError as error:
            print(f"hpctrain: this start is not counted: {error}", file=sys.stderr, flush=True)
            return None
        self._append(
            "attempt_started",
            taken.number,
            nodes=self._start.nodes,
            world_size=0,
            ranks_per_node=0,
            token=taken.token,
            job_started=self._start.start_time,
            by="batch",
        )
        return taken.number

    def _record_end(
        self, attempt: int | None, reason: EndReason, following: Next, facts: JobFacts
    ) -> bool:
        if attempt is None:
            return False
        return self._append(
            "attempt_ended",
            attempt,
            reason=reason.value,
            next=following.value,
            **last_seen(self._run, self._events, attempt),
            detail=self._detail(),
            facts=dict(vars(facts)),
            by="batch",
        )

    def _detail(self) -> str:
        return f"decided by the batch side: srun ended with exit code {self._start.rc}"

    def _stop_for_good(self, attempt: int | None, reason: EndReason, code: int, why: str) -> None:
        self._append("run_stopped", attempt, reason=reason.value, exit_code=code, detail=why)

    def _exit_code(self, attempt: int | None, reason: EndReason) -> int:
        """The job's exit code where nothing follows."""
        stopped = self._last("run_stopped", attempt)
        if stopped is not None:
            return stopped.get("exit_code") or 1
        return 0 if reason in {EndReason.COMPLETED, EndReason.STOPPED} else 1

    def _cancel_requested(self) -> bool:
        job_id = self._start.job_id
        return any(
            e.kind == "cancel_requested" and e.data.get("job_id") == job_id for e in self._events
        )

    def _append(self, kind: str, attempt: int | None, **fields: object) -> bool:
        """Write a fact down; one that has no room on the disk counts here all the same."""
        if kind in {"attempt_started", "requeued"}:
            fields |= {"job_id": self._start.job_id, "restarts": self._start.restarts}
        recorded = ledger.record(self._run, kind, attempt=attempt, **fields)
        if recorded:
            self._events = ledger.read(self._run)
        else:
            self._events.append(ledger.Event(time.time(), kind, attempt, dict(fields)))
        return recorded


def _is_end_of(event: ledger.Event, attempt: int | None) -> bool:
    """Whether this is the (first) end of the attempt; the budget is asked without it."""
    return event.kind == "attempt_ended" and event.attempt == attempt
