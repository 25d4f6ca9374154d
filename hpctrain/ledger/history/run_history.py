"""The history of a run: its ledger's events put together in one pass. Pure.

It can be extended as the ledger grows, and is then the same as if it had been built in one go.
Times are as their writers' clocks had them; who uses them puts them in order (`allocations_of`,
`goodput.cut`). tests/unit/history/test_run_history.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.core.base.records import INCIDENT, Skipped
from hpctrain.ledger.history import run_records
from hpctrain.ledger.history.run_records import (
    AttemptRecord,
    Failure,
    Hole,
    Restore,
    Rewind,
    SaveRecord,
    StepMark,
    Submission,
)
from hpctrain.ledger.history.run_state import STATE_CHANGES, LedgerState, after
from hpctrain.ledger.run import event_types as facts
from hpctrain.ledger.run import events as ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpctrain.core.base.records import EndReason
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.events import Event
    from hpctrain.ledger.run.layout import RunDir


@dataclass
class RunHistory:
    """What became of a run, by its ledger; lists are in order. Two of the same events are equal.

    What an old attempt says after a newer one has begun counts for nothing, but for its end: it may
    continue to write for a while (seen for 35 s after a node failure).

    Attributes:
        state: Where the run stands by the ledger alone.
        holes: Batches of which no update was made, as far as no restore went back behind them.
        rewound_to: No checkpoint with more updates is to be resumed from; None where none of a
            guard's wishes waits for a restore.
        suspicions: Nodes that a guard named as the one that was wrong, each with what it did,
            since the run was last told to do without it.
        differing: Whose copies of the weights were last found to differ; None for nobody's.
        saves: Saves of all attempts that were due, in order.
        interval: How often the newest attempt saves; None where it has not said so.
        restores: How many times an attempt has restored, last at `restored_t`.
        seen: When a step, a save or a restore was last heard of.
        asked_step: The step of `resume --from STEP`, until an attempt has restored it.
        asked_seal: The same, until an attempt has chosen among sealed checkpoints.
        newest_saved: The newest step that was saved or imported since the run last began at the
            beginning.
        kept_save: The newest committed save that was not gone back behind: its step, when, and
            its bytes, where that is still known; None before the first.
        sealed_path: Where the newest sealed checkpoint lies that was not gone back behind; ""
            for none.
        resumes: How many submissions were answered.
        ends_since_resume: Which attempts have ended since the last of them, and why.
        verified: Checkpoints of which a person has had every byte read, and when.
        excluded: Nodes that a run excludes, each with the attempt that found
            them.
        jobs: Every job of the run, and the clusters that are said to have it.
        clusters: Those that are said to have its newest job.
        evaluations: The last word on the evaluation of each step's checkpoint. Where there was
            no checkpoint any more, one that is saved anew counts as new.
        followers: Directories of the runs that are to run after this one.
        last_t: When the last event was written; None in an empty ledger.
        written_in: The submission's script or the run's folder, as last written there.
    """

    state: LedgerState = field(default_factory=LedgerState)
    submissions: list[Submission] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    training: list[StepMark | Restore] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    rewinds: list[Rewind] = field(default_factory=list)
    rewound_to: int | None = None
    not_finite: list[facts.StepNotFinite] = field(default_factory=list)
    suspicions: list[tuple[str, str]] = field(default_factory=list)
    spikes: int = 0
    differing: facts.ReplicasDiffer | None = None
    saves: list[SaveRecord] = field(default_factory=list)
    interval: facts.IntervalSet | None = None
    restores: int = 0
    restored_t: float | None = None
    seen: float | None = None
    asked_step: int | None = None
    asked_seal: int | None = None
    newest_saved: int | None = None
    kept_save: tuple[int | None, float | None, int | None] | None = None
    sealed_path: str = ""
    total_steps: int | None = None
    shapes: list[tuple[float, facts.ShapeChosen]] = field(default_factory=list)
    resumes: int = 0
    ends_since_resume: list[tuple[int | None, EndReason]] = field(default_factory=list)
    to_end: set[str] = field(default_factory=set)
    verified: dict[str, float] = field(default_factory=dict)
    set_aside: list[Skipped] = field(default_factory=list)
    excluded: list[tuple[int | None, str]] = field(default_factory=list)
    jobs: dict[str, set[str]] = field(default_factory=dict)
    clusters: set[str] = field(default_factory=set)
    job_times: list[float] = field(default_factory=list)
    asked_evaluations: set[int] = field(default_factory=set)
    evaluations: dict[int, facts.Evaluated] = field(default_factory=dict)
    notified: set[int] = field(default_factory=set)
    followers: list[str] = field(default_factory=list)
    count: int = 0
    last_t: float | None = None
    written_in: tuple[Literal["", "script", "run_dir"], str] = ("", "")
    _by_number: dict[int, AttemptRecord] = field(default_factory=dict)
    _newest: int = 0

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunHistory:
        """The history that these events tell."""
        history = cls()
        history.extend(events)
        return history

    @classmethod
    def read(cls, run: RunDir, *, marks: Literal["all", "few"] = "all") -> RunHistory:
        """The history of a run's ledger; see `events.read`."""
        return cls.of(ledger.read(run, marks=marks))

    @property
    def newest(self) -> AttemptRecord | None:
        """The attempt with the highest number; None before the first."""
        return max(self.attempts, key=lambda attempt: attempt.number, default=None)

    @property
    def has_begun(self) -> bool:
        """Whether ranks were started, ever: what the run was to run after is done with then."""
        return any(attempt.world_size > 0 for attempt in self.attempts)

    def attempt(self, number: int | None) -> AttemptRecord | None:
        """The attempt of that number, if the ledger has heard of it."""
        return None if number is None else self._by_number.get(number)

    def extend(self, events: Iterable[Event]) -> None:
        """Add what was written since; nothing that an event holds is an error."""
        for t, number, fact in ((event.t, event.attempt, event.fact) for event in events):
            if not math.isfinite(t):  # nothing that was read from a file is
                continue
            self.count += 1
            self.last_t = t
            attempt, kind = None, type(fact)
            if number is not None:
                if number < self._newest and kind not in _OF_THE_END:
                    continue  # an old attempt beside a newer one
                attempt = self._by_number.get(number) or self._begin(number, t)
                if kind not in _OF_THE_END:
                    attempt.resume = self.resumes
                    attempt.last_t = t
                if kind in _NEWEST_OF_ATTEMPT:
                    setattr(attempt, _NEWEST_OF_ATTEMPT[kind], fact)
                elif (change := _OF_ATTEMPT.get(kind)) is not None:
                    change(attempt, t, fact)
            change_run = _OF_RUN.get(kind)
            if change_run is not None:
                change_run(self, attempt, t, fact)
            if kind in STATE_CHANGES:
                self.state = after(self.state, t, number, fact)

    def _begin(self, number: int, t: float) -> AttemptRecord:
        self._newest = max(number, self._newest)
        job_id = self.submissions[-1].job_id if self.submissions else ""
        attempt = AttemptRecord(number, t, t, submitted_job=job_id)
        attempt.submission = len(self.submissions)
        self._by_number[number] = attempt
        self.attempts.append(attempt)
        return attempt


# What each kind of event tells of its attempt.


def _started(attempt: AttemptRecord, t: float, fact: facts.AttemptStarted) -> None:
    attempt.started = t
    attempt.job_id = fact.job_id
    attempt.restarts = fact.restarts or 0
    attempt.nodes = fact.nodes
    attempt.world_size = fact.world_size or 0
    attempt.cpus = fact.cpus
    attempt.spares = fact.spares
    attempt.peers, attempt.switches = fact.peers, fact.switches
    attempt.by = fact.by
    moments = (fact.job_started, fact.batch_started, fact.agent_started)
    attempt.begun = next((moment for moment in moments if moment is not None), None)


def _phase(attempt: AttemptRecord, t: float, fact: facts.PhaseReached) -> None:
    attempt.initialised = True
    attempt.device = fact.device or attempt.device
    if fact.name == "first_step" and attempt.first_step is None:
        attempt.first_step = t
        attempt.base = (fact.data_s or 0.0, fact.save_s or 0.0)


def _restored(attempt: AttemptRecord, t: float, fact: facts.CheckpointRestored) -> None:
    attempt.restored = t
    attempt.restore_s = fact.seconds
    attempt.restored_step = attempt.last_step = fact.step or 0
    attempt.moved(attempt.restored_step)
    attempt.own_loop, resumed = fact.by == "program", attempt.resumed
    attempt.from_world_size = fact.from_world_size
    if not attempt.own_loop:
        attempt.from_checkpoint, attempt.skipped = fact.checkpoint, fact.skipped
    elif resumed is None or resumed.step not in {None, fact.step}:
        attempt.from_checkpoint = None  # it did not resume from what it was given
    attempt.read_from = fact.read_from or ("disk" if attempt.from_checkpoint else "")
    attempt.marks_before = len(attempt.marks)


def _resumed(attempt: AttemptRecord, _: float, fact: facts.ResumeChosen) -> None:
    attempt.resumed = fact
    attempt.skipped = fact.skipped
    attempt.from_checkpoint = fact.path or None
    attempt.read_from = "disk" if fact.path else ""
    if fact.step is not None or not fact.path:
        attempt.restored_step = fact.step or 0


def _steps(attempt: AttemptRecord, t: float, fact: facts.StepsDone) -> None:
    if fact.last is None:
        return
    if not attempt.marks and attempt.first_step is None:  # a torn ledger
        attempt.first_step = t - (fact.seconds or 0.0)
    run_records.goes_on(attempt, t)
    attempt.marks.append(StepMark(t, attempt.number, fact))
    attempt.moved(fact.last)


def _save_due(attempt: AttemptRecord, _: float, fact: facts.SaveFailed | facts.SaveSkipped) -> None:
    attempt.moved(fact.step)


def _stop_requested(attempt: AttemptRecord, t: float, fact: facts.StopRequested) -> None:
    attempt.stop_cause = "" if fact.cause is None else fact.cause.value
    attempt.stopping = attempt.stopping or t


def _left(
    attempt: AttemptRecord, t: float, fact: facts.TrainingStopped | facts.TrainingDone
) -> None:
    attempt.left = attempt.left or t
    attempt.moved(fact.step)


def _failed(attempt: AttemptRecord, t: float, fact: facts.RankFailed) -> None:
    attempt.failed = attempt.failed or t
    attempt.failure = Failure(
        attempt=attempt.number,
        rank=fact.rank,
        node=fact.node,
        kind=fact.kind_of,
        summary=fact.summary,
        traceback=fact.traceback,
        others=fact.others,
    )


def _paused(attempt: AttemptRecord, _: float, fact: facts.RestartPaused) -> None:
    attempt.restart_pause_s = fact.seconds


def _hung(attempt: AttemptRecord, t: float, fact: facts.HangSuspected | facts.HangFound) -> None:
    attempt.hang = fact
    run_records.stands(attempt, t, fact)


def _cleared(attempt: AttemptRecord, t: float, _: facts.HangCleared) -> None:
    run_records.goes_on(attempt, t)
    attempt.hang = None


def _keeps_up(attempt: AttemptRecord, _: float, fact: facts.StragglerGone) -> None:
    slow = attempt.straggler
    if slow is not None and set(slow.ranks) <= set(fact.ranks):
        attempt.straggler = None


def _awaited(attempt: AttemptRecord, t: float, fact: facts.RanksAwaited) -> None:
    attempt.awaited = fact
    run_records.awaited_in_vain(attempt, t, fact)


def _ended(attempt: AttemptRecord, t: float, fact: facts.AttemptEnded) -> None:
    late = fact.by == "successor"
    if attempt.ended is None:
        # A successor writes long after the end; the attempt itself was last heard of before.
        attempt.ended = max(attempt.last_t, fact.heard or 0.0) if late else t
    if not late:
        attempt.last_t = t
        attempt.witnessed = t if attempt.witnessed is None else attempt.witnessed
    attempt.ended_at = attempt.ended_at if fact.ended_at is None else fact.ended_at
    attempt.heard = attempt.heard if fact.heard is None else fact.heard
    attempt.reason, attempt.next = fact.reason, fact.next
    attempt.detail, attempt.ended_by = fact.detail, fact.by
    attempt.end_step = fact.step
    attempt.moved(fact.step)


def _fenced(attempt: AttemptRecord, t: float, _: facts.AttemptFenced) -> None:
    attempt.gave_way = t
    attempt.ended = t if attempt.ended is None else attempt.ended


def _lost_node(attempt: AttemptRecord, _: float, fact: facts.NodeLost) -> None:
    attempt.lost_nodes.append(fact)


def _requeued(attempt: AttemptRecord, *_: object) -> None:
    attempt.stuck = None


def _not_requeued(attempt: AttemptRecord, _: float, fact: facts.RequeueFailed) -> None:
    attempt.stuck = fact.why


def _stopped_for_good(attempt: AttemptRecord, _: float, fact: facts.RunStopped) -> None:
    attempt.stopped_for_good = fact.detail


_OF_THE_END = frozenset({facts.AttemptEnded, facts.AttemptFenced})
"""What counts of an old attempt beside a newer one."""
_NEWEST_OF_ATTEMPT: dict[type[LedgerFact], str] = {
    facts.MeshBuilt: "mesh",
    facts.StragglerFound: "straggler",
    facts.RanksOutOfStep: "out_of_step",
    facts.MemoryCopiesSet: "memory",
}
"""Kinds of which an attempt keeps the newest, and where."""
_OF_ATTEMPT: dict[type[LedgerFact], Callable[[AttemptRecord, float, Any], None]] = {
    facts.AttemptStarted: _started,
    facts.PhaseReached: _phase,
    facts.CheckpointRestored: _restored,
    facts.ResumeChosen: _resumed,
    facts.StepsDone: _steps,
    facts.SaveFailed: _save_due,
    facts.SaveSkipped: _save_due,
    facts.StopRequested: _stop_requested,
    facts.TrainingStopped: _left,
    facts.TrainingDone: _left,
    facts.RankFailed: _failed,
    facts.RanksAwaited: _awaited,
    facts.HangSuspected: _hung,
    facts.HangFound: _hung,
    facts.HangCleared: _cleared,
    facts.JobSuspended: run_records.suspended,
    facts.StragglerGone: _keeps_up,
    facts.NodeLost: _lost_node,
    facts.RestartPaused: _paused,
    facts.AttemptEnded: _ended,
    facts.AttemptFenced: _fenced,
    facts.Requeued: _requeued,
    facts.RequeueFailed: _not_requeued,
    facts.RunStopped: _stopped_for_good,
}


# What each kind of event tells of the run; of its attempt where it has one.

_Attempt = AttemptRecord | None


def _intent(run: RunHistory, _: _Attempt, t: float, fact: facts.SubmitIntent) -> None:
    run.clusters = {fact.slurm_cluster} - {""}
    clusters = frozenset(run.clusters)
    run.submissions.append(Submission(t, fact.token, clusters=clusters))
    run.written_in = ("script", fact.script) if fact.script else run.written_in


def _accepted(
    run: RunHistory, _: _Attempt, t: float, fact: facts.Submitted | facts.SubmitAdopted
) -> None:
    newest = run.submissions[-1] if run.submissions else None
    if newest is None or newest.token != fact.token or newest.job_id:
        newest = Submission(t, fact.token)
        run.submissions.append(newest)
    newest.job_id, newest.accepted = fact.job_id, t
    run.jobs.setdefault(fact.job_id, set()).update(newest.clusters)


def _submitted(run: RunHistory, attempt: _Attempt, t: float, fact: facts.Submitted) -> None:
    _accepted(run, attempt, t, fact)
    run.resumes += 1
    run.ends_since_resume = []
    run.job_times.append(t)
    run.asked_step = run.asked_seal = fact.from_step
    if fact.from_step is not None and run.attempts:
        run.attempts[-1].went_back = True
    if fact.total_steps is not None:
        run.total_steps = fact.total_steps


def _shape_chosen(run: RunHistory, _: _Attempt, t: float, fact: facts.ShapeChosen) -> None:
    run.shapes.append((t, fact))


def _refused(run: RunHistory, _: _Attempt, __: float, fact: facts.SubmitFailed) -> None:
    newest = run.submissions[-1] if run.submissions else None
    if newest is not None and not newest.job_id and fact.token in {"", newest.token}:
        newest.refused = True


def _cancelled(run: RunHistory, _: _Attempt, t: float, fact: facts.CancelRequested) -> None:
    run.to_end.add(fact.job_id)
    of_job = (s for s in reversed(run.submissions) if s.job_id in {"", fact.job_id})
    submission = next(of_job, None)
    if submission is not None:
        submission.cancelled = submission.cancelled or t


def _attempt_started(
    run: RunHistory, attempt: _Attempt, t: float, fact: facts.AttemptStarted
) -> None:
    run.interval = None  # it may run with other settings
    run.job_times.append(t)
    clusters = {fact.slurm_cluster} - {""}
    run.clusters |= clusters
    if attempt is not None:
        attempt.submission = len(run.submissions)
    if fact.job_id:
        run.jobs.setdefault(fact.job_id, set()).update(clusters)
    run.written_in = ("run_dir", fact.run_dir) if fact.run_dir else run.written_in


def _run_restored(
    run: RunHistory, attempt: _Attempt, t: float, fact: facts.CheckpointRestored
) -> None:
    step = fact.step or 0
    run.training.append(Restore(t, None if attempt is None else attempt.number, step))
    run.restores += 1
    run.restored_t = run.seen = t
    run.asked_step = run.rewound_to = None
    _went_behind(run, step)
    if fact.step == 0 and not fact.checkpoint:
        run.newest_saved = None


def _went_behind(run: RunHistory, step: int) -> None:
    run.holes = [hole for hole in run.holes if (hole.fact.step or 0) <= step]
    if run.kept_save is not None and step < (run.kept_save[0] or 0):
        run.kept_save = (step or None, None, None)


def _run_resumed(run: RunHistory, attempt: _Attempt, t: float, fact: facts.ResumeChosen) -> None:
    run.asked_seal = None
    run.sealed_path = fact.path
    run.restores += 1
    run.restored_t = run.seen = t
    if fact.path and fact.step is None:
        return  # where training continues, only the program knows
    step = fact.step or 0
    run.training.append(Restore(t, None if attempt is None else attempt.number, step))
    _went_behind(run, step)


def _run_steps(run: RunHistory, attempt: _Attempt, t: float, fact: facts.StepsDone) -> None:
    if fact.first is not None and fact.last is not None:
        run.training.append(StepMark(t, None, fact) if attempt is None else attempt.marks[-1])
        run.seen = t
        if fact.total is not None:
            run.total_steps = fact.total


def _saved(run: RunHistory, attempt: _Attempt, t: float, fact: facts.CheckpointSaved) -> None:
    _add_save(
        run, attempt, t, fact, stall_s=fact.stall_s, waited_s=fact.waited_s or 0.0, mode=fact.mode
    )
    run.newest_saved = max(fact.step, run.newest_saved or 0)
    last_word = run.evaluations.get(fact.step)
    if last_word is not None and not last_word.run:  # it was gone, and is there again
        del run.evaluations[fact.step]
    if attempt is not None:
        attempt.moved(fact.step)


def _sealed(run: RunHistory, attempt: _Attempt, t: float, fact: facts.CheckpointSealed) -> None:
    """It tells of no step that was done: the program may be far beyond it."""
    stall_s = fact.seconds if fact.by == "program" else 0.0
    _add_save(run, attempt, t, fact, stall_s=stall_s, mode="sealed", own_s=fact.own_s)
    run.sealed_path = fact.path


def _add_save(
    run: RunHistory,
    attempt: _Attempt,
    t: float,
    fact: facts.CheckpointSaved | facts.CheckpointSealed,
    **more: Any,
) -> None:
    save = SaveRecord(
        t=t,
        attempt=None if attempt is None else attempt.number,
        kind=fact.kind,
        step=fact.step,
        restores=run.restores,
        leaving=attempt is not None and attempt.stopping is not None,
        seconds=fact.seconds,
        size_bytes=fact.bytes,
        **more,
    )
    run.saves.append(save)
    run.seen = t
    run.kept_save = (fact.step, t, fact.bytes)
    if attempt is not None:
        attempt.saves.append(save)
        if fact.step is not None:
            attempt.last_saved_step = fact.step


def _not_saved(
    run: RunHistory, attempt: _Attempt, t: float, fact: facts.SaveFailed | facts.SaveSkipped
) -> None:
    number = None if attempt is None else attempt.number
    run.saves.append(SaveRecord(t, number, fact.kind, fact.step, run.restores, why=fact.why))
    run.seen = t


def _hole(run: RunHistory, attempt: _Attempt, t: float, fact: facts.BatchSkipped) -> None:
    if fact.step is not None:
        run.holes.append(Hole(t, None if attempt is None else attempt.number, fact))


def _rewound(run: RunHistory, attempt: _Attempt, _: float, fact: facts.TrainingRewound) -> None:
    run.rewinds.append(Rewind(None if attempt is None else attempt.number, fact))
    run.rewound_to = fact.to


def _not_finite(run: RunHistory, _: _Attempt, __: float, fact: facts.StepNotFinite) -> None:
    run.not_finite.append(fact)
    if fact.transient and fact.node:
        run.suspicions.append((fact.node, "numbers that were finite when computed again"))


def _differ(run: RunHistory, _: _Attempt, __: float, fact: facts.ReplicasDiffer) -> None:
    run.differing = fact
    if fact.certain:
        run.suspicions += [(node, "weights unlike those of the others") for node in fact.nodes]


def _spiked(run: RunHistory, _: _Attempt, __: float, ___: facts.StepSpiked) -> None:
    run.spikes += 1


def _imported(run: RunHistory, _: _Attempt, __: float, fact: facts.CheckpointImported) -> None:
    if fact.step is not None:
        run.newest_saved = max(fact.step, run.newest_saved or 0)


def _interval(run: RunHistory, _: _Attempt, __: float, fact: facts.IntervalSet) -> None:
    run.interval = fact


def _run_ended(run: RunHistory, attempt: _Attempt, _: float, fact: facts.AttemptEnded) -> None:
    number, ends = None if attempt is None else attempt.number, run.ends_since_resume
    if number is not None and ends and ends[-1][0] == number:
        ends.pop()  # the later record knows more of the same end
    ends.append((number, fact.reason))


def _run_requeued(run: RunHistory, _: _Attempt, t: float, __: facts.Requeued) -> None:
    run.job_times.append(t)


def _verified(run: RunHistory, _: _Attempt, t: float, fact: facts.CheckpointVerified) -> None:
    run.verified[fact.name] = t


def _set_aside(run: RunHistory, _: _Attempt, __: float, fact: facts.CheckpointSetAside) -> None:
    run.set_aside.append(Skipped(fact.step or 0, fact.name, fact.reason))


def _excluded(run: RunHistory, attempt: _Attempt, _: float, fact: facts.NodesExcluded) -> None:
    number = None if attempt is None else attempt.number
    run.excluded += [(number, node) for node in fact.nodes]
    run.suspicions = [each for each in run.suspicions if each[0] not in fact.nodes]


def _asked(run: RunHistory, _: _Attempt, __: float, fact: facts.EvaluationAsked) -> None:
    run.asked_evaluations.add(fact.step)
    run.evaluations.pop(fact.step, None)  # what was said before is no longer the last word


def _evaluated(run: RunHistory, _: _Attempt, __: float, fact: facts.Evaluated) -> None:
    run.evaluations[fact.step] = fact


def _notified(run: RunHistory, attempt: _Attempt, _: float, fact: facts.Notified) -> None:
    if attempt is not None and fact.what != INCIDENT:  # its end is still to be notified
        run.notified.add(attempt.number)


def _followed(run: RunHistory, _: _Attempt, __: float, fact: facts.Followed) -> None:
    if fact.run not in run.followers:
        run.followers.append(fact.run)


_OF_RUN: dict[type[LedgerFact], Callable[[RunHistory, _Attempt, float, Any], None]] = {
    facts.SubmitIntent: _intent,
    facts.Submitted: _submitted,
    facts.SubmitAdopted: _accepted,
    facts.SubmitFailed: _refused,
    facts.ShapeChosen: _shape_chosen,
    facts.CancelRequested: _cancelled,
    facts.Followed: _followed,
    facts.AttemptStarted: _attempt_started,
    facts.CheckpointRestored: _run_restored,
    facts.ResumeChosen: _run_resumed,
    facts.StepsDone: _run_steps,
    facts.StepNotFinite: _not_finite,
    facts.StepSpiked: _spiked,
    facts.BatchSkipped: _hole,
    facts.ReplicasDiffer: _differ,
    facts.TrainingRewound: _rewound,
    facts.CheckpointSaved: _saved,
    facts.CheckpointSealed: _sealed,
    facts.SaveFailed: _not_saved,
    facts.SaveSkipped: _not_saved,
    facts.CheckpointImported: _imported,
    facts.IntervalSet: _interval,
    facts.AttemptEnded: _run_ended,
    facts.Requeued: _run_requeued,
    facts.CheckpointVerified: _verified,
    facts.CheckpointSetAside: _set_aside,
    facts.NodesExcluded: _excluded,
    facts.EvaluationAsked: _asked,
    facts.Evaluated: _evaluated,
    facts.Notified: _notified,
}
