"""The end of an attempt: what is known of it, the decision, and the one place that carries it out.

Two processes see to it. Node 0's agent (`AttemptEnding`) asks the scheduler once the ranks have
left. The batch script (`BatchScriptSide`) comes when all agents of a job are gone: it carries out
what the agent could not (no scontrol in a container, killed too early), and decides where no agent
was left to do it. `plan.decide.decide_end` decides for both. The decision is written into the
ledger before it is carried out, because carrying it out (`scontrol requeue`) is what gets the agent
killed. Where it could not be written, on a full disk, it is carried out all the same.

KillWait is short and a ledger long: it is read once, most step marks unread. Standard library only,
so that the batch side starts at once. tests/unit/agent/test_ending.py, test_batch_side.py and
test_full_disk.py and tests/slurm/test_requeue_path.py hold the promises.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.agent.convictions import Convictions
from hpctrain.agent.incidents import Incidents
from hpctrain.agent.notify import SPARE_S, notify, wait_for
from hpctrain.agent.ranks import is_echo
from hpctrain.base import clock
from hpctrain.base.files import follow_folder, read_plain
from hpctrain.base.records import DESYNC, HANG, EndReason, Next, StopCause
from hpctrain.errors import ClusterError, FileSystemFault, NotWritten, UsageError
from hpctrain.history.causes import NOT_THE_USERS, UNFIT, EndCause, told_in
from hpctrain.history.run_history import RunHistory
from hpctrain.plan.decide import (
    BY_REASON,
    EXIT_STOPPED,
    EndDecision,
    EndFacts,
    Outcome,
    decide_end,
    is_cancelled,
    is_requeued,
    is_users,
    restart_pause_s,
    since_resume,
)
from hpctrain.run import event_types as kinds
from hpctrain.run import events as ledger
from hpctrain.run.event_fields import count, member
from hpctrain.run.fence import IMPORT, read_fence, start_without_ranks, take_attempt
from hpctrain.run.heartbeat import read_heartbeat
from hpctrain.run.ownership import job_spec

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.agent.rounds import RoundEnd
    from hpctrain.agent.stop_deadline import StopDeadline
    from hpctrain.base.records import FailureReport, JobContext, JobFacts
    from hpctrain.errors import CheckpointError
    from hpctrain.history.run_records import AttemptRecord
    from hpctrain.run.event_kind import LedgerFact
    from hpctrain.run.layout import RunDir
    from hpctrain.scheduler.base import JobControl
    from hpctrain.settings.spec import Spec

log = logging.getLogger("hpctrain.agent")

EXIT_TRY_LATER = 75
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 900.0
"""Before a requeue that could not be written down; twice as long each time: no crash loop."""
ASSERTED = "device-side assert"
"""A CUDA error that a program makes by itself, as by an index out of range."""
SPARE_END_S = 60.0
"""A job that pauses must be requeued before its time is over."""
UNREAD_S, READ_AGAIN_S = 60.0, 2.0
"""How long a file system is waited for that does not give the ledger, and how often it is asked."""
NO_PACKAGE = "No module named 'hpctrain'"
"""Python's words in an image without us."""
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
        """Write an attempt's end down, then do what follows from it.

        Args:
            facts: What is known of the end.
            decision: What was decided of it.
            exclude: Nodes that the job's next start is to do without.
            pause: Waits before a requeue that could not be written down, and so is not counted;
                None leaves such a requeue to the batch side, but for those at the scheduler's pace.

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
        """How far an attempt came and when it was last heard of, as fields of its end.

        Step marks may be a minute old, a heartbeat some seconds; what the agent saw is no older.
        """
        beat, own = read_heartbeat(self._run, attempt), self.history.attempt(attempt)
        step, heard = (own.highest_step, own.last_t) if own else (None, None)
        if beat is not None:
            step, heard = max(beat.step, step or 0), max(beat.t, heard or 0.0)
        return {"step": max(step or 0, seen_step) if seen_step else step, "heard": heard}


def _is_replaced(attempt: AttemptRecord) -> bool:
    """Whether its ranks started again in their allocation for a node that was lost."""
    return attempt.reason is EndReason.NODE_FAILED and attempt.next is Next.RESTART


def _requeued(facts: EndFacts, *, by: str) -> kinds.Requeued:
    return kinds.Requeued(by=by, job_id=facts.job_id, restarts=facts.restarts)


class AttemptEnding:
    """The end of attempts, as node 0's agent sees to it."""

    def __init__(
        self,
        run: RunDir,
        spec: Spec,
        context: JobContext,
        control: JobControl,
        *,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._run = run
        self._now = now
        self._settings = spec.settings
        self._context = context
        self._control = control
        self._end = EndWriter(run, control)
        self._incidents = Incidents(run, spec.settings.notify)
        self.convictions = Convictions(run, spec.settings, context)
        self._end_of: int | None = 0
        self.pause_s = 0.0
        self.seen_step: Callable[[], int | None] = lambda: None  # of this node's ranks

    def ask(self) -> JobFacts:
        """What the scheduler says of our job; raises `ClusterUnreachable` where it is silent."""
        return self._control.facts()

    def is_over(self) -> str:
        """Why this job must not run, or "": an older submission's job would be a second writer.

        Nor does a job start again that has ended the run, whoever ran it again.
        """
        token, job_id = self._context.token, self._context.job_id
        newest, ours = "", set[int | None]()
        for event in self._look(0).events:
            match event.fact:
                case kinds.AttemptStarted(job_id=other) if other == job_id:
                    ours.add(event.attempt)
                case kinds.AttemptEnded(next=Next.STOP, reason=why) if event.attempt in ours:
                    return f"job {job_id} has ended the run ({why}); it does not start again"
                case kinds.SubmitIntent(token=other) | kinds.Submitted(token=other):
                    newest = other
                case kinds.SubmitFailed(token=other) if other == newest:
                    newest = "refused"  # it came all the same, and nobody waits for it
                case kinds.CancelRequested(job_id=other, save=False) if other == job_id:
                    newest = "cancelled"
        if not token or newest in {"", token}:
            return ""
        if newest == "cancelled":
            return f"job {job_id} was cancelled; it does not start again"
        return f"job {job_id} belongs to an older submission of {self._run.name}; it leaves"

    def write_missed(self) -> None:
        """See `EndWriter.write_missed`."""
        self._end.write_missed()

    def starts(self) -> int:
        """How often ranks of the run were started, the newest attempt included."""
        attempts = self._look(self._end_of).history.attempts
        return sum(attempt.world_size > 0 for attempt in attempts)

    def record_lost_attempt(self) -> None:
        """Write down the end of an attempt that could not do so itself.

        Its node died, or it was killed; or it wrote what it thought, and accounting knows better.
        """
        fence = read_fence(self._run)
        if fence is None or fence.job_id.startswith(IMPORT):
            return
        self._look(0)
        guess = self._end.last(kinds.AttemptEnded, fence.number)
        if guess is not None and guess.next is not Next.ASK_BATCH:
            return
        same_job = fence.job_id == self._context.job_id
        reason, ended_at = EndReason.UNKNOWN, None
        if same_job and self._context.restarts > fence.restarts:
            reason = self._control.previous_end()
        if guess is not None and reason in {EndReason.UNKNOWN, guess.reason}:
            return
        if reason is not EndReason.UNKNOWN:  # a scheduler that tells nothing is asked once only
            ended_at = self._control.previous_stop()
        said = "was killed without a word" if guess is None else "could not ask the scheduler"
        why = f"written by the next attempt: this one {said}"
        facts = self._facts(fence.number, "killed", why=why, ended_at=ended_at)
        facts = replace(facts, by="successor", has_successor=True)
        following = Next.LEAVE if same_job else Next.STOP
        self._end.carry_out(facts, EndDecision(reason, following))
        notify(self._run, self._settings.notify, fence.number)

    def after_crash(self, attempt: int, failure: FailureReport | None) -> bool:
        """Write down a failed round; whether the ranks may start again in this allocation."""
        own = "restart", self._context.job_id, self._context.restarts
        attempts = self._look(attempt).history.attempts
        again = [a for a in attempts if (a.by, a.job_id, a.restarts) == own]
        lost = [a for a in attempts if (a.job_id, a.restarts) == own[1:] and _is_replaced(a)]
        if len(again) - len(lost) >= self._settings.run.restarts_in_job:
            return False
        if failure is not None and failure.kind == HANG and self._came_to_end(attempt, failure):
            return False
        outcome, why = self._crash_kind(attempt, failure), failure.summary if failure else ""
        facts = self._facts(attempt, outcome, why=why, in_place=True)
        decision = decide_end(facts, self._end.history, self._settings.budget)
        if decision.next is not Next.RESTART or self._is_left_behind(attempt):
            return False
        if not self.convictions.are_out(self._end.history):
            return False  # in this allocation its ranks would be there again
        self._record_failure(attempt, failure)
        self._end.carry_out(facts, decision)
        self.pause_s = self._pause_s(attempt)
        if self.pause_s:
            log.warning("attempt %d starts again in %g s: %s", attempt, self.pause_s, why)
            self._end.add(kinds.RestartPaused(seconds=self.pause_s), attempt)
        # Of all other ends the batch side tells: what we started would die with us.
        notify(self._run, self._settings.notify, attempt)
        return True

    def _pause_s(self, attempt: int) -> float:
        """How long its ranks wait for their restart; never beyond the end of the job."""
        longest_s = self._settings.run.restart_pause_s
        pause = restart_pause_s(self._end.history, attempt, longest_s)
        end = self._context.end_time
        return pause if end is None else max(0.0, min(pause, end - SPARE_END_S - self._now()))

    def _is_left_behind(self, attempt: int) -> bool:
        """Whether the job goes on or has ended without us: a dead node's agent may live on."""
        if not self._is_current(attempt):
            return True
        if (facts := self._ask()) is None:
            return False  # nobody can tell; where a successor begins, the fence stops us
        own = self._context.restarts
        return is_requeued(facts, own) or is_cancelled(facts, own)

    def conclude(self, attempt: int, end: RoundEnd, deadline: StopDeadline) -> int:
        """Decide, write down, carry out. Returns the exit code of the task."""
        if not self._is_current(attempt):
            self._end.add(kinds.AttemptFenced(job_id=self._context.job_id), attempt)
            return 0  # a zombie must not requeue the job that took over
        self._look(attempt)
        left = read_outcome(self._run, attempt)
        outcome = self._outcome(attempt, end, deadline, left)
        cause = left.get("cause") or deadline.cause
        if left.get("outcome") == "failed":  # whatever else was to stop it
            cause = None
        if end.ending == "killed" and cause is None:
            cause = StopCause.CLOCK
        why = end.why
        if end.ending == "left" and outcome == "crashed":
            why = "every rank left with exit code 0 between two steps, without a word of its last"
        if end.silent_nodes:
            names = ", ".join(self._context.nodes[node] for node in end.silent_nodes)
            why = f"no sign of life from {names}; {end.why}"
        facts = self._facts(attempt, outcome, cause=cause, why=why, step=left.get("step"))
        facts = replace(facts, nodes_failed=bool(end.silent_nodes))
        failed = outcome in {"crashed", "storage_failed", "user_error"}
        code = self._decide(facts, end.failure if failed else None)
        # Not 0: the scheduler would wait until the time limit for agents that are stopped.
        return code or int(bool(end.silent_nodes))

    def end_for_bad_nodes(self, attempt: int, bad: Mapping[str, str]) -> int:
        """End an attempt whose nodes are not fit, and run the job again without the bad ones.

        Returns the exit code of the task.
        """
        why = UNFIT + "; ".join(f"{node}: {text}" for node, text in bad.items())
        facts = self._facts(attempt, "crashed", why=why, nodes_failed=True)
        return self._decide(facts, exclude=list(bad))

    def end_without_shared_folder(self, attempt: int, why: str) -> int:
        """End an attempt whose nodes share no directory; nothing follows until that is mended.

        Returns the exit code of the task.
        """
        return self._decide(self._facts(attempt, "storage_failed", why=why, needs_mending=True))

    def end_without_resume(self, attempt: int, error: CheckpointError) -> int:
        """End an attempt that has no checkpoint to go on from, though its run has sealed some.

        Returns the exit code of the task.
        """
        is_storage = isinstance(error, FileSystemFault | NotWritten)
        outcome: Outcome = "storage_failed" if is_storage else "user_error"
        return self._decide(self._facts(attempt, outcome, why=str(error)))

    def _decide(
        self, facts: EndFacts, failure: FailureReport | None = None, *, exclude: Sequence[str] = ()
    ) -> int:
        if facts.outcome != "done":
            facts = replace(facts, scheduler=self._ask())
        # Read on only now: the job may have been cancelled while the scheduler was asked.
        history = self._look(facts.attempt).history
        decision = decide_end(facts, history, self._settings.budget)
        self._record_failure(facts.attempt, failure)
        named = self.convictions.keep_out(history)
        recorded, _ = self._end.carry_out(facts, decision, exclude=[*exclude, *named])
        if decision.next is Next.STOP and not recorded:
            return EXIT_STOPPED  # all that the batch side has to tell it from a start that failed
        return decision.exit_code

    def _is_current(self, attempt: int) -> bool:
        """Whether no newer attempt has taken the run over."""
        fence = read_fence(self._run)
        return fence is not None and fence.number == attempt

    def _look(self, attempt: int | None) -> EndWriter:
        """The ledger as it stands; what was read for the same end is not read again."""
        if attempt != self._end_of:
            missed = self._end.missed
            self._end, self._end_of = EndWriter(self._run, self._control, missed), attempt
        self._end.look()
        return self._end

    def _ask(self) -> JobFacts | None:
        """What the scheduler says of our job; None where it is silent: the batch side asks too."""
        try:
            return self._control.facts()
        except ClusterError:
            return None

    def _facts(self, attempt: int, outcome: Outcome, **more: Any) -> EndFacts:
        start = self._context.job_id, self._context.restarts
        return EndFacts("agent", *start, attempt, outcome, seen_step=self.seen_step(), **more)

    def _outcome(  # noqa: PLR0911 - a decision table, as that of `decide`
        self, attempt: int, end: RoundEnd, deadline: StopDeadline, left: dict[str, Any]
    ) -> Outcome:
        if left.get("outcome") == "done":
            return "done"
        if left.get("outcome") == "stopped":
            return "stopped"
        if left.get("outcome") == "failed":
            return "user_error"
        if end.ending == "left":
            # A script that knows nothing of hpctrain and left after a signal may have saved and
            # gone, in which case it must come back; one that was really done ends at once in its
            # next attempt.
            if deadline.is_told_to_stop() or left.get("cause") is not None:
                return "stopped"
            return "crashed" if not left and self._is_silent_end(attempt) else "done"
        if end.ending == "hung" and end.failure and self._came_to_end(attempt, end.failure):
            return "done"
        if end.ending == "killed" or deadline.cause is not None:
            return "killed"
        return self._crash_kind(attempt, end.failure)

    def _is_silent_end(self, attempt: int) -> bool:
        """Whether a program that told of its steps has gone without a word, so is not done."""
        own = self._end.history.attempt(attempt)
        tells = own is not None and own.highest_step is not None
        return tells and self._end.last(kinds.TrainingDone, attempt) is None

    def _came_to_end(self, attempt: int, hung: FailureReport) -> bool:
        """Whether a program whose ranks did not all return has done all that it had to do.

        One that tells its steps says so itself. Of another the word is rank 0's, which by custom
        writes what is to be kept; where it hangs itself its last work may be missing, and it gets
        another chance. If most ranks return then too, it hangs at its end, and training again would
        not help. Were few ranks that return taken at their word, a hang in the middle of a run
        would be called its end.
        """
        own = self._end.history.attempt(attempt)
        if read_outcome(self._run, attempt).get("outcome") == "done":
            return True
        if own is None or own.tells_steps:
            return self._end.last(kinds.TrainingDone, attempt) is not None
        left = {hung.rank, *hung.others}
        if 0 not in left:
            return True
        earlier = [one for one in since_resume(self._end.history) if one.number < attempt]
        again = bool(earlier) and earlier[-1].awaited is not None and earlier[-1].awaited.ended
        return again and 2 * len(left) <= own.world_size

    def record(self, attempt: int, fact: LedgerFact) -> None:
        """Write down what was seen of an attempt's ranks, and have an incident told."""
        ledger.record(self._run, fact, attempt=attempt)
        self._incidents.tell(fact, attempt)

    def _crash_kind(self, attempt: int, failure: FailureReport | None) -> Outcome:
        """What the failure of a rank was to its attempt."""
        if read_outcome(self._run, attempt).get("outcome") == "failed":
            return "user_error"
        if failure is None or failure.kind in {"signal", HANG, DESYNC} or is_echo(failure):
            return "crashed"
        cause = None if ASSERTED in failure.summary else told_in(failure.summary)
        if cause is EndCause.STORAGE_ERROR:
            return "storage_failed"  # also before the first step: it need not be so the next time
        if cause in NOT_THE_USERS:
            return "crashed"
        # A full disk may have room again, so its error at one step twice proves nothing.
        step = self._end.last_step(attempt, self.seen_step()) if cause is None else None
        users = is_users(self._end.history, attempt, failure.summary, self._now(), step)
        return "user_error" if users else "crashed"

    def _record_failure(self, attempt: int | None, failure: FailureReport | None) -> None:
        if failure is not None:
            fact = kinds.RankFailed(
                rank=failure.rank,
                node=failure.node,
                kind_of=failure.kind,
                summary=failure.summary,
                traceback=failure.traceback[-8000:],
                others=tuple(failure.others),
            )
            self._end.add(fact, attempt)


# ---- the batch script's side


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
    ended_early: str = ""
    """What ended the script before its srun, such as a failed line of setup; "" for nothing."""
    start_time: float | None = None
    """When the scheduler began it, seconds since the epoch; None where unknown."""
    end_time: float | None = None
    """When the scheduler will end it; None where unknown."""
    last_words: Callable[[], str] | None = None
    """Where its tasks begin in a container: what they have said last."""

    def pause_s(self) -> float:
        """Seconds to wait before a requeue that cannot be counted.

        None of them after SIGTERM: SIGKILL is near, and what ends a job so comes at its own pace.
        """
        if self.term:
            return 0.0
        pause: float = min(FIRST_PAUSE_S * 2 ** min(self.restarts, 10), LONGEST_PAUSE_S)
        if self.end_time is not None:
            pause = min(pause, self.end_time - SPARE_END_S - clock.now())
        return max(pause, 0.0)


def finish(
    run: RunDir,
    start: JobStartFacts,
    control: JobControl,
    sleep: Callable[[float], None] = clock.sleep,
) -> int:
    """Finish what the agents of this start began, and tell of it; returns the job's exit code.

    Also where the run's files cannot be read: then the scheduler's word alone decides.
    """
    deadline = clock.monotonic() + (0.0 if start.term else UNREAD_S)
    while True:
        try:
            side = BatchScriptSide(run, start, control, sleep)
            code = side.finish()
            break
        except OSError as error:
            log.warning("%s cannot be read: %s", run.root, error)
            if clock.monotonic() > deadline:
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
    if start.rc == EXIT_STOPPED and not start.ended_early:
        return EXIT_STOPPED
    cause = StopCause.TERM if start.term else None
    facts = EndFacts("batch", start.job_id, start.restarts, None, "killed" if cause else "crashed")
    try:
        facts = replace(facts, cause=cause, scheduler=control.facts())
        following = decide_end(facts, RunHistory()).next
        if following is Next.REQUEUE:
            sleep(start.pause_s())
            control.requeue()
    except ClusterError as error:
        log.warning("the job is not requeued: %s", error)
        return EXIT_TRY_LATER
    return 1 if following is Next.STOP else 0


class BatchScriptSide:
    """The end of one start of a job, seen from its batch script."""

    def __init__(
        self,
        run: RunDir,
        start: JobStartFacts,
        control: JobControl,
        sleep: Callable[[float], None] = clock.sleep,
    ) -> None:
        follow_folder(run.root)
        self._sleep = sleep
        self._run = run
        self._start = start
        self._control = control
        self._end = EndWriter(run, control)
        self._end.look()
        self._telling: subprocess.Popen[bytes] | None = None
        self._tell_s = 0.0

    def finish(self) -> int:
        """Do what is still to be done, and begin to tell of it; returns the job's exit code."""
        code = self._finish()
        self._forbid_requeue()
        try:
            self._tell()
        except Exception as error:  # noqa: BLE001 - news are worth less than the job's exit code
            log.warning("nobody is notified: %s", error)
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
            end = self._end.last(kinds.AttemptEnded, attempt)
            over = end is not None and end.next is Next.STOP
            self._tell_s = (2 * settings.timeout_s if over else 0.0) + SPARE_S

    def _finish(self) -> int:
        attempt = self._attempt()
        if self._is_superseded(attempt):
            return 0
        end = self._end.last(kinds.AttemptEnded, attempt)
        if end is None or end.next in {Next.ASK_BATCH, Next.RESTART}:
            if self._has_stopped():  # decided by the agent, which could not write it
                return EXIT_STOPPED
            return self._decide(attempt)
        if end.next is Next.REQUEUE and self._end.last(kinds.Requeued, attempt) is None:
            return 0 if self._end.requeue(self._facts(attempt)) else EXIT_TRY_LATER
        return self._exit_code(attempt, end.reason, end.next)

    def _forbid_requeue(self) -> None:
        """Where the run is over, or not ours, the scheduler is not to run the job again either.

        Where that cannot be said, a start that comes all the same ends itself (`AttemptEnding`).
        """
        end = self._end.last(kinds.AttemptEnded, self._attempt())
        over = end is not None and end.next is Next.STOP
        if not (over or self._has_left() or self._has_stopped()):
            return
        try:
            self._control.forbid_requeue()
        except ClusterError as error:
            log.warning("the job may be started once more, in vain: %s", error)

    def _has_stopped(self) -> bool:
        """Whether an agent left with a stopped run's code; a script before its srun did not."""
        return self._start.rc == EXIT_STOPPED and not self._start.ended_early

    def _has_left(self) -> bool:
        """Whether our agent found the run in other hands, or over, and left it alone."""
        return any(
            isinstance(event.fact, kinds.OrphanLeft) and event.fact.job_id == self._start.job_id
            for event in self._end.events
        )

    def _attempt(self) -> int | None:
        """The newest attempt of this start; None where no agent came so far."""
        own = self._start.job_id, self._start.restarts
        numbers = [
            e.attempt
            for e in self._end.events
            if isinstance(e.fact, kinds.AttemptStarted)
            and e.attempt is not None
            and (e.fact.job_id, e.fact.restarts) == own
        ]
        return max(numbers, default=None)

    def _is_superseded(self, attempt: int | None) -> bool:
        """Whether the run has gone on without this job: then nothing is ours to end or requeue."""
        if self._has_left():
            return True
        if attempt is None:
            facts = [event.fact for event in self._end.events]
            tokens = [f.token for f in facts if isinstance(f, kinds.SubmitIntent | kinds.Submitted)]
            return bool(self._start.token and tokens and tokens[-1] != self._start.token)
        fence = read_fence(self._run)
        return fence is not None and fence.number > attempt

    def _facts(self, attempt: int | None, **more: Any) -> EndFacts:
        start = self._start
        why = f"decided by the batch side: srun ended with exit code {start.rc}"
        return EndFacts("batch", start.job_id, start.restarts, attempt, why=why, **more)

    def _decide(self, attempt: int | None) -> int:
        """Decide in the agents' place: they died, or could not ask SLURM."""
        cause, outcome = self._cause_and_outcome(attempt)
        try:
            scheduler = self._control.facts()
        except ClusterError as error:
            self._end.add(kinds.RequeueFailed(by="batch", why=str(error)), attempt)
            return EXIT_TRY_LATER
        is_back = is_requeued(scheduler, self._start.restarts)
        facts = self._facts(
            attempt, outcome=outcome, cause=cause, scheduler=scheduler, has_successor=is_back
        )
        if attempt is None and cause is None and self._start.ended_early:
            facts = self._of_setup(facts)
        elif attempt is None and cause is None and self._start.last_words is not None:
            facts = self._of_container(facts, self._start.last_words())
        # Read on only now: the job may have been cancelled while the scheduler was asked.
        budget = job_spec(self._run).settings.budget
        self._end.look()
        decision = decide_end(facts, self._end.history, budget)
        if attempt is None and decision.next is Next.LEAVE and is_back:
            return 0  # it may be running: it may not be fenced out by a new attempt of ours
        facts = replace(facts, attempt=attempt or self._take_attempt())
        _, requeued = self._end.carry_out(
            facts, decision, pause=lambda: self._sleep(self._start.pause_s())
        )
        if decision.next is Next.REQUEUE:
            return 0 if requeued else EXIT_TRY_LATER
        return decision.exit_code or self._exit_code(facts.attempt, decision.reason, decision.next)

    def _of_setup(self, facts: EndFacts) -> EndFacts:
        """What is known of a start whose script ended before its srun.

        Where an earlier start came further, this start's node may be at fault: the next one may get
        another. Else, and where that fails in the same way, every start would.
        """
        earlier = since_resume(self._end.history)
        came_further = bool(earlier) and earlier[-1].by != "batch"
        outcome: Outcome = "crashed" if came_further else "user_error"
        return replace(facts, outcome=outcome, why=self._start.ended_early)

    def _of_container(self, facts: EndFacts, said: str) -> EndFacts:
        """What is known of a start in a container in which no agent came, though nothing ended it.

        Its nodes may be at fault, and the next start gets others; where that fails as well, or what
        is missing is the image's, none would help.
        """
        earlier = since_resume(self._end.history)
        again = bool(earlier) and earlier[-1].by == "batch"
        is_images = self._start.rc == UsageError.exit_code or NO_PACKAGE in said
        outcome: Outcome = "user_error" if again or is_images else "crashed"
        return replace(facts, outcome=outcome, why=f"no agent came up in the container: {said}")

    def _cause_and_outcome(self, attempt: int | None) -> tuple[StopCause | None, Outcome]:
        """What asked for the stop and how the ranks ended, from what they left behind."""
        left = {} if attempt is None else read_outcome(self._run, attempt)
        asked = self._end.last(kinds.StopRequested, attempt)
        named = left.get("cause") or (asked and asked.cause)
        cause = named or (StopCause.TERM if self._start.term else None)
        end = self._end.last(kinds.AttemptEnded, attempt)
        outcome: Outcome = "killed" if cause else "crashed"
        if left.get("outcome") in {"done", "stopped"}:
            outcome = left["outcome"]
        elif cause is None and end is not None:
            outcome = BY_REASON.get(end.reason, outcome)  # the agent saw it, but could not ask
        return cause, outcome

    def _take_attempt(self) -> int | None:
        """A number for a start in which no agent came so far, so that it counts and can be seen.

        None where there is no room for it.
        """
        start = self._start
        try:
            taken = take_attempt(self._run, job_id=start.job_id, restarts=start.restarts)
        except OSError as error:
            log.warning("this start is not counted: %s", error)
            return None
        begun = start_without_ranks(
            self._run, taken, by="batch", nodes=start.nodes, job_started=start.start_time
        )
        self._end.add(begun, taken.number)
        return taken.number

    def _exit_code(self, attempt: int | None, reason: EndReason, following: Next) -> int:
        """The job's exit code, where it is not to be requeued any more."""
        if following is not Next.STOP:
            return 0
        stopped = self._end.last(kinds.RunStopped, attempt)
        if stopped is not None:
            return stopped.exit_code or 1
        return 0 if reason in {EndReason.COMPLETED, EndReason.STOPPED} else 1
