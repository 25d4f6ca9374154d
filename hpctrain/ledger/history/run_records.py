"""The records of a run's history: submissions, attempts, saves, and spans without progress. Pure.

`run_history` fills them from the ledger. Times are those of the writers' clocks. A suspicion that
was cleared is slow work and no span without progress.
tests/unit/history/test_run_history.py and test_stillness.py hold the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.core.base.records import EndReason, Next, Skipped
    from hpctrain.ledger.run import event_types as facts


class StepMark(NamedTuple):
    """The steps since the mark before."""

    t: float
    attempt: int | None
    fact: facts.StepsDone

    @property
    def steps(self) -> int:
        """How many; 0 where the mark does not tell."""
        first, last = self.fact.first, self.fact.last
        return 0 if first is None or last is None else max(0, last - first + 1)


class Restore(NamedTuple):
    """An attempt began to train at a step, 0 for the beginning."""

    t: float
    attempt: int | None
    step: int


class StillStretch(NamedTuple):
    """From when to when nothing moved, in seconds since the epoch; no end while it lasts."""

    start: float
    end: float | None = None


class Hole(NamedTuple):
    """A batch was read and not trained on: a guard has left its update out."""

    t: float
    attempt: int | None
    fact: facts.BatchSkipped


class Rewind(NamedTuple):
    """A guard had training go back; the samples that it names are left out from then on."""

    attempt: int | None
    fact: facts.TrainingRewound

    @property
    def hole(self) -> tuple[int, int] | None:
        """The range of samples that is left out; None where it names none."""
        first, last = self.fact.first, self.fact.last
        return (first, last) if first is not None and last is not None and first < last else None


@dataclass
class Submission:
    """A job that was asked for.

    Attributes:
        job_id: "" where the answer is not on record.
        accepted: When the answer came; None where it is not on record.
        refused: Whether it was not accepted.
        cancelled: When it was asked to be cancelled.
        clusters: Those that are said to have it.
    """

    asked: float
    token: str = ""
    job_id: str = ""
    accepted: float | None = None
    refused: bool = False
    cancelled: float | None = None
    clusters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Failure:
    """The first causal failure of an attempt."""

    attempt: int
    rank: int | None
    node: str
    kind: str
    summary: str
    traceback: str = ""
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class SaveRecord:
    """A save that was due: one that was committed, has failed or was left out.

    Attributes:
        t: When it was recorded.
        kind: "saved", "sealed", "save_failed" or "save_skipped".
        step: Of the state; None where nobody knows.
        restores: How many times the run had restored a checkpoint before.
        leaving: Whether the attempt had been asked to stop.
        seconds: From its beginning until it was committed.
        stall_s: How long training waited for it; None where the version that wrote it did not
            tell.
        waited_s: How long it waited for the save before.
        mode: "async" or "sync".
        own_s: Before the seconds of a seal: the program's own save.
    """

    t: float
    attempt: int | None
    kind: str
    step: int | None
    restores: int
    leaving: bool = False
    seconds: float | None = None
    stall_s: float | None = None
    waited_s: float = 0.0
    size_bytes: int | None = None
    mode: str = ""
    why: str = ""
    own_s: float | None = None

    @property
    def committed(self) -> bool:
        """Whether it can be loaded."""
        return self.kind in {"saved", "sealed"}

    @property
    def cost_s(self) -> float | None:
        """What training lost to it: a version without saves in the background told of no stall."""
        return self.seconds if self.stall_s is None and self.mode != "async" else self.stall_s


@dataclass
class AttemptRecord:
    """One attempt, as far as the ledger alone knows it. Moments are seconds since the epoch.

    Attributes:
        number: Counted from 1.
        first_t: When it was first heard of; `last_t` is the last time, by any writer but its
            successor.
        submission: How many submissions there had been when it began.
        resume: How many were answered when it last told anything but its end; -1 where it never
            did.
        submitted_job: The newest job that was submitted when it was first heard of.
        job_id: Whose job it ran in; "" where its beginning is torn.
        restarts: How often the scheduler had restarted that job.
        world_size: Ranks; 0 where no agent came so far.
        cpus: Of each rank of its first node; empty where they are not bound.
        by: "start", "restart" inside the allocation, or "batch".
        started: When its ranks were about to start.
        begun: When its job began, by SLURM or by the first process that could tell.
        initialised: Whether its program has called `hpctrain.init`.
        restored: When they had their state; `restore_s` is how long that took, where it was
            told.
        restored_step: Its step, 0 for none.
        own_loop: Whether its program counts, saves and restores by itself, and has told the
            step.
        from_checkpoint: Its name, of a sealed one its path; None where it began at the
            beginning.
        skipped: Checkpoints it looked at and did not take.
        resumed: Which sealed checkpoint its program was given; None where nothing was sealed.
        base: Seconds of data and saves that count for the time before the first step was done.
        marks: Step marks, in order; `marks_before` were there when it last restored.
        stop_cause: What asked for the stop, where something did.
        stopping: When its ranks agreed to stop.
        left: When they had saved and left, or were done.
        ended: When it ended; for one that died without a word, when it was last heard of.
        witnessed: When its end was written down by those who saw it.
        ended_at: The scheduler's word on the end of its allocation.
        gave_way: When it told that a newer one has taken the run over.
        heard: When its ranks were last heard of, by those who wrote the end.
        last_step: The last step that it is known to have done since it last restored.
        highest_step: The highest one that it is known to have done.
        last_saved_step: The newest checkpoint that it committed.
        end_step: The step that was recorded with its end.
        reason: Why it ended; None while it runs. The last word counts: the batch side may know
            more than the agent did.
        ended_by: Who told of the end: "agent", "batch" or "successor".
        stopped_for_good: Why nothing follows, where a budget or a user's error decided so.
        stuck: Why its job could not be requeued; None where it was, or nobody tried.
        went_back: Whether a person resumed from an older step on purpose: what follows costs,
            but nothing was lost.
        awaited: Which ranks were waited for last, where others had returned.
        hang: The last report of ranks that stand still; None if they continued since.
        straggler: Who is slower than the others, as was said last; None where nobody is.
        spares: Host names of the nodes that waited when it began.
        peers: By node rank, the host that has copies of each node's state; none without
            copies.
        switches: By node rank, what each hangs on; "" for not known, none where none is.
        lost_nodes: Those that were lost in it, spares too.
        out_of_step: Which ranks do not call equally many collectives; None for none.
        memory: How often it copies its state into memory; None where it has not said so.
        read_from: Where the state came from, "memory", "peer" (another node's) or "disk"; ""
            where nothing was restored.
        still: Stretches in which nothing moved, in the order in which they were recorded.
        suspended: Those in which the scheduler had suspended its job.
        restart_pause_s: How long the ranks of the next one in its allocation wait after its
            end.
    """

    number: int
    first_t: float
    last_t: float
    submission: int = 0
    resume: int = -1
    submitted_job: str = ""
    job_id: str = ""
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    world_size: int = 0
    cpus: tuple[str, ...] = ()
    by: str = ""
    started: float | None = None
    begun: float | None = None
    device: str = ""
    initialised: bool = False
    mesh: facts.MeshBuilt | None = None
    restored: float | None = None
    restore_s: float | None = None
    restored_step: int | None = None
    own_loop: bool = False
    from_world_size: int | None = None
    from_checkpoint: str | None = None
    skipped: tuple[Skipped, ...] = ()
    resumed: facts.ResumeChosen | None = None
    first_step: float | None = None
    base: tuple[float, float] = (0.0, 0.0)
    marks: list[StepMark] = field(default_factory=list)
    marks_before: int = 0
    saves: list[SaveRecord] = field(default_factory=list)
    stop_cause: str | None = None
    stopping: float | None = None
    left: float | None = None
    failed: float | None = None
    failure: Failure | None = None
    ended: float | None = None
    witnessed: float | None = None
    ended_at: float | None = None
    gave_way: float | None = None
    heard: float | None = None
    last_step: int | None = None
    highest_step: int | None = None
    last_saved_step: int | None = None
    end_step: int | None = None
    reason: EndReason | None = None
    next: Next | None = None
    detail: str = ""
    ended_by: str = ""
    stopped_for_good: str | None = None
    stuck: str | None = None
    went_back: bool = False
    awaited: facts.RanksAwaited | None = None
    hang: facts.HangSuspected | facts.HangFound | None = None
    straggler: facts.StragglerFound | None = None
    spares: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    lost_nodes: list[facts.NodeLost] = field(default_factory=list)
    out_of_step: facts.RanksOutOfStep | None = None
    memory: facts.MemoryCopiesSet | None = None
    read_from: str = ""
    still: list[StillStretch] = field(default_factory=list)
    suspended: list[StillStretch] = field(default_factory=list)
    restart_pause_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether an end is on record."""
        return self.reason is not None

    @property
    def restoring(self) -> float | None:
        """When its ranks began to look for a checkpoint."""
        return None if self.restored is None else self.restored - (self.restore_s or 0.0)

    @property
    def began(self) -> float:
        """When its ranks were about to start, or it was first heard of."""
        return self.first_t if self.started is None else self.started

    @property
    def ran_in(self) -> str:
        """Its job; where its beginning is torn, the newest that was submitted."""
        return self.submitted_job if self.started is None else self.job_id

    @property
    def last_heard(self) -> float:
        """When it was last heard of, by itself or by those who wrote its end."""
        return self.last_t if self.heard is None else max(self.last_t, self.heard)

    @property
    def reports_steps(self) -> bool:
        """Whether it told where it stands: a program may train and tell nothing of it."""
        return self.highest_step is not None or self.first_step is not None

    def moved(self, step: int | None) -> None:
        """It is known to have done this step."""
        if step is not None:
            self.last_step = max(step, self.last_step or 0)
            self.highest_step = max(step, self.highest_step or 0)


MAY_WORK = frozenset({"behind", "unknown"})
"""Kinds of suspicion under which the one who was waited for may have computed all the time."""


def stands(attempt: AttemptRecord, t: float, fact: facts.HangSuspected | facts.HangFound) -> None:
    """The attempt's ranks were found to stand, or to hang."""
    if not attempt.still or attempt.still[-1].end is not None:
        attempt.still.append(StillStretch(t - (fact.stood_s or 0.0)))


def goes_on(attempt: AttemptRecord, t: float) -> None:
    """Something of the attempt moves again."""
    if not attempt.still or attempt.still[-1].end is not None:
        return
    start, fact = attempt.still.pop().start, attempt.hang
    if fact is not None and (fact.kind == "hang" or fact.kind_of not in MAY_WORK):
        attempt.still.append(StillStretch(start, t))


def awaited_in_vain(attempt: AttemptRecord, t: float, fact: facts.RanksAwaited) -> None:
    """Ranks that did nothing any more were ended, so that the attempt could end."""
    if fact.ended and fact.quiet_s:
        goes_on(attempt, t)
        attempt.still.append(StillStretch(t - fact.quiet_s, t))


def suspended(attempt: AttemptRecord, t: float, fact: facts.JobSuspended) -> None:
    """The attempt's job continues after its scheduler had suspended it."""
    if fact.seconds:
        attempt.suspended.append(StillStretch(t - fact.seconds, t))


class StoodStill(NamedTuple):
    """A stretch in which nothing moved, with both of its ends.

    Attributes:
        start: Seconds since the epoch.
        end: The same.
        suspended: The scheduler had suspended the job; else ranks hung, or did not end.
    """

    start: float
    end: float
    suspended: bool


def within(attempt: AttemptRecord, start: float, end: float) -> list[StoodStill]:
    """The attempt's stretches between two moments, in order and apart; some last to the end.

    A suspension comes first: ranks that stood in it were found to stand, and that was no hang.
    """
    suspended = _apart(attempt.suspended, start, end)
    out = [StoodStill(*stretch, suspended=True) for stretch in suspended]
    for stretch in _apart(attempt.still, start, end):
        out += [StoodStill(*rest, suspended=False) for rest in _outside(stretch, suspended)]
    return sorted(out)


def _apart(
    stretches: Sequence[StillStretch], start: float, end: float
) -> list[tuple[float, float]]:
    apart: list[tuple[float, float]] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        first = max(stretch.start, apart[-1][1] if apart else start)
        last = end if stretch.end is None else min(stretch.end, end)
        if first < last:
            apart.append((first, last))
    return apart


def _outside(
    stretch: tuple[float, float], others: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    begin, end = stretch
    for first, last in others:
        if begin < min(first, end):
            yield begin, min(first, end)
        begin = max(begin, last)
    if begin < end:
        yield begin, end


def moved_by(t: float, still: Sequence[tuple[float, float]]) -> float:
    """A moment by a clock that stands while nothing moves."""
    return t - sum(min(end, t) - start for start, end in still if start < t)


def spread(
    start: float, end: float, still: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """A stretch by that clock as real ones: all of it that lies between those of `still`."""
    stood_s, real, bound = 0.0, start, end
    for first, last in still:
        bound = first
        if end <= first - stood_s:
            break
        if real < first:
            yield real, first
        stood_s += last - first
        real, bound = max(last, start + stood_s), end + stood_s
    if real < (real_end := min(end + stood_s, bound)):
        yield real, real_end
