"""The end of a start of the job as its batch script sees it, when all agents are gone.

It carries out what the agent could not (no scontrol in a container, killed too early), and decides
where no agent was left to do it. Standard library only, so that it starts at once: KillWait is
short. tests/unit/agent/test_batch_side.py, test_full_disk.py and test_predecessors.py hold the
promises, and tests/slurm/test_requeue_path.py and test_after.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.files import follow_folder
from hpctrain.core.base.records import EndReason, Next, StopCause
from hpctrain.errors import ClusterError, UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState
from hpctrain.ledger.plan.decide import (
    BY_REASON,
    EXIT_STOPPED,
    EndFacts,
    Outcome,
    decide_end,
    is_requeued,
    since_resume,
)
from hpctrain.ledger.run import event_types as kinds
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import HeldBack
from hpctrain.ledger.run.fence import look_anew, read_fence, start_without_ranks, take_attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import job_spec
from hpctrain.node.agent.end_writer import EndWriter, read_outcome
from hpctrain.node.agent.notify import SPARE_S, notify, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

    from hpctrain.cluster.scheduler.base import JobControl

log = logging.getLogger("hpctrain.agent")
EXIT_TRY_LATER = 75
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 900.0
"""Before a requeue that could not be written down; twice as long each time: no crash loop."""
SPARE_END_S = 60.0
"""A job that pauses must be requeued before its time is over."""
UNREAD_S, READ_AGAIN_S = 60.0, 2.0
"""How long a file system is waited for that does not give the ledger, and how often it is asked."""
NO_PACKAGE = "No module named 'hpctrain'"
"""Python's words in an image without us."""


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
    side.wait_notified()
    return code


def _without_ledger(
    start: JobStartFacts, control: JobControl, sleep: Callable[[float], None]
) -> int:
    """Requeue if the scheduler's state calls for it; a run that was over ends at its next start."""
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
        self._notifying: subprocess.Popen[bytes] | None = None
        self._notify_s = 0.0

    def finish(self) -> int:
        """Do what is still to be done, and begin to tell of it; returns the job's exit code."""
        code = self._finish()
        self._forbid_requeue()
        try:
            self._notify()
        except Exception as error:  # noqa: BLE001 - news are worth less than the job's exit code
            log.warning("nobody is notified: %s", error)
        return code

    def wait_notified(self) -> None:
        """Let those hear who are to be notified, where what we have started dies with us.

        As long as [notify] allows where the run is over, else for moments: the job's next start
        waits for us.
        """
        wait_for(self._notifying, self._notify_s)

    def _notify(self) -> None:
        attempt = self._attempt()
        if attempt is not None:
            settings = job_spec(self._run).settings.notify
            self._notifying = notify(self._run, settings, attempt)
            end = self._end.last(kinds.AttemptEnded, attempt)
            over = end is not None and end.next is Next.STOP
            self._notify_s = (2 * settings.timeout_s if over else 0.0) + SPARE_S

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
        """Keep the scheduler from running the job again; a start that comes anyway ends itself."""
        end = self._end.last(kinds.AttemptEnded, self._attempt())
        over = end is not None and end.next is Next.STOP
        if not (over or self._has_left() or self._has_stopped()):
            return
        try:
            self._control.forbid_requeue()
        except ClusterError as error:
            log.warning("the run is over; the job may start once more and end at once: %s", error)

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
        """Whether the run continued without this job: then this job ends and requeues nothing."""
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
        """What is known of a start whose script ended before its srun."""
        earlier = since_resume(self._end.history)
        came_further = bool(earlier) and earlier[-1].by != "batch"
        outcome: Outcome = "crashed" if came_further else "user_error"
        return replace(facts, outcome=outcome, why=self._start.ended_early)

    def _of_container(self, facts: EndFacts, said: str) -> EndFacts:
        """What is known of a start in a container in which no agent came; nothing ended it."""
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
        """Number a start without agents so that it counts and is seen; None if there is no room."""
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


def held_back(run: RunDir, after: Sequence[str], job_id: str) -> str:
    """Return why a job of the run must not begin, and write that down; "" if it may.

    A run whose ranks were started once continues, whatever became of its predecessors since.
    `after` has their directories.

    Raises:
        OSError: a ledger cannot be read.
    """
    if not after or RunHistory.read(run, marks="few").has_begun:
        return ""
    why = next(filter(None, (_unfinished(run, RunDir(Path(path))) for path in after)), "")
    if why:
        log.error("job %s of %s does not begin: %s", job_id, run.name, why)
        ledger.record(run, HeldBack(job_id=job_id, why=why))
    return why


def _unfinished(run: RunDir, predecessor: RunDir) -> str:
    """Why the predecessor counts as not done, and what to do, or ""."""
    look_anew(predecessor.root)
    phase = RunHistory.read(predecessor, marks="few").state.phase
    if phase is RunState.DONE:
        return ""
    resume, itself = (f"`hpctrain resume {one.typed}`" for one in (predecessor, run))
    to_run = f"it is to run after {predecessor.name}"
    if not predecessor.root.is_dir():
        return f"{to_run}, and {predecessor.root} is not there any more: submit it anew"
    if phase in OVER or phase is RunState.CREATED:
        return f"{to_run}, which is {phase.value} and not done: {resume}, then {itself}"
    return f"{to_run}, which is {phase.value}: {itself} has it wait"
