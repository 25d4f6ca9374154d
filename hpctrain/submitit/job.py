"""submitit's job: its state is its run's (the ledger's word before the scheduler's); its files.

A job's files lie in its run's folder; links in the executor's folder have submitit's names.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from submitit.core import core, utils

from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base import clock
from hpctrain.core.base.files import read_plain, replace_text
from hpctrain.core.base.records import JobState
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.ledger.history.run_state import OVER, RunState, run_state
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from submitit.core.utils import DelayedSubmission, JobPaths

    from hpctrain.ledger.history.run_history import RunHistory

R = TypeVar("R", covariant=True)  # noqa: PLC0105 - submitit's own name of it

LOST_S = 60.0
"""Between two starts of a job a scheduler may not know it; one that stays away longer is gone."""
LOST, UNKNOWN = "LOST", "UNKNOWN"
_WORDS = {
    RunState.CREATED: JobState.PENDING,
    RunState.SUBMITTING: JobState.PENDING,
    RunState.DONE: JobState.COMPLETED,
    RunState.STOPPED: JobState.FAILED,
}
"""SLURM's words, which submitit uses; the other states have the same name."""


class RunWatcher(core.InfoWatcher):
    """Looks at the runs of one folder; of those that are not over one question is asked for all."""

    def __init__(self, folder: Path, delay_s: int = 30) -> None:
        super().__init__(delay_s=delay_s)
        self._folder = folder
        self._lost_since: dict[str, float] = {}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """The state in SLURM's words; UNKNOWN where nobody can say."""
        return self.get_info(job_id, mode=mode).get("State") or UNKNOWN

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether a job is over; submitit's own takes a suspended one for done, for good."""
        is_suspended = self.get_state(job_id, mode) == JobState.SUSPENDED
        return not is_suspended and super().is_done(job_id, mode="cache")

    def update(self) -> None:
        """Look at every job that is not over."""
        from hpctrain.ledger.history.run_history import RunHistory

        self._num_calls += 1
        waiting: dict[str, dict[str, tuple[RunDir, RunHistory]]] = {}
        for job_id in sorted(self._registered - self._finished):
            run = run_of(self._folder, job_id)
            if run is None:
                continue
            history = RunHistory.read(run, marks="few")
            if history.state.phase in OVER:
                self._note(job_id, history.state.phase, history)
            elif not run.spec.exists():  # somebody has removed the run
                self._note(job_id, RunState.LOST, history)
            else:
                waiting.setdefault(_cluster_of(run), {})[job_id] = run, history
        for cluster, jobs in waiting.items():
            self._ask(cluster, jobs)
        self._last_status_check = clock.now()
        self._finished |= {one for one in self._registered if self.is_done(one, mode="cache")}

    def _ask(self, cluster: str, jobs: dict[str, tuple[RunDir, RunHistory]]) -> None:
        from hpctrain.observe.status.reader import ask

        ids = [history.state.job_id or job_id for job_id, (_, history) in jobs.items()]
        scheduler = get_cluster(cluster).bulk_query(ids)
        for job_id, (run, history) in jobs.items():
            answer = ask(run, cluster, history, scheduler)
            state = run_state(history.state, answer.job, asked=answer.asked)
            self._note(job_id, state, history)

    def _note(self, job_id: str, state: RunState, history: RunHistory) -> None:
        if state is RunState.LOST:
            since = self._lost_since.setdefault(job_id, clock.now())
            word = LOST if clock.now() - since > LOST_S else UNKNOWN
        else:
            self._lost_since.pop(job_id, None)
            word = (_WORDS.get(state) or JobState[state.name]).value
        if state is RunState.STOPPED and history.state.cancel:
            word = JobState.CANCELLED.value
        nodes = history.newest.nodes if history.newest is not None else ()
        self._info_dict[job_id] = {"JobID": job_id, "State": word, "NodeList": ",".join(nodes)}


_watchers: dict[str, RunWatcher] = {}


class Job(core.Job[R]):
    """A job of an executor of ours; submitit's own in all but where its state comes from."""

    watcher: core.InfoWatcher

    def _register_in_watcher(self) -> None:
        folder = self._paths._folder  # noqa: SLF001 - with its %j: one watcher for all its jobs
        self.watcher = _watchers.setdefault(str(folder), RunWatcher(folder))
        super()._register_in_watcher()

    @property
    def run(self) -> Path:
        """The directory of the job's run, for hpctrain's commands and functions.

        Raises:
            UsageError: this job has none.
        """
        run = run_of(self._paths._folder, self.job_id)  # noqa: SLF001 - as above
        if run is None:
            raise UsageError(f"job {self.job_id} is no run: {run_link(self.paths)} is not there")
        return run.root

    def cancel(self, check: bool = True) -> None:
        """Cancel the job.

        `check`: an error is raised where it cannot be cancelled.
        """
        from hpctrain.cli.api import cancel

        with contextlib.nullcontext() if check else contextlib.suppress(HpctrainError):
            run = self.run
            with contextlib.suppress(*([UsageError] if self.done(force_check=True) else [])):
                cancel(str(run))

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the signal of a preemption, or of a time limit that is near, to rehearse it."""
        get_cluster(_cluster_of(RunDir(self.run))).rehearse(self.job_id, time_limit=timeout)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "watcher"}


def run_of(folder: Path, job_id: str) -> RunDir | None:
    """The run of a job; None where the folder has none of that number."""
    link = run_link(utils.JobPaths(folder, job_id=job_id))
    return RunDir(link.resolve()) if link.is_symlink() else None


def _cluster_of(run: RunDir) -> str:
    from hpctrain.core.settings.spec import load_spec

    return load_spec(run.spec).cluster


def cancel_all(jobs: Sequence[core.Job[Any]]) -> None:
    """End what was started of an array of which the rest was refused."""
    for job in jobs:
        job.cancel(check=False)


FOLDER = "submitit"


@dataclass(frozen=True)
class SavedState:
    """Which pickles a start resumes from; written whole, when all of them are there.

    Attributes:
        attempt: The attempt that wrote them; 0 for what was submitted.
        ranks: How many there are: one for each rank, or one for all.
        timeouts: How many time limits the job has met.
    """

    attempt: int = 0
    ranks: int = 1
    timeouts: int = 0


@dataclass(frozen=True)
class JobFiles:
    """Where a run keeps what submitit keeps of a job."""

    folder: Path

    @classmethod
    def of(cls, run: RunDir) -> JobFiles:
        """Those of a run."""
        return cls(run.root / FOLDER)

    def pickle(self, attempt: int = 0, rank: int = 0) -> Path:
        """The call, as it was submitted, or as a rank has saved it in an attempt."""
        return self.folder / f"call-{attempt:04d}-{rank:05d}.pkl"

    def result(self, rank: int) -> Path:
        """What a rank's call has given or raised."""
        return self.folder / f"result-{rank:05d}.pkl"

    def stdout(self, rank: int) -> Path:
        """What a rank has written, over all attempts."""
        return self.folder / f"log-{rank:05d}.out"

    def stderr(self, rank: int) -> Path:
        """What a rank has written as errors, over all attempts."""
        return self.folder / f"log-{rank:05d}.err"

    def stop(self, attempt: int) -> Path:
        """Appears when the ranks of an attempt must leave: {"cause"}."""
        return self.folder / f"stop-{attempt:04d}.json"

    @property
    def state(self) -> Path:
        """A `SavedState`, once something was saved."""
        return self.folder / "state.json"

    def saved_state(self) -> SavedState:
        """What the next start resumes from."""
        try:
            return SavedState(**json.loads(read_plain(self.state)))
        except FileNotFoundError:
            return SavedState()

    def commit(self, state: SavedState) -> None:
        """From now on starts resume from this; older pickles are removed."""
        replace_text(self.state, json.dumps(asdict(state)))
        for path in self.folder.glob("call-*.pkl"):
            if int(path.name.split("-")[1]) not in {0, state.attempt}:
                path.unlink(missing_ok=True)

    def load(self, rank: int) -> DelayedSubmission:
        """The call that a rank is to make."""
        state = self.saved_state()
        own = self.pickle(state.attempt, rank if rank < state.ranks else 0)
        return utils.DelayedSubmission.load(own)

    def link(self, paths: JobPaths, run: RunDir, script: Path, ranks: int) -> None:
        """Make the files visible under the names that submitit gives them."""
        folder = paths.folder
        folder.mkdir(parents=True, exist_ok=True)
        names = {
            paths.submitted_pickle: self.pickle(),
            paths.submission_file: script,
            run_link(paths): run.root,
        }
        for rank in range(ranks):
            own = utils.JobPaths(folder, job_id=paths.job_id, task_id=rank)
            names |= {own.result_pickle: self.result(rank), own.stdout: self.stdout(rank)}
            names[own.stderr] = self.stderr(rank)
        for name, target in names.items():
            staged = name.with_name(f".{name.name}.{os.getpid()}")
            staged.symlink_to(os.path.relpath(target, folder))
            staged.replace(name)  # an older job may have had the number


def run_link(paths: JobPaths) -> Path:
    """The link that leads from a job to its run."""
    return paths.folder / f"{paths.job_id}_run"


def dump(value: Any, path: Path) -> None:
    """Pickle a value; the file is there complete or not at all, also after a kill."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        utils.cloudpickle_dump(value, staged)
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
