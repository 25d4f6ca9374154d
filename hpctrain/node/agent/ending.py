"""The end of an attempt as node 0's agent sees it, once the ranks have left.

It asks the scheduler what is meant and decides with `plan.decide.decide_end`, as the batch script
does (`batch_side.py`) where no agent is left; both write and carry out by `end_writer.EndWriter`.
tests/unit/agent/test_ending.py, test_full_disk.py and test_convictions.py and
tests/slurm/test_requeue_path.py and test_convicted_node.py hold the promises.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.preflight.report import bad_nodes_path, read_bad, record_bad
from hpctrain.core.base import clock
from hpctrain.core.base.records import DESYNC, HANG, EndReason, Next, StopCause
from hpctrain.errors import ClusterError, FileSystemFault, NotWritten
from hpctrain.ledger.history.run_state import NOT_THE_USERS, UNFIT, EndCause, cause_in
from hpctrain.ledger.plan.decide import (
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
from hpctrain.ledger.run import event_types as kinds
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import IMPORT, read_fence
from hpctrain.node.agent.end_writer import EndWriter, is_replaced, read_outcome
from hpctrain.node.agent.notify import Incidents, notify
from hpctrain.node.agent.ranks import is_echo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.cluster.scheduler.base import JobControl
    from hpctrain.core.base.records import FailureReport, JobContext, JobFacts
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.errors import CheckpointError
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.rounds import RoundEnd
    from hpctrain.node.agent.stop_deadline import StopDeadline

log = logging.getLogger("hpctrain.agent")
ASSERTED = "device-side assert"
"""A CUDA error that a program makes by itself, as by an index out of range."""
SPARE_END_S = 60.0
"""A job that pauses must be requeued before its time is over."""


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
        self.excluded_nodes = ExcludedNodes(run, spec.settings, context)
        self._end_of: int | None = 0
        self.pause_s = 0.0
        self.seen_step: Callable[[], int | None] = lambda: None  # of this node's ranks

    def ask(self) -> JobFacts:
        """What the scheduler says of our job; raises `ClusterUnreachable` where it is silent."""
        return self._control.facts()

    def is_over(self) -> str:
        """Why this job must not run, or "": an older submission's job would be a second writer.

        A job that has ended the run does not start again either.
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
        """Write down the end of an attempt that could not do so itself."""
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
        lost = [a for a in attempts if (a.job_id, a.restarts) == own[1:] and is_replaced(a)]
        if len(again) - len(lost) >= self._settings.run.restarts_in_job:
            return False
        if failure is not None and failure.kind == HANG and self._came_to_end(attempt, failure):
            return False
        outcome, why = self._crash_kind(attempt, failure), failure.summary if failure else ""
        facts = self._facts(attempt, outcome, why=why, in_place=True)
        decision = decide_end(facts, self._end.history, self._settings.budget)
        if decision.next is not Next.RESTART or self._is_left_behind(attempt):
            return False
        if not self.excluded_nodes.are_out(self._end.history):
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
        """Whether the job continues or has ended without us: a dead node's agent may live on."""
        if not self._is_current(attempt):
            return True
        facts = self._ask()  # None: nobody can tell; where a successor begins, the fence stops us
        return facts is not None and self._is_gone(facts)

    def _is_gone(self, facts: JobFacts) -> bool:
        """Whether the job runs again without this start, or not at all."""
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
        """End an attempt with unfit nodes, run the job again without them; return the exit code."""
        why = UNFIT + "; ".join(f"{node}: {text}" for node, text in bad.items())
        facts = self._facts(attempt, "crashed", why=why, nodes_failed=True)
        return self._decide(facts, exclude=list(bad))

    def end_without_shared_folder(self, attempt: int, why: str) -> int:
        """End an attempt whose nodes share no directory; none follows until that is repaired.

        Return the exit code of the task.
        """
        return self._decide(self._facts(attempt, "storage_failed", why=why, needs_repair=True))

    def end_without_resume(self, attempt: int, error: CheckpointError) -> int:
        """End an attempt that cannot resume, though its run has saved; return the exit code."""
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
        before = self._end.last(kinds.AttemptEnded, facts.attempt)
        if before is not None and before.next not in {Next.RESTART, Next.ASK_BATCH}:
            log.warning("attempt %s has been ended by another agent", facts.attempt)
            return 0
        decision = decide_end(facts, history, self._settings.budget)
        self._record_failure(facts.attempt, failure)
        named = self.excluded_nodes.keep_out(history)
        recorded, _ = self._end.carry_out(facts, decision, exclude=[*exclude, *named])
        if decision.next is Next.STOP and not recorded:
            return EXIT_STOPPED  # all that the batch side has to tell it from a start that failed
        return decision.exit_code

    def _is_current(self, attempt: int) -> bool:
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
            if deadline.is_stop_requested() or left.get("cause") is not None:
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
        reports_steps = own is not None and own.highest_step is not None
        return reports_steps and self._end.last(kinds.TrainingDone, attempt) is None

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
        if own is None or own.reports_steps:
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
        self._incidents.notify(fact, attempt)

    def _crash_kind(self, attempt: int, failure: FailureReport | None) -> Outcome:
        if read_outcome(self._run, attempt).get("outcome") == "failed":
            return "user_error"
        if failure is None or failure.kind in {"signal", HANG, DESYNC} or is_echo(failure):
            return "crashed"
        cause = None if ASSERTED in failure.summary else cause_in(failure.summary)
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


def nodes_to_exclude(history: RunHistory, least: int) -> dict[str, str]:
    """Nodes that were named at least so often since they were last left out, each with why."""
    named: dict[str, list[str]] = {}
    for node, what in history.suspicions:
        named.setdefault(node, []).append(what)
    return {
        node: f"guards named it {len(what)} times: {'; '.join(dict.fromkeys(what))}"
        for node, what in named.items()
        if len(what) >= least
    }


class ExcludedNodes:
    """What is done about such nodes in a job.

    Attributes:
        leave_out: Leaves nodes, each with why, out of all further rounds of this job. Returns
            whether the next round is without them. By itself a round takes all nodes of the job, so
            this is True only for nodes of other jobs.
    """

    def __init__(self, run: RunDir, settings: Settings, context: JobContext) -> None:
        """Nothing is done yet."""
        self._run, self._settings, self._context = run, settings, context
        self.leave_out: Callable[[Mapping[str, str]], bool] = lambda bad: (
            not bad.keys() & set(context.nodes)
        )

    def are_out(self, history: RunHistory) -> bool:
        """Whether the next round here is without such nodes: there are none, or others continue."""
        bad = self.keep_out(history)
        return not bad or self.leave_out(bad)

    def keep_out(self, history: RunHistory) -> dict[str, str]:
        """Write such nodes into the run's list; return those that are new, each with why.

        Return none if that would leave no node of the job, or if all nodes are this machine.
        """
        least, context = self._settings.guard.convict, self._context
        if not least or context.on_this_machine:
            return {}
        path = bad_nodes_path(self._run)
        bad = nodes_to_exclude(history, least)
        if not bad or not set(context.nodes) - bad.keys():
            return {}
        listed = read_bad(path)
        new = {node: why for node, why in bad.items() if node not in listed}
        try:
            record_bad(path, new)
        except OSError as error:
            log.warning("bad nodes could not be written down: %s", error)
        for node, why in new.items():
            log.warning("%s is left out from now on: %s", node, why)
        return bad
