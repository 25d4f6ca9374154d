"""Decide what a job's end means and what follows: why it is stopped, whether the run starts again.

`decide_end` is given what the observer of an end knows: node 0's agent, the next attempt's, or the
batch side. `decide` is the table of ends in it. A job that exits 0 inside its grace time is
COMPLETED and never comes back, or comes back by itself (SLURM since 24.05). Only the scheduler
knows which it is, so its facts come in as an argument.

`over_budget` holds the budgets, one for each cause: a single counter would let preemptions use up
the budget for crashes.

`is_users` tells an error that comes at every start from a crash; docs/staying-alive.md has the
rule. A script that knows nothing of hpctrain reports no steps: then time decides.

Pure. tests/unit/plan/test_decide.py, test_budget.py and test_user_error.py hold the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from hpctrain.core.base.records import NODE_DOWN, EndReason, JobState, Next, StopCause
from hpctrain.core.settings.schema import BudgetSettings
from hpctrain.ledger.history.progress import startup_s
from hpctrain.ledger.history.run_state import WITHOUT_A_STEP, cause_of

if TYPE_CHECKING:
    from hpctrain.core.base.records import JobFacts
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord

Outcome = Literal["done", "stopped", "killed", "crashed", "storage_failed", "user_error"]
"""How the ranks ended: the program returned; saved and left after a stop request; killed because
they did not leave in time; a rank died; the file system refused; the program raised before it had
done a step."""

BY_REASON: dict[str, Outcome] = {
    EndReason.STORAGE_FAILED: "storage_failed",
    EndReason.USER_ERROR: "user_error",
}
"""What the failure of a rank was to its attempt, where it is more than a crash."""
_BY_OUTCOME = {outcome: EndReason(reason) for reason, outcome in BY_REASON.items()}

ENDED_FOR_GOOD = frozenset(
    {JobState.CANCELLED, JobState.COMPLETED, JobState.FAILED, JobState.TIMED_OUT}
)
EXIT_STOPPED = 93
_LIMITS = {
    EndReason.PREEMPTED: "preemptions",
    EndReason.REQUEUED: "preemptions",
    EndReason.TIMED_OUT: "time_limits",
    EndReason.NODE_FAILED: "nodes",
    EndReason.CRASHED: "crashes",
    EndReason.STORAGE_FAILED: "storage",
    EndReason.USER_ERROR: "crashes",
    EndReason.UNKNOWN: "crashes",
}
IN_MEMORY = frozenset({"memory", "peer", "will"})
"""Where a state came from that was on no disk. Ledgers from before 28 November 2026 have `will`."""
LONG_S = 300.0
"""A program that raises later than this after its start has come to its work."""
SOON_S = 20.0
"""One that tells nothing and raises later than this may have: the next start shows it."""
FIRST_PAUSE_S = 1.0
"""Before the second restart inside a job of one cause; twice as long before each one more."""


@dataclass(frozen=True)
class EndFacts:
    """What an observer knows of an attempt's end.

    Attributes:
        by: Who: node 0's agent, the batch side, or the agent of the next attempt.
        job_id: The observer's job.
        restarts: Which start of that job.
        attempt: The attempt; None for a start in which no agent came so far.
        cause: What asked them to stop; None where nothing did.
        scheduler: What the scheduler says of the job; None where it was not or could not be asked.
        step: The step that it told of last; None where it told of none.
        seen_step: The step that its ranks were seen at last; None where nobody looked.
        nodes_failed: Nodes died or are not fit, so that a crash is theirs.
        needs_repair: Every start would meet what the file system did to this one.
        in_place: The ranks can start again in this allocation.
        has_successor: The job runs again, or may already: no budget can hold that back.
        ended_at: When the scheduler says that it ended, seconds since the epoch.
    """

    by: Literal["agent", "batch", "successor"]
    job_id: str
    restarts: int
    attempt: int | None
    outcome: Outcome = "killed"
    cause: StopCause | None = None
    scheduler: JobFacts | None = None
    why: str = ""
    step: int | None = None
    seen_step: int | None = None
    nodes_failed: bool = False
    needs_repair: bool = False
    in_place: bool = False
    has_successor: bool = False
    ended_at: float | None = None


@dataclass(frozen=True)
class EndDecision:
    """What an end is called and what follows.

    Attributes:
        exit_code: Of the task that decided; what the job ends with where the run is stopped.
        stopped: Why the run does not continue, though the attempt's end alone would let it; ""
            else.
    """

    reason: EndReason
    next: Next
    exit_code: int = 0
    stopped: str = ""


def decide_end(
    facts: EndFacts, history: RunHistory, budget: BudgetSettings | None = None
) -> EndDecision:
    """Why an attempt ended and what follows: the table, what a user wishes, and the budgets.

    An end of the same attempt that stands in the history does not count.
    """
    reason, following = decide(facts.scheduler, facts.restarts, facts.cause, facts.outcome)
    if facts.nodes_failed and reason is EndReason.CRASHED:
        reason = EndReason.NODE_FAILED
    if facts.needs_repair and reason is EndReason.STORAGE_FAILED:
        return EndDecision(reason, Next.STOP, EXIT_STOPPED, facts.why)
    if following is Next.STOP:
        is_users = reason is EndReason.USER_ERROR
        return EndDecision(reason, following, *((1, facts.why) if is_users else ()))
    if facts.job_id in history.to_end:
        return EndDecision(EndReason.CANCELLED, Next.STOP)
    if not facts.has_successor:
        why = over_budget(history, reason, budget, attempt=facts.attempt)
        if why:
            return EndDecision(reason, Next.STOP, EXIT_STOPPED, why)
    if facts.in_place and reason in {EndReason.CRASHED, EndReason.NODE_FAILED}:
        following = Next.RESTART
    return EndDecision(reason, following)


def decide(  # noqa: PLR0911 - a decision table: each return is one of its rows
    facts: JobFacts | None, own_restarts: int, cause: StopCause | None, outcome: Outcome
) -> tuple[EndReason, Next]:
    """Why the attempt ended and what follows.

    `facts` is None when the scheduler could not be asked. `own_restarts` is the restart count with
    which this attempt was started. `cause` is None where nothing asked for a stop (a crash, or a
    program that returned).
    """
    if outcome == "done":
        return EndReason.COMPLETED, Next.STOP
    if cause is StopCause.USER:
        return EndReason.STOPPED, Next.STOP
    if facts is None:
        return _guess(cause, outcome), Next.ASK_BATCH
    if is_requeued(facts, own_restarts):
        return _of_requeue(facts), Next.LEAVE
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


def _of_requeue(facts: JobFacts) -> EndReason:
    """Why a job is run again that the scheduler has put back by itself."""
    if facts.held:  # by a person: no preemption holds what it puts back
        return EndReason.REQUEUED
    return EndReason.NODE_FAILED if facts.reason == NODE_DOWN else EndReason.PREEMPTED


def is_ending(facts: JobFacts) -> bool:
    """Whether the job is on its way out."""
    return facts.state == JobState.COMPLETING or facts.state in ENDED_FOR_GOOD


def is_requeued(facts: JobFacts, own_restarts: int) -> bool:
    """Whether the scheduler has already decided to run this job again."""
    if (
        facts.state == JobState.CANCELLED
    ):  # cancelled while it was being requeued: it stays cancelled
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
    return facts.state == JobState.COMPLETING and facts.reason != "TimeLimit"


def _guess(cause: StopCause | None, outcome: Outcome) -> EndReason:
    if cause in {StopCause.CLOCK, StopCause.WARNING}:
        return EndReason.TIMED_OUT
    if cause in {StopCause.TERM, StopCause.INTERRUPT}:
        return EndReason.PREEMPTED
    return _BY_OUTCOME.get(outcome, EndReason.CRASHED)


def over_budget(
    history: RunHistory,
    reason: EndReason,
    budget: BudgetSettings | None = None,
    *,
    attempt: int | None = None,
) -> str:
    """Why the run may not start again; "" where one more attempt is within the budgets.

    An end of `attempt` that is on record already does not count.
    """
    budget = budget or BudgetSettings()
    name = _LIMITS.get(reason)
    if name is not None:
        others = [why for number, why in history.ends_since_resume if number != attempt]
        used = 1 + sum(_LIMITS.get(other) == name for other in others)
        limit: int = getattr(budget, name)
        if limit and used > limit:
            return f"{used} attempts ended by {reason.value}, budget.{name} is {limit}"
    idle = attempts_without_progress(history)
    if budget.no_progress and idle >= budget.no_progress:
        return f"{idle} attempts {WITHOUT_A_STEP} (budget.no_progress is {budget.no_progress})"
    return ""


def attempts_without_progress(history: RunHistory) -> int:
    """How many attempts in a row, counted from the newest, kept no new step.

    A step is kept that was committed to disk, or that a later attempt resumed from in the nodes'
    memory.

    Only attempts whose ranks reached the restore count: one that the scheduler took away before
    that has cost next to nothing, and a script that tells nothing of its steps cannot be judged by
    them. One that saves for itself has come on where it begins at a later step than before.
    """
    newest, idle = 0, 0
    for attempt in since_resume(history):
        begun = attempt.restored_step or 0
        # So an earlier one has saved that for itself, or the nodes' memory has kept it.
        if begun > newest and (attempt.own_loop or attempt.read_from in IN_MEMORY):
            idle = 0
        newest = max(newest, begun)
        saved = max((save.step or 0 for save in attempt.saves), default=0)
        if saved > newest or any(save.step is None for save in attempt.saves):
            newest, idle = max(saved, newest), 0
        elif attempt.restored is not None or _had_time_to_seal(attempt):
            idle += 1
    return idle


def _had_time_to_seal(attempt: AttemptRecord) -> bool:
    """Of a run that has sealed: nothing tells when its program has loaded what it was given."""
    began, until = attempt.started, _end_of(attempt)
    return attempt.resumed is not None and began is not None and until - began >= LONG_S


def since_resume(history: RunHistory) -> list[AttemptRecord]:
    """The attempts since the last submit or resume: a person who resumes starts a new budget.

    One whose end alone was written since then is not among them.
    """
    return [attempt for attempt in history.attempts if attempt.resume == history.resumes]


def is_users(
    history: RunHistory, attempt: int, error: str, now: float, step: int | None = None
) -> bool:
    """Whether what an attempt raised would come at every start.

    It is not where the attempt came to its work, or an earlier one did since somebody last
    submitted or resumed the run; but the same error at two starts in a row is, where neither did a
    step, or both raised it at the same one.

    `error` is what it raised, in a line; `step` is the last one that its ranks were seen at, None
    where they reported none.
    """
    own = history.attempt(attempt)
    earlier = [one for one in since_resume(history) if one.number < attempt]
    if step and earlier and earlier[-1].failure is not None:
        before = earlier[-1].end_step, earlier[-1].failure.summary
        if before == (step, error):
            return True
    if own is not None and _came_to_work(own, now):
        return False
    seconds = 0.0 if own is None or own.started is None else now - own.started
    startups = [s for one in earlier if (s := startup_s(one)) is not None]
    if startups and seconds > max(startups):
        return False
    worked = [_came_to_work(one, _end_of(one)) for one in earlier]
    failure = earlier[-1].failure if earlier and not worked[-1] else None
    if failure is not None and failure.summary == error:
        return True
    # Nobody can say what a program did that knows nothing of hpctrain: the next start will.
    is_silent = own is not None and not own.initialised
    return not any(worked) and not (is_silent and seconds >= SOON_S)


def restart_pause_s(history: RunHistory, attempt: int, longest_s: float) -> float:
    """Seconds to wait before ranks that crashed start again in their allocation.

    None the first time: what passes by itself has passed, and what does not comes again at once.

    The history has this attempt's end.
    """
    own = history.attempt(attempt)
    if own is None or longest_s <= 0:
        return 0.0
    before = takewhile(
        lambda one: one.next is Next.RESTART and cause_of(one) is cause_of(own),
        reversed([one for one in history.attempts if one.number < attempt]),
    )
    again = min(sum(1 for _ in before), 30)
    return min(FIRST_PAUSE_S * float(1 << again - 1), longest_s) if again else 0.0


def _came_to_work(attempt: AttemptRecord, until: float) -> bool:
    """The first step mark comes up to a minute after the step."""
    if attempt.first_step is not None or attempt.saves:
        return True
    return attempt.started is not None and until - attempt.started >= LONG_S


def _end_of(attempt: AttemptRecord) -> float:
    """Its successor may write that hours later."""
    moments = (attempt.witnessed, attempt.ended_at, attempt.heard)
    return next((t for t in moments if t is not None), -math.inf)
