"""What ended an attempt of a run, or keeps a live one: its ledger and its logs together. Pure.

The ledger knows what no log says: what the scheduler did, what the detectors of hangs and guards
found, which rank failed first. Logs know why a program died. `case_of` names the logs to read,
`diagnose` judges. tests/unit/doctor/test_of_run.py holds the promises.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.doctor.faults import KNOWLEDGE, OF_CAUSE, Certainty, FaultKind
from hpctrain.advise.doctor.judge import Diagnosis, judge
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.advise.doctor.sighting import LogFacts, Sighting
from hpctrain.advise.doctor.signature import Role
from hpctrain.core.base.records import Next
from hpctrain.core.base.text import count, fold_ranks
from hpctrain.ledger.history.causes import WITHOUT_A_STEP, EndCause
from hpctrain.ledger.history.reported import reported
from hpctrain.ledger.history.run_state import RunState
from hpctrain.ledger.run.event_types import HangFound
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.run_history import RunHistory

LEDGER = RunDir(Path()).events.name
OF_PROGRAM = frozenset(
    {
        EndCause.GPU_ERROR,
        EndCause.GPU_OOM,
        EndCause.HOST_OOM,
        EndCause.NCCL_ERROR,
        EndCause.DATA_WORKER,
        EndCause.NAN,
        EndCause.STORAGE_FULL,
        EndCause.STORAGE_ERROR,
        EndCause.USER_ERROR,
        EndCause.CRASHED,
        EndCause.UNKNOWN,
    }
)
"""Causes that the ledger has read from words too, so that logs may know better."""
_FROM_OUTSIDE = frozenset(
    {EndCause.PREEMPTED, EndCause.WALLTIME, EndCause.REQUEUED, EndCause.NODE_FAIL}
)
"""Causes that are no fault of the run's: a run that was stopped behind them has another reason."""
_WEAK = frozenset({EndCause.NCCL_ERROR, EndCause.USER_ERROR, EndCause.CRASHED, EndCause.UNKNOWN})
"""Causes that something finer may stand behind."""


def diagnose(
    attempt: AttemptView,
    logs: Sequence[LogFacts],
    history: RunHistory,
    *,
    state: RunState = RunState.RUNNING,
) -> Diagnosis:
    """What ended an attempt; of one that runs, what keeps it.

    Args:
        attempt: The attempt.
        logs: What was read of its logs.
        history: The run's.
        state: Where the run stands: an attempt without an end need not run.
    """
    facts = [*_without_requeues(logs, attempt), _of_failure(attempt)]
    if attempt.reason is None and attempt.ended is None:
        return _of_unended(attempt, facts, history, state)
    cause = attempt.cause or EndCause.UNKNOWN
    kind = OF_CAUSE[cause]
    record = history.attempt(attempt.number)
    stopped = (record.stopped_for_good if record is not None else None) or ""
    if cause in _FROM_OUTSIDE and WITHOUT_A_STEP in stopped:
        return _of_idle(attempt, facts, stopped)
    if cause not in OF_PROGRAM:
        return _with_what_follows(
            _by_ledger(attempt, kind, facts, Certainty.CERTAIN), attempt, history
        )
    judged = judge(facts, attempt.world_size or None)
    follows = cause is EndCause.CRASHED and _is_told_by_the_ledger(attempt, judged)
    is_weak = cause in _WEAK and judged.certainty.rank <= Certainty.POSSIBLE.rank
    if judged.kind is kind or kind is FaultKind.UNKNOWN or (is_weak and not follows):
        return judged
    is_told = cause not in _WEAK
    certainty = Certainty.LIKELY if is_told else Certainty.POSSIBLE
    if is_told and judged.certainty is Certainty.CERTAIN:
        return replace(judged, certainty=Certainty.LIKELY, why=_differs(cause, judged))
    return _by_ledger(attempt, kind, facts, certainty)


def _without_requeues(logs: Sequence[LogFacts], attempt: AttemptView) -> list[LogFacts]:
    """Leave out that the job was requeued, where the ledger knows why the attempt ended.

    SLURM's line in the log is then the requeue that hpctrain has asked for, or its own of a
    preemption.
    """
    if attempt.cause in {None, EndCause.REQUEUED, EndCause.UNKNOWN}:
        return list(logs)
    kept = [[s for s in log.sightings if s.kind is not FaultKind.REQUEUED] for log in logs]
    return [replace(log, sightings=sightings) for log, sightings in zip(logs, kept, strict=True)]


def _with_what_follows(
    diagnosis: Diagnosis, attempt: AttemptView, history: RunHistory
) -> Diagnosis:
    """What to do after an end from outside; the general advice is to use hpctrain."""
    if attempt.cause not in _FROM_OUTSIDE:
        return diagnosis
    record = history.attempt(attempt.number)
    stuck = record.stuck if record is not None else None
    if stuck is not None:
        return replace(
            diagnosis,
            headline=f"{diagnosis.headline}; the job could not be requeued: {stuck}",
            do=("`hpctrain resume RUN` continues in a new job",),
        )
    if attempt.next not in {Next.REQUEUE, Next.LEAVE}:
        return diagnosis
    do = ["nothing: the job was requeued and the run continues"]
    if reported(history).is_silent:
        do.append(
            "the program reported no step and no checkpoint: see that it loads its newest "
            "checkpoint when it starts (`hpctrain logs RUN`)"
        )
    return replace(diagnosis, do=tuple(do))


def _is_told_by_the_ledger(attempt: AttemptView, judged: Diagnosis) -> bool:
    """Whether what the logs say is no more than that a rank died, which the ledger says better.

    Its connections break in the others' logs, if these get to say so before they are ended, and
    its agent says by which signal: else the verdict would hang on who was quicker.
    """
    if judged.kind is FaultKind.TRANSPORT:
        return True
    return attempt.failure is not None and judged.kind is FaultKind.HOST_OOM


def _differs(cause: EndCause, judged: Diagnosis) -> str:
    return f"the ledger says {cause}, the logs {judged.kind}: what the logs say comes first in time"


def _by_ledger(
    attempt: AttemptView, kind: FaultKind, logs: Sequence[LogFacts], certainty: Certainty
) -> Diagnosis:
    """What the ledger says, with what the logs add."""
    judged = judge(logs, attempt.world_size or None)
    words = _words(attempt)
    event = Sighting(
        "attempt_ended",
        kind,
        Role.CAUSE,
        certainty,
        f"attempt {attempt.number} ended: {attempt.cause}{words}",
        LEDGER,
        rank=attempt.failure.rank if attempt.failure is not None else None,
        node=attempt.failure.node if attempt.failure is not None else "",
    )
    same = [s for log in logs for s in log.sightings if s.kind is kind][:3]
    title = KNOWLEDGE[kind].title
    follow_ons = judged.follow_ons if judged.kind is kind else ()
    ruled_out = tuple(r for r in judged.ruled_out if kind is not judged.kind or r.why)
    return Diagnosis(
        kind,
        certainty,
        f"{title}{words}",
        "the scheduler, or hpctrain's own detectors, say so" if not same else "",
        (event, *same),
        follow_ons,
        tuple(r for r in ruled_out if "follows" not in r.why),
        _do(kind, attempt),
        lines=judged.lines,
        logs=judged.logs,
    )


def _words(attempt: AttemptView) -> str:
    """The ledger's own words on the end, as far as they say more than its cause."""
    if attempt.hang is not None and attempt.cause in {EndCause.HANG, EndCause.DESYNC}:
        return f": {attempt.hang.summary}"
    if attempt.failure is not None and attempt.failure.summary:
        rank = attempt.failure.rank
        who = "" if rank is None else f"rank {rank}: "
        return f": {who}{attempt.failure.summary}"
    if attempt.awaited is not None and attempt.cause is EndCause.HUNG_END:
        return f": {fold_ranks(attempt.awaited.left)} had not ended"
    detail = attempt.detail
    return f": {detail}" if detail and detail != attempt.reason else ""


def _do(kind: FaultKind, attempt: AttemptView) -> tuple[str, ...]:
    steps = KNOWLEDGE[kind].do
    if kind is FaultKind.CODE and attempt.failure is not None and attempt.failure.kind == "exit":
        return ("`hpctrain logs RUN` shows what the program said before it left with this code",)
    node = attempt.failure.node if attempt.failure is not None else ""
    return tuple(step.replace("NODE", node) if node else step for step in steps)


def _of_failure(attempt: AttemptView) -> LogFacts:
    """What the ledger's failure says, read as if it stood in a log."""
    failure = attempt.failure
    if failure is None:
        return LogFacts(LEDGER)
    scanner = LogScanner(f"{LEDGER} (failure)", failure.rank)
    text = f"{failure.traceback.rstrip()}\n" if failure.traceback else ""
    if failure.summary and failure.summary not in failure.traceback:
        text += f"{failure.summary}\n"
    scanner.feed(text.encode())
    facts = scanner.finish()
    facts.sightings = [replace(s, line=0, node=s.node or failure.node) for s in facts.sightings]
    return facts


def _of_idle(attempt: AttemptView, logs: Sequence[LogFacts], stopped: str) -> Diagnosis:
    """Nothing is broken, but what was done between two ends was never saved."""
    diagnosis = _by_ledger(attempt, FaultKind.NO_PROGRESS, logs, Certainty.CERTAIN)
    title = KNOWLEDGE[FaultKind.NO_PROGRESS].title
    words = f"{title}: {stopped}; the last of them: {attempt.cause}"
    return replace(diagnosis, headline=words, why="the ledger says why the run was stopped")


def _of_unended(
    attempt: AttemptView, logs: Sequence[LogFacts], history: RunHistory, state: RunState
) -> Diagnosis:
    if state in {RunState.COMPLETING, RunState.CANCELLED}:
        return _of_cancelled(attempt, logs)
    if state is RunState.SUSPENDED:
        return _of_suspended(attempt, logs)
    return _of_live(attempt, logs, history, runs=state is RunState.RUNNING)


def _of_cancelled(attempt: AttemptView, logs: Sequence[LogFacts]) -> Diagnosis:
    """Nothing is broken: the scheduler ends the processes of the last attempt."""
    words = f"the run was cancelled; the scheduler ends the processes of attempt {attempt.number}"
    do = ("nothing; `hpctrain status RUN` says when they have ended",)
    return replace(
        judge(logs, attempt.world_size or None),
        kind=FaultKind.CANCELLED,
        certainty=Certainty.CERTAIN,
        headline=words,
        why="`hpctrain cancel` stands in the ledger, and no end of the attempt",
        evidence=(),
        do=do,
    )


def _of_suspended(attempt: AttemptView, logs: Sequence[LogFacts]) -> Diagnosis:
    last = attempt.last_step
    where = f" at step {last:,}" if last is not None else ""
    return replace(
        judge(logs, attempt.world_size or None),
        kind=FaultKind.RUNNING,
        certainty=Certainty.CERTAIN,
        headline=f"the scheduler has suspended the job; attempt {attempt.number} stands{where}",
        why="the scheduler says so",
        evidence=(),
        do=("nothing: the attempt continues as the scheduler resumes the job",),
    )


def _of_live(
    attempt: AttemptView, logs: Sequence[LogFacts], history: RunHistory, *, runs: bool
) -> Diagnosis:
    """What holds up an attempt that runs; nothing where it goes on.

    Args:
        attempt: The attempt; it has no end.
        logs: What was read of its logs.
        history: The run's.
        runs: Else its job is gone, or waits for another start.
    """
    if attempt.hang is not None:
        return _of_hang(attempt, logs)
    judged = judge(logs, attempt.world_size or None)
    if judged.kind is not FaultKind.UNKNOWN:
        certainty = max(judged.certainty, Certainty.LIKELY, key=lambda sure: sure.rank)
        why = "its logs say so; the attempt has not ended by its ledger"
        return replace(judged, certainty=certainty, why=why)
    last = attempt.last_step
    where = f" at step {last:,}" if last is not None else ""
    if not runs:
        words = f"attempt {attempt.number} stopped{where} without a word, and does not run any more"
        return replace(judged, headline=words)
    kind, certainty = FaultKind.RUNNING, Certainty.LIKELY
    if attempt.straggler is not None:
        return replace(
            judged,
            kind=kind,
            certainty=certainty,
            headline=f"it runs, slowed down: {attempt.straggler.summary}",
            do=("`hpctrain status RUN --ranks` shows who is slow; `hpctrain stacks RUN` where",),
        )
    spikes = f"; {count(history.spikes, 'spike')} were told" if history.spikes else ""
    words = f"attempt {attempt.number} runs{where}; nothing is known to be wrong{spikes}"
    return replace(judged, kind=kind, certainty=certainty, headline=words, do=KNOWLEDGE[kind].do)


def _of_hang(attempt: AttemptView, logs: Sequence[LogFacts]) -> Diagnosis:
    hang = attempt.hang
    if hang is None:  # pragma: no cover - the caller has looked
        return judge(logs)
    is_desync = hang.kind_of in {"mismatch", "deadlock"}
    kind = FaultKind.DESYNC if is_desync else FaultKind.HANG
    is_found = isinstance(hang, HangFound)
    certainty = Certainty.CERTAIN if is_found else Certainty.LIKELY
    event = Sighting(
        "hang" if is_found else "hang_suspected",
        kind,
        Role.WAIT,
        certainty,
        hang.summary,
        LEDGER,
        rank=hang.ranks[0] if len(hang.ranks) == 1 else None,
    )
    judged = judge(logs, attempt.world_size or None)
    return Diagnosis(
        kind,
        certainty,
        f"{KNOWLEDGE[kind].title}: {hang.summary}",
        "hpctrain looked at all ranks at once",
        (event,),
        (),
        tuple(r for r in judged.ruled_out if "follows" not in r.why and r.what != "a hang"),
        ("`hpctrain stacks RUN` shows every rank's line", *KNOWLEDGE[kind].do),
        lines=judged.lines,
        logs=judged.logs,
    )
