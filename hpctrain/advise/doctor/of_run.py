"""What ended an attempt of a run, or keeps a live one: its ledger and its logs together. Pure.

The ledger knows what no log says: what the scheduler did, what the detectors of hangs and guards
found, which rank failed first. Logs know why a program died.
tests/unit/doctor/test_of_run.py holds the promises.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.doctor.faults import (
    FAULTS,
    OF_CAUSE,
    OF_WORDS,
    TABLE,
    Certainty,
    Diagnosis,
    LogFacts,
    Role,
    Sighting,
)
from hpctrain.advise.doctor.judge import judge
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.core.base.records import Next
from hpctrain.core.base.text import count, fold_ranks
from hpctrain.ledger.history.progress import reported
from hpctrain.ledger.history.run_state import WITHOUT_A_STEP, EndCause, RunState
from hpctrain.ledger.run.event_types import HangFound
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.run_history import RunHistory

LEDGER = RunDir(Path()).events.name
_WEAK = frozenset({EndCause.NCCL_ERROR, EndCause.USER_ERROR, EndCause.CRASHED, EndCause.UNKNOWN})
"""Causes that something finer may stand behind."""
_FROM_WORDS = _WEAK | OF_WORDS.keys() | {EndCause.GPU_OOM, EndCause.DATA_WORKER}
"""Causes that the ledger has read from words too, so that logs may know better."""
_FROM_OUTSIDE = frozenset(
    {EndCause.PREEMPTED, EndCause.WALLTIME, EndCause.REQUEUED, EndCause.NODE_FAIL}
)
"""Causes that are no fault of the run's: a run that was stopped behind them has another reason."""
_OF_RUN_STATE = {
    RunState(state): row for row, each in TABLE["states"].items() for state in each.get("of", ())
}


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
    judged = judge(facts, attempt.world_size or None)
    if attempt.reason is None and attempt.ended is None:
        return _of_unended(attempt, judged, history, state)
    cause = attempt.cause or EndCause.UNKNOWN
    if cause in _FROM_OUTSIDE:
        return _from_outside(attempt, judged, facts, history)
    if cause in _FROM_WORDS:
        return _of_program(attempt, judged, facts, cause)
    return _by_ledger(attempt, judged, facts, OF_CAUSE[cause], Certainty.CERTAIN)


def _of_program(
    attempt: AttemptView, judged: Diagnosis, facts: Sequence[LogFacts], cause: EndCause
) -> Diagnosis:
    """Of a cause that the ledger has read from words: what the logs say is finer, or an echo.

    Of a rank that died its connections break in the others' logs, if these get to say so before
    they are ended; else the verdict would hang on who was quicker.
    """
    kind = OF_CAUSE[cause]
    echoes = {"transport"} if attempt.failure is None else {"transport", "host_oom"}
    is_echo = cause is EndCause.CRASHED and judged.kind in echoes
    is_finer = cause in _WEAK and judged.certainty is not Certainty.NOT_KNOWN and not is_echo
    if kind in {judged.kind, "unknown"} or is_finer:
        return judged
    if cause in _WEAK:
        return _by_ledger(attempt, judged, facts, kind, Certainty.POSSIBLE)
    if judged.certainty is Certainty.CERTAIN:
        both = f"the ledger says {cause}, the logs {judged.kind}"
        why = f"{both}: what the logs say comes first in time"
        return replace(judged, certainty=Certainty.LIKELY, why=why)
    return _by_ledger(attempt, judged, facts, kind, Certainty.LIKELY)


def _without_requeues(logs: Sequence[LogFacts], attempt: AttemptView) -> list[LogFacts]:
    """Leave out that the job was requeued, where the ledger knows why the attempt ended.

    SLURM's line in the log is then the requeue that hpctrain has asked for, or its own of a
    preemption.
    """
    if attempt.cause in {None, EndCause.REQUEUED, EndCause.UNKNOWN}:
        return list(logs)
    kept = [[s for s in log.sightings if s.kind != "requeued"] for log in logs]
    return [replace(log, sightings=sightings) for log, sightings in zip(logs, kept, strict=True)]


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


def _from_outside(
    attempt: AttemptView, judged: Diagnosis, facts: Sequence[LogFacts], history: RunHistory
) -> Diagnosis:
    """What to do after an end from outside; the general advice is to use hpctrain."""
    record = history.attempt(attempt.number)
    stopped = (record.stopped_for_good if record is not None else None) or ""
    kind = OF_CAUSE[attempt.cause or EndCause.UNKNOWN]
    if WITHOUT_A_STEP in stopped:  # what was done between two ends was never saved
        diagnosis = _by_ledger(attempt, judged, facts, "no_progress", Certainty.CERTAIN)
        title = FAULTS["no_progress"].title
        words = f"{title}: {stopped}; the last of them: {attempt.cause}"
        return replace(diagnosis, headline=words, why="the ledger says why the run was stopped")
    diagnosis = _by_ledger(attempt, judged, facts, kind, Certainty.CERTAIN)
    if record is not None and record.stuck is not None:
        words = f"{diagnosis.headline}; the job could not be requeued: {record.stuck}"
        return replace(
            diagnosis, headline=words, do=("`hpctrain resume RUN` continues in a new job",)
        )
    if attempt.next not in {Next.REQUEUE, Next.LEAVE}:
        return diagnosis
    do = ["nothing: the job was requeued and the run continues"]
    if reported(history).is_silent:
        do.append(
            "the program reported no step and no checkpoint: see that it loads its newest "
            "checkpoint when it starts (`hpctrain logs RUN`)"
        )
    return replace(diagnosis, do=do)


def _by_ledger(
    attempt: AttemptView,
    judged: Diagnosis,
    facts: Sequence[LogFacts],
    kind: str,
    certainty: Certainty,
) -> Diagnosis:
    """What the ledger says of the attempt's end, with what the logs add."""
    words, failure = _words(attempt), attempt.failure
    event = Sighting(
        "attempt_ended",
        kind,
        Role.CAUSE,
        certainty,
        f"attempt {attempt.number} ended: {attempt.cause}{words}",
        LEDGER,
        rank=failure.rank if failure is not None else None,
        node=failure.node if failure is not None else "",
    )
    same = [s for log in facts for s in log.sightings if s.kind == kind][:3]
    why = "" if same else "the scheduler, or hpctrain's own detectors, say so"
    do = FAULTS[kind].do
    if kind == "code" and failure is not None and failure.kind == "exit":
        do = ["`hpctrain logs RUN` shows what the program said before it left with this code"]
    elif failure is not None and failure.node:
        do = [step.replace("NODE", failure.node) for step in do]
    return _said(judged, event, words, why=why, same=same, do=do)


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


def _said(
    judged: Diagnosis,
    event: Sighting,
    words: str,
    *,
    why: str,
    do: Sequence[str],
    same: Sequence[Sighting] = (),
) -> Diagnosis:
    """The diagnosis that rests on an event of the ledger."""
    kind, families = event.kind, TABLE["families"]
    return replace(
        judged,
        kind=kind,
        certainty=event.certainty,
        headline=f"{FAULTS[kind].title}{words}",
        why=why,
        evidence=(event, *same),
        follow_ons=judged.follow_ons if judged.kind == kind else (),
        ruled_out={
            what: reason
            for what, reason in judged.ruled_out.items()
            if "follows" not in reason and kind not in families[what]
        },
        do=do,
        rivals=(),
    )


def _of_unended(
    attempt: AttemptView, judged: Diagnosis, history: RunHistory, state: RunState
) -> Diagnosis:
    """Of an attempt without an end: what the scheduler says of it, a hang, or what its logs say."""
    if (row := _OF_RUN_STATE.get(state)) is not None:
        return _of_state(row, attempt, replace(judged, evidence=()))
    if (hang := attempt.hang) is not None:
        kind = "desync" if hang.kind_of in {"mismatch", "deadlock"} else "hang"
        sign, sure = "hang_suspected", Certainty.LIKELY
        if isinstance(hang, HangFound):
            sign, sure = "hang", Certainty.CERTAIN
        rank = hang.ranks[0] if len(hang.ranks) == 1 else None
        event = Sighting(sign, kind, Role.WAIT, sure, hang.summary, LEDGER, rank=rank)
        do = ("`hpctrain stacks RUN` shows every rank's line", *FAULTS[kind].do)
        why = "hpctrain looked at all ranks at once"
        return _said(judged, event, f": {hang.summary}", why=why, do=do)
    return _of_live(attempt, judged, history, runs=state is RunState.RUNNING)


def _of_live(
    attempt: AttemptView, judged: Diagnosis, history: RunHistory, *, runs: bool
) -> Diagnosis:
    """What its logs say holds it up; else that it runs, or its job is gone."""
    if judged.kind != "unknown":
        certainty = max(judged.certainty, Certainty.LIKELY, key=lambda sure: sure.rank)
        why = "its logs say so; the attempt has not ended by its ledger"
        return replace(judged, certainty=certainty, why=why)
    if not runs:
        return _of_state("gone", attempt, judged)
    if attempt.straggler is not None:
        return _of_state("slow", attempt, judged, attempt.straggler.summary)
    spikes = f"; {count(history.spikes, 'spike')} were told" if history.spikes else ""
    return _of_state("running", attempt, judged, spikes)


def _of_state(name: str, attempt: AttemptView, judged: Diagnosis, more: str = "") -> Diagnosis:
    """A row of the states in faults.toml; what it leaves out is as judged."""
    row = TABLE["states"][name]
    place = f" at step {attempt.last_step:,}" if attempt.last_step is not None else ""
    return replace(
        judged,
        kind=row.get("kind", judged.kind),
        certainty=Certainty(row.get("certainty", judged.certainty)),
        headline=row["headline"].format(attempt=attempt.number, place=place, more=more),
        why=row.get("why", judged.why),
        do=row.get("do", judged.do),
    )
