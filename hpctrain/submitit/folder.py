"""The files of a job: in its run's folder, and under submitit's names in the executor's.

They lie in the run, which nobody else can write, and before the job's number is known; a number may
come again. tests/unit/submitit/test_folder.py holds the promises.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from submitit.core import utils

from hpctrain.core.base.files import read_plain, replace_text

if TYPE_CHECKING:
    from pathlib import Path

    from submitit.core.utils import DelayedSubmission, JobPaths

    from hpctrain.ledger.run.layout import RunDir

FOLDER = "submitit"


@dataclass(frozen=True)
class SavedState:
    """Which pickles a start goes on from; written whole, when all of them are there.

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
        """What the next start goes on from."""
        try:
            return SavedState(**json.loads(read_plain(self.state)))
        except FileNotFoundError:
            return SavedState()

    def commit(self, state: SavedState) -> None:
        """From now on starts go on from this; older pickles are removed."""
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
    """Pickle a value; the file is there whole or not at all, whoever was killed before."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        utils.cloudpickle_dump(value, staged)
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
