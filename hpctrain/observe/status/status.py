"""The status of a run, from its ledger, its heartbeat and its scheduler's answer. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.mesh import Mesh
from hpctrain.core.base.records import JobInfo, JobStart, JobState, Skipped
from hpctrain.ledger.history.attempts import AttemptView, attempts
from hpctrain.ledger.history.goodput import Goodput, goodput, window
from hpctrain.ledger.history.incidents import Survived, survived
from hpctrain.ledger.history.progress import (
    Progress,
    Reported,
    Saving,
    Speed,
    StepsLost,
    listens,
    progress,
    reported,
    saving,
    speed,
    steps_lost,
)
from hpctrain.ledger.history.run_state import LedgerState, RunState, run_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.ledger.history.evaluations import EvaluationView
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import Failure
    from hpctrain.observe.status.finish import Finish

ALIVE = frozenset(
    {
        *(RunState.PENDING, RunState.RUNNING, RunState.SUSPENDED, RunState.REQUEUED),
        RunState.COMPLETING,
    }
)
UNDER_WAY_STATES = ALIVE | {RunState.SUBMITTING}
DAY_S = 86_400.0
UNDER_WAY = 75
"""Exit status of `status --exit-status` while nothing is decided."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint that could be loaded.

    Attributes:
        name: Its folder's; the path of one of the program's own.
        step: Updates applied; None for a sealed one of which nobody knows.
        t: When it was saved.
        size_bytes: Its size.
    """

    name: str
    step: int | None
    t: float | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class Answer:
    """What the scheduler said about the run's newest job.

    Attributes:
        job: None when it knows of none.
        asked: False where there was no answer.
        problem: Why there was none.
        note: What a user must know of the job, e.g. that it is another run's.
        unaccounted: Why accounting told nothing of the run's jobs, where it should have.
    """

    job: JobInfo | None = None
    asked: bool = True
    problem: str = ""
    note: str = ""
    unaccounted: str = ""


@dataclass(frozen=True)
class AttemptMesh:
    """How the newest attempt's ranks stand; only a program that uses an engine of ours says so."""

    engine: str
    mesh: Mesh
    nodes: Sequence[str]
    ranks_per_node: int


@dataclass(frozen=True)
class Link:
    """A run of a chain, in which runs wait for each other, as the others see it.

    `words` are more of its state without anything that ages; `label` names it in a command.
    """

    run: str
    run_dir: str
    state: RunState
    job_id: str | None
    after: Sequence[str]
    words: str
    label: str


@dataclass(frozen=True)
class RunStatus:
    """Everything that `hpctrain status RUN` shows."""

    name: str
    root: str
    state: RunState
    ledger_state: LedgerState
    progress: Progress
    answer: Answer
    cluster: str
    attempts: Sequence[AttemptView]
    checkpoint: Checkpoint | None
    skipped: Sequence[Skipped]
    saving: Saving
    mesh: AttemptMesh | None
    """Of the newest attempt; None where it has not said so."""
    cpus: Sequence[str]
    """Of each rank of a node in the newest attempt, as its first node has bound them; or empty."""
    failure: Failure | None
    failure_log: str
    label: str
    """How the user can name the run in the next command."""
    now: float = field(default_factory=clock.now)
    goodput: Goodput = field(default_factory=Goodput)
    day: Goodput = field(default_factory=Goodput)
    """The same for the last 24 hours."""
    speed: Speed | None = None
    """None if no step was reported lately."""
    disk_free_bytes: int | None = None
    """Room left where the checkpoints go."""
    verified: Mapping[str, float] = field(default_factory=dict)
    """Checkpoints of which a person has had every byte read, and when."""
    reported: Reported = field(default_factory=Reported)
    """What its program has told, and so what can be known."""
    image: str = ""
    """In which its ranks run."""
    listens: bool = False
    """Whether the newest attempt's program is known to see requests."""
    after: Sequence[str] = ()
    """Directories of the runs that must be done before this one begins."""
    has_begun: bool = False
    """Whether ranks were started, ever; then it waits for no other run any more."""
    chain: Sequence[Link] = ()
    """Itself and all runs before and behind it, in order; empty where there are no others."""
    evaluations: Sequence[EvaluationView] = ()
    """Of its checkpoints, the newest first."""
    incidents: Survived = field(default_factory=Survived)
    """What it has survived, and what guards it."""
    finish: Finish | None = None
    """When it will be done; None where it neither waits nor runs, or reports no step."""

    @property
    def newest(self) -> AttemptView | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def under_way(self) -> AttemptView | None:
        """The newest attempt, if its end is not on record."""
        return None if self.newest is None or self.newest.ended is not None else self.newest

    @property
    def awaited(self) -> list[Link]:
        """The runs that are not done, for which it waits."""
        if self.has_begun or self.state not in {RunState.PENDING, RunState.CREATED}:
            return []
        before = (link for link in self.chain if link.run_dir in self.after)
        return [link for link in before if link.state is not RunState.DONE]

    @property
    def awaits_in_vain(self) -> list[Link]:
        """Those of them that will not be done by themselves."""
        return [link for link in self.awaited if link.state not in UNDER_WAY_STATES]

    @property
    def step_s(self) -> float | None:
        """Seconds of a step lately; None where no step was reported."""
        now = self.speed
        return 1 / now.steps_per_s if now is not None and now.steps_per_s else self.progress.step_s

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at this speed; None where nobody knows, and where it is done."""
        step, total, each = self.progress.step, self.progress.total, self.step_s
        if step is None or total is None or step >= total or not each:
            return None
        return (total - step) * each

    @property
    def steps_lost(self) -> StepsLost:
        """Of all attempts."""
        return steps_lost(self.attempts, self.reported)


def status_of(
    history: RunHistory,
    answer: Answer,
    *,
    name: str,
    root: str = "",
    cluster: str = "",
    image: str = "",
    total: int | None = None,
    checkpoint: Checkpoint | None = None,
    skipped: Sequence[Skipped] = (),
    attempt_log: Callable[[int, int], Path] | None = None,
    starts: Sequence[JobStart] = (),
    evaluations: Sequence[EvaluationView] = (),
    disk_free_bytes: int | None = None,
    after: Sequence[str] = (),
    label: str = "",
    now: float | None = None,
) -> RunStatus:
    """Put together what is known of a run.

    `skipped` are newer checkpoints that could not be loaded; those that an attempt passed over are
    added. `total` counts where the ledger does not know it.
    """
    state = run_state(history.state, answer.job, asked=answer.asked)
    moment = clock.now() if now is None else now
    gone = state not in {RunState.RUNNING, RunState.SUSPENDED, RunState.COMPLETING}
    done = attempts(history, starts, gone=gone)
    until = _counted_until(history, starts, state, moment)
    spent = goodput(
        history, starts=starts, now=until, gone=gone, suspended_at=_suspended_at(history, answer)
    )
    run_progress = progress(history)
    if run_progress.total is None:
        run_progress = replace(run_progress, total=total)
    failure = next((one.failure for one in reversed(done) if one.failure is not None), None)
    log = ""
    if failure is not None and attempt_log is not None and failure.rank is not None:
        log = str(attempt_log(failure.attempt, failure.rank))
    return RunStatus(
        name=name,
        root=root,
        state=state,
        ledger_state=history.state,
        progress=run_progress,
        answer=answer,
        cluster=cluster,
        image=image,
        attempts=done,
        checkpoint=checkpoint,
        skipped=passed_over(history, done, skipped),
        saving=saving(history),
        mesh=attempt_mesh(history),
        cpus=history.newest.cpus if history.newest is not None else (),
        failure=failure,
        failure_log=log,
        label=label or shlex.quote(name),
        now=moment,
        goodput=spent,
        day=window(spent, moment - DAY_S),
        speed=speed(history),
        disk_free_bytes=disk_free_bytes,
        verified=dict(history.verified),
        reported=reported(history, now=moment if not gone else None),
        listens=listens(history),
        after=after,
        has_begun=history.has_begun,
        incidents=survived(history),
        evaluations=evaluations,
        finish=_finish(history, answer, state, total, moment),
    )


def _finish(
    history: RunHistory, answer: Answer, state: RunState, total: int | None, now: float
) -> Finish | None:
    """When a run will be done that waits or runs and reports steps."""
    running = state is RunState.RUNNING
    waits = state in {RunState.PENDING, RunState.REQUEUED}
    if not (running or waits) or not any(one.reports_steps for one in history.attempts):
        return None
    from hpctrain.observe.status.finish import (
        finish,
    )  # 0.1 s, which a run that is over does without

    return finish(history, answer.job, running=running, now=now, total_steps=total)


def with_heartbeat(status: RunStatus, t: float, step: int) -> RunStatus:
    """The status with what its newest attempt's heartbeat knows better: step and sign of life.

    Step marks are far apart, so that a long run's ledger stays small; the heartbeat is seconds old.
    """
    newest = status.under_way
    if newest is None:
        return status
    before = status.progress
    seen = max(t, before.seen or 0.0)
    done = max(step, newest.last_step or 0)
    attempts = [*status.attempts[:-1], replace(newest, last_step=done)]
    return replace(
        status,
        progress=replace(before, seen=seen, step=done),
        attempts=attempts,
        reported=status.reported.heard_of(newest.number),
    )


def exit_status(status: RunStatus) -> int:
    """For scripts: 0 done or stopped as asked, 75 still under way, 93 stopped for good, else 1."""
    if status.state in {RunState.DONE, RunState.STOPPED}:
        return status.ledger_state.exit_code or 0
    return UNDER_WAY if status.state in UNDER_WAY_STATES else 1


def _counted_until(
    history: RunHistory, starts: Sequence[JobStart], state: RunState, now: float
) -> float:
    """How far time counts: of a run that nobody runs any more, to the last that is known of it."""
    if history.last_t is None or state in UNDER_WAY_STATES:
        return now
    moments = [t for one in starts for t in (one.start, one.end) if t is not None]
    return min(now, max([history.last_t, *moments]))


def _suspended_at(history: RunHistory, answer: Answer) -> float | None:
    """Since when its job is suspended; where nobody says, since the newest sign of life."""
    job = answer.job
    if job is None or job.state != JobState.SUSPENDED or history.newest is None:
        return None
    return history.newest.last_heard if job.suspended_at is None else job.suspended_at


def attempt_mesh(history: RunHistory) -> AttemptMesh | None:
    """The mesh that the newest attempt's ranks have made, as far as they have come."""
    newest = history.newest
    if newest is None or newest.mesh is None:
        return None
    mesh_fact = newest.mesh
    mesh = Mesh(**{f.name: max(1, getattr(mesh_fact, f.name) or 1) for f in fields(Mesh)})
    return AttemptMesh(mesh_fact.engine, mesh, newest.nodes, max(1, mesh_fact.ranks_per_node or 1))


def passed_over(
    history: RunHistory, done: Sequence[AttemptView], on_disk: Sequence[Skipped] = ()
) -> list[Skipped]:
    """Checkpoints that were not taken, each with its first reason, the highest step first."""
    skipped = [checkpoint for attempt in done for checkpoint in attempt.skipped]
    by_name: dict[str, Skipped] = {}
    for checkpoint in [*skipped, *history.set_aside, *on_disk]:
        by_name.setdefault(checkpoint.name, checkpoint)
    return sorted(by_name.values(), key=lambda checkpoint: (-checkpoint.step, checkpoint.name))
