"""The evaluations of a run's checkpoints: which are made, submitted and said to be over.

Each is a run of its own in ``RUN/evaluations``, with a ledger, attempts and requeues of its own. So
that it is made once and survives what a run survives is what runs promise already. `advance` is
called by a process of the run (a watcher beside its ranks, the end of its job
and of each evaluation's, a command), any number of times, and may die at any point: under a lock of
its own it looks at what there is, and does what is left to do. Training never waits for it.

tests/unit/submit/test_evaluations.py and tests/slurm/test_evaluate.py hold the promises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.store import find, retention
from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base import clock, locks
from hpctrain.core.base.files import make_private_folder, make_run_folder
from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import Evaluates, Spec
from hpctrain.errors import (
    AccountingSilent,
    CheckpointError,
    ClusterError,
    HpctrainError,
    NotFound,
    RunAlive,
    RunLocked,
)
from hpctrain.launch.after import EVALUATE, side_spec
from hpctrain.launch.launch import kept_out, launch
from hpctrain.launch.live_job import copied_from
from hpctrain.ledger.history.evaluations import evaluations_of, waiting
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import Evaluated, EvaluationAsked
from hpctrain.ledger.run.fence import look_anew
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.results import read_results, write_curves

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("hpctrain.submit")

LOCK_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 900.0
"""Before a submission that was refused is tried again; twice as long after each refusal."""
_NAME = re.compile(r".+-eval-(\d{1,15})")
_NEWS = frozenset({"failed", "stopped"})
"""What somebody is notified of: the end of every evaluation would be noise."""


@dataclass
class Advanced:
    """What one look at a run's evaluations has found and done, by step.

    Attributes:
        alive: Those that wait or run, with their job; also the ones that were submitted now.
        submitted: Which of them were submitted now.
        said: What was written down about ended ones, and about checkpoints that are gone.
        refused: Those that could not be submitted, and why; the next look tries again.
        left: Those that wait for their turn, ascending.
    """

    alive: dict[int, str] = field(default_factory=dict)
    submitted: list[int] = field(default_factory=list)
    said: list[Evaluated] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)


def advance(
    run: RunDir,
    spec: Spec,
    *,
    of: int | None = None,
    insist: bool = False,
    dry: bool = False,
    asked: int | None = None,
) -> Advanced:
    """Make and submit what is due, the newest first, and write down what is over.

    Args:
        run: The run whose checkpoints are evaluated.
        spec: Its own.
        of: Look at this step's evaluation too, though its end was written down before: it may have
            been resumed.
        insist: Submit also what was refused a moment ago.
        dry: Write and submit nothing.
        asked: A step that is taken as due, for a dry look.

    Raises:
        RunLocked: another process has kept the lock for too long.
        HpctrainError: the run cannot be read or written.
    """
    with _locked(run):
        work = _EvaluationLook(run, spec, insist=insist, dry=dry)
        work.ask(asked)
        work.look(of)
        work.start()
        work.draw()
        work.prune()
        return work.done


def look_after(run: RunDir, spec: Spec) -> list[str]:
    """The same where a user has come for something else; what he should know of it, if anything.

    What could not be submitted from a job can be from here.
    """
    try:
        done = advance(run, spec, insist=True)
    except (HpctrainError, OSError) as error:
        return [f"checkpoints are not evaluated just now: {error}"]
    notes = [
        f"step {step} is evaluated by job {done.alive[step]}, which waited to be submitted"
        for step in done.submitted
    ]
    return notes + [
        f"the evaluation of step {step} could not be submitted: {why}"
        for step, why in done.refused.items()
    ]


def ask_again(evaluates: Evaluates) -> None:
    """Write into the evaluated run's ledger that an evaluation is repeated: it is awaited again.

    Raises:
        NotFound: its checkpoint is gone.
        HpctrainError: the ledger cannot be written.
    """
    run, step = RunDir(Path(evaluates.run)), evaluates.step
    if not find.step_path(run, step).is_dir():
        raise NotFound(
            f"step {step} of {run.name} is no longer there: it was pruned or set aside, and cannot "
            "be evaluated again"
        )
    try:
        ledger.append(run, EvaluationAsked(step=step))
    except OSError as error:
        raise CheckpointError(
            f"{run.events} cannot be written, so the checkpoint could be pruned: {error.strerror}"
        ) from error


@contextlib.contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    path = run.root / "evaluations.lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.held(path, LOCK_S))
        except TimeoutError as error:
            raise RunLocked(f"{path} has been held by another process for {LOCK_S:g} s") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be locked: {error.strerror}") from error
        look_anew(run.root, run.evaluations, run.checkpoints)
        yield


class _EvaluationLook:
    """One look, under the lock."""

    def __init__(self, run: RunDir, spec: Spec, *, insist: bool, dry: bool) -> None:
        self._run, self._spec = run, spec
        self._insist, self._dry = insist, dry
        self._cluster = get_cluster(spec.cluster)
        self._history = RunHistory.read(run, marks="few")
        self._children = children(run)
        self._unanswered: set[int] = set()
        self._paused: set[int] = set()
        self.done = Advanced()

    def ask(self, step: int | None) -> None:
        """Take a step as due."""
        if step is not None:
            self._history.asked_evaluations.add(step)

    def look(self, of: int | None) -> None:
        """Find out what became of the evaluations that there are."""
        for step, child in self._children.items():
            if step in self._history.evaluations and step != of:
                continue
            history = RunHistory.read(child, marks="few")
            if copied_from(child, history) is not None:
                continue  # its job is the original's
            if _is_refused(history) or history.state.phase is RunState.CREATED:
                if not self._insist and not _may_try(history, clock.now()):
                    self._paused.add(step)
            elif history.state.phase is RunState.SUBMITTING:
                self._unanswered.add(step)
            elif self._is_alive(history):
                self.done.alive[step] = history.state.job_id or ""
            else:
                self._record(_outcome(step, child))

    def _is_alive(self, history: RunHistory) -> bool:
        """As the scheduler sees it too: a job that was ended from outside writes no end."""
        now = history.state
        if now.phase in OVER or now.job_id is None:
            return now.phase not in OVER
        try:
            job = self._cluster.job(now.job_id)
        except AccountingSilent:  # however it ended, it writes no more
            return False
        except ClusterError:
            return True
        return job is not None and job.alive

    def _record(self, fact: Evaluated) -> None:
        if self._history.evaluations.get(fact.step) == fact:
            return
        self.done.said.append(fact)
        if not self._dry:
            ledger.append(self._run, fact)
        self._history.evaluations[fact.step] = fact

    def start(self) -> None:
        """Submit as many as may be alive, those first of which nobody knows whether they are."""
        settings = self._spec.settings.evaluate
        wanted = waiting(self._history, settings.every, last=settings.last)
        wanted = [step for step in reversed(wanted) if step not in self.done.alive]
        self.done.left = wanted[::-1]
        now = self._history.state
        if now.cancel == "cancel" or EVALUATE not in self._spec.beside:
            return
        # Of these nobody knows whether they are alive: they come before all others.
        wanted.sort(key=lambda step: step not in self._unanswered)
        for step in wanted:
            if len(self.done.alive) >= settings.at_once or step in self._paused:
                return
            if not self._is_gone(step) and not self._start(step):
                return

    def draw(self) -> None:
        """Curves for TensorBoard; where the disk refuses, the next look makes them good."""
        if self._dry or not self._history.evaluations:
            return
        try:
            write_curves(self._run)
        except OSError as error:
            log.warning("curves of evaluations were not written: %s", error)

    def prune(self) -> None:
        """Delete what was kept for its evaluation alone, once no rank 0 does so any more.

        Other checkpoints stay as the training has left them.
        """
        judged, keep = self._history.evaluations, self._spec.settings.checkpoint
        if self._dry or not judged or self._history.state.phase is not RunState.DONE:
            return
        try:
            retention.prune(
                self._run,
                retention.Rules.of(keep),
                protect=[step for step in find.steps(self._run) if step not in judged],
                evaluations=evaluations_of(self._history, self._spec.settings.evaluate),
            )
        except CheckpointError as error:
            log.warning("%s; `hpctrain checkpoints prune` does so", error)

    def _is_gone(self, step: int) -> bool:
        """Whether there is nothing to evaluate, or nobody can tell just now."""
        try:
            why = _gone(self._run, step)
        except CheckpointError as error:
            self.done.refused[step] = str(error)
            return True
        if why:
            self._record(Evaluated(step=step, why=why))
            self.done.left.remove(step)
        return bool(why)

    def _start(self, step: int) -> bool:
        """Whether it was submitted; where not, the next would fare no better."""
        try:
            job_id = "" if self._dry else self._submit(step)
        except RunAlive:  # it was submitted before, and the answer never came
            job_id = RunHistory.read(self._run.evaluation(step)).state.job_id or ""
        except HpctrainError as error:
            self.done.refused[step] = str(error)
            return False
        self.done.left.remove(step)
        self.done.alive[step] = job_id
        self.done.submitted.append(step)
        return True

    def _submit(self, step: int) -> str:
        child = self._children.get(step) or self._run.evaluation(step)
        spec = self._child_spec(step, child.name)
        make_private_folder(self._run.evaluations)
        with contextlib.suppress(FileExistsError):  # its maker died before it was complete
            make_run_folder(child.root, group=spec.settings.run.group_writable)
        bad = kept_out(self._run, spec, os.environ)
        return launch(child, spec, by="submit", exclude=list(bad))

    def _child_spec(self, step: int, name: str) -> Spec:
        spec, _ = side_spec(self._spec, EVALUATE, name=name)
        news = [word for word in spec.settings.notify.on if word in _NEWS]
        checkpoint = str(find.step_path(self._run, step))
        return replace(
            spec,
            settings=replaced(spec.settings, {"notify.on": news}),
            evaluates=Evaluates(run=str(self._run.root), step=step, checkpoint=checkpoint),
        )


def children(run: RunDir) -> dict[int, RunDir]:
    """The evaluations that there are, also those that are not whole yet, by step."""
    try:
        names = sorted(path.name for path in run.evaluations.iterdir())
    except FileNotFoundError:
        return {}
    matches = ((_NAME.fullmatch(name), name) for name in names)
    return {int(match[1]): RunDir(run.evaluations / name) for match, name in matches if match}


def _is_refused(history: RunHistory) -> bool:
    return bool(history.submissions) and history.submissions[-1].refused


def _may_try(history: RunHistory, now: float) -> bool:
    """Whether one that was refused has waited long enough to be submitted again."""
    tries = 0
    for submission in reversed(history.submissions):
        if not submission.refused:
            break
        tries += 1
    if not tries:
        return True
    pause_s = min(FIRST_PAUSE_S * 2 ** min(tries - 1, 10), LONGEST_PAUSE_S)
    return not 0 <= now - history.submissions[-1].asked < pause_s


def _gone(run: RunDir, step: int) -> str:
    """Why a checkpoint cannot be evaluated, or ""."""
    if not find.step_path(run, step).is_dir():
        return f"step {step} is no longer there: it was pruned or set aside"
    problem = find.look(run, step).problem
    return f"step {step} is damaged: {problem}" if problem else ""


def _outcome(step: int, child: RunDir) -> Evaluated:
    """What the ledger is to say of an evaluation that is over.

    Its ledger is read once more: it may have ended while the scheduler was asked.
    """
    history = RunHistory.read(child, marks="few")
    phase, newest = history.state.phase, history.newest
    if phase is RunState.DONE:
        results = read_results(child.results)
        return Evaluated(step=step, run=child.name, metrics=results.metrics, why=results.why)
    failure = newest.failure if newest is not None else None
    detail = failure.summary if failure is not None else history.state.detail
    word = str(phase) if phase in OVER else "its job has ended without a word"
    if phase not in OVER and history.state.cancel == "cancel":
        word = str(RunState.CANCELLED)
    return Evaluated(step=step, run=child.name, why=f"{word}: {detail}" if detail else word)
