"""Diagnose an attempt of a run by its ledger and its logs together. Pure.

The ledger knows what the scheduler did, what the detectors found, and which rank failed first; the
logs know why a program died. tests/unit/doctor/test_of_run.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
_WEAK = frozenset(map(EndCause, TABLE["ledger"]["weak"]))
_FROM_OUTSIDE = frozenset(map(EndCause, TABLE["ledger"]["from_outside"]))
_FROM_WORDS = _WEAK | OF_WORDS.keys() | {EndCause.GPU_OOM, EndCause.DATA_WORKER}
"""Causes that the ledger has read from words too, so that logs may know better."""
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
    """Return what ended an attempt; of one that runs, what keeps it.

    Args:
        attempt: The attempt.
        logs: What was read of its logs.
        history: The run's.
        state: Where the run stands: an attempt without an end need not run.
    """
    facts = [*logs, _of_failure(attempt)]
    if attempt.cause not in {None, EndCause.REQUEUED, EndCause.UNKNOWN}:
        # The ledger knows more than SLURM's line that the job was requeued: by hpctrain, mostly.
        kept = [[s for s in log.sightings if s.kind != "requeued"] for log in facts]
        facts = [replace(log, sightings=own) for log, own in zip(facts, kept, strict=True)]
    case = _RunCase(attempt, history, facts, judge(facts, attempt.world_size or None))
    if attempt.reason is None and attempt.ended is None:
        return case.unended(state)
    cause = attempt.cause or EndCause.UNKNOWN
    if cause in _FROM_OUTSIDE:
        return case.from_outside(OF_CAUSE[cause])
    if cause in _FROM_WORDS:
        return case.of_program(cause)
    return case.by_ledger(OF_CAUSE[cause], Certainty.CERTAIN)


def _of_failure(attempt: AttemptView) -> LogFacts:
    """Read the ledger's failure as if it stood in a log."""
    failure = attempt.failure
    if failure is None:
        return LogFacts(LEDGER)
    scanner = LogScanner(f"{LEDGER} (failure)", failure.rank)
    summary = "" if failure.summary in failure.traceback else failure.summary
    parts = (part.rstrip() for part in (failure.traceback, summary) if part)
    scanner.feed("".join(f"{part}\n" for part in parts).encode())
    facts = scanner.finish()
    facts.sightings = [replace(s, line=0, node=s.node or failure.node) for s in facts.sightings]
    return facts


@dataclass(frozen=True)
class _RunCase:
    """An attempt, what its logs and its failure say, and the verdict of these alone."""

    attempt: AttemptView
    history: RunHistory
    facts: Sequence[LogFacts]
    judged: Diagnosis

    def of_program(self, cause: EndCause) -> Diagnosis:
        """Of a cause that the ledger has read from words: the logs are finer, or an echo."""
        judged, kind = self.judged, OF_CAUSE[cause]
        # Others' logs tell of a dead rank's connections where these break before they are ended.
        echoes = {"transport"} if self.attempt.failure is None else {"transport", "host_oom"}
        is_echo = cause is EndCause.CRASHED and judged.kind in echoes
        is_finer = cause in _WEAK and judged.certainty is not Certainty.NOT_KNOWN and not is_echo
        if kind in {judged.kind, "unknown"} or is_finer:
            return judged
        if cause not in _WEAK and judged.certainty is Certainty.CERTAIN:
            both = f"the ledger says {cause}, the logs {judged.kind}"
            why = f"{both}: what the logs say comes first in time"
            return replace(judged, certainty=Certainty.LIKELY, why=why)
        return self.by_ledger(kind, Certainty.POSSIBLE if cause in _WEAK else Certainty.LIKELY)

    def from_outside(self, kind: str) -> Diagnosis:
        """Of an end from outside, with its own advice: the general one is to use hpctrain."""
        record = self.history.attempt(self.attempt.number)
        stopped = (record.stopped_for_good if record is not None else None) or ""
        if WITHOUT_A_STEP in stopped:  # what was done between two ends was never saved
            title = FAULTS["no_progress"].title
            words = f"{title}: {stopped}; the last of them: {self.attempt.cause}"
            why = "the ledger says why the run was stopped"
            return replace(
                self.by_ledger("no_progress", Certainty.CERTAIN), headline=words, why=why
            )
        diagnosis = self.by_ledger(kind, Certainty.CERTAIN)
        if record is not None and record.stuck is not None:
            words = f"{diagnosis.headline}; the job could not be requeued: {record.stuck}"
            do = ["`hpctrain resume RUN` continues in a new job"]
            return replace(diagnosis, headline=words, do=do)
        if self.attempt.next not in {Next.REQUEUE, Next.LEAVE}:
            return diagnosis
        texts = TABLE["requeued"]
        do = [texts["do"], texts["silent"]] if reported(self.history).is_silent else [texts["do"]]
        return replace(diagnosis, do=do)

    def by_ledger(self, kind: str, certainty: Certainty) -> Diagnosis:
        """What the ledger says of the attempt's end, with what the logs add."""
        attempt, failure, words = self.attempt, self.attempt.failure, self._words()
        text = f"attempt {attempt.number} ended: {attempt.cause}{words}"
        event = Sighting("attempt_ended", kind, Role.CAUSE, certainty, text, LEDGER)
        do = FAULTS[kind].do
        if failure is not None:
            event = replace(event, rank=failure.rank, node=failure.node)
            do = [step.replace("NODE", failure.node or "NODE") for step in do]
            if kind == "code" and failure.kind == "exit":
                do = ["`hpctrain logs RUN` shows what the program said before it left"]
        same = [s for log in self.facts for s in log.sightings if s.kind == kind][:3]
        why = "" if same else "the scheduler, or hpctrain's own detectors, say so"
        return self._resting_on([event, *same], words, why, do)

    def _words(self) -> str:
        """The ledger's own words on the end, as far as they say more than its cause."""
        attempt = self.attempt
        if attempt.hang is not None and attempt.cause in {EndCause.HANG, EndCause.DESYNC}:
            return f": {attempt.hang.summary}"
        if attempt.failure is not None and attempt.failure.summary:
            rank = attempt.failure.rank
            return f": {'' if rank is None else f'rank {rank}: '}{attempt.failure.summary}"
        if attempt.awaited is not None and attempt.cause is EndCause.HUNG_END:
            return f": {fold_ranks(attempt.awaited.left)} had not ended"
        return f": {attempt.detail}" if attempt.detail not in {"", attempt.reason} else ""

    def _resting_on(
        self, events: Sequence[Sighting], words: str, why: str, do: Sequence[str]
    ) -> Diagnosis:
        """The diagnosis of the first event's kind."""
        kind, families, judged = events[0].kind, TABLE["families"], self.judged
        return replace(
            judged,
            kind=kind,
            certainty=events[0].certainty,
            headline=f"{FAULTS[kind].title}{words}",
            why=why,
            evidence=tuple(events),
            follow_ons=judged.follow_ons if judged.kind == kind else (),
            ruled_out={
                what: reason
                for what, reason in judged.ruled_out.items()
                if "follows" not in reason and kind not in families[what]
            },
            do=do,
            rivals=(),
        )

    def unended(self, state: RunState) -> Diagnosis:
        """Of an attempt without an end: the scheduler's word, a hang, or what its logs say."""
        if (row := _OF_RUN_STATE.get(state)) is not None:
            return replace(self._state(row), evidence=())
        if (hang := self.attempt.hang) is not None:
            kind = "desync" if hang.kind_of in {"mismatch", "deadlock"} else "hang"
            proven, suspected = ("hang", Certainty.CERTAIN), ("hang_suspected", Certainty.LIKELY)
            sign, sure = proven if isinstance(hang, HangFound) else suspected
            rank = hang.ranks[0] if len(hang.ranks) == 1 else None
            event = Sighting(sign, kind, Role.WAIT, sure, hang.summary, LEDGER, rank=rank)
            do = ("`hpctrain stacks RUN` shows every rank's line", *FAULTS[kind].do)
            why = "hpctrain looked at all ranks at once"
            return self._resting_on([event], f": {hang.summary}", why, do)
        if self.judged.kind != "unknown":
            certainty = max(self.judged.certainty, Certainty.LIKELY, key=lambda sure: sure.rank)
            why = "its logs say so; the attempt has not ended by its ledger"
            return replace(self.judged, certainty=certainty, why=why)
        if state is not RunState.RUNNING:
            return self._state("gone")
        if self.attempt.straggler is not None:
            return self._state("slow", self.attempt.straggler.summary)
        spikes = self.history.spikes
        return self._state("running", f"; {count(spikes, 'spike')} were told" if spikes else "")

    def _state(self, name: str, more: str = "") -> Diagnosis:
        """A row of the states in faults.toml; what it leaves out is as judged."""
        row, step, judged = TABLE["states"][name], self.attempt.last_step, self.judged
        place = f" at step {step:,}" if step is not None else ""
        return replace(
            judged,
            kind=row.get("kind", judged.kind),
            certainty=Certainty(row.get("certainty", judged.certainty)),
            headline=row["headline"].format(attempt=self.attempt.number, place=place, more=more),
            why=row.get("why", judged.why),
            do=row.get("do", judged.do),
        )
