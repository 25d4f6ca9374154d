"""A place for runs that are rehearsals: a folder beside the runs, and jobs that end with it.

Nothing of it stays, also where it is left by Ctrl-C: first its jobs end, then the folder goes.
tests/unit/check/test_rehearsal.py holds the promises.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hpctrain.base import clock
from hpctrain.base.env import HPCTRAIN_FAULTS, HPCTRAIN_LOCAL_DIR
from hpctrain.base.files import make_runs_folder, remove_runs_folder
from hpctrain.check.comparison import RehearsedAttempt, rehearsed
from hpctrain.errors import HpctrainError
from hpctrain.run import events as ledger
from hpctrain.scheduler.base import get_cluster
from hpctrain.submit.launch import submit_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from hpctrain.run.layout import RunDir
    from hpctrain.submit.prepare import SubmitRequest

    Enough = Callable[[list[RehearsedAttempt]], bool]

LOCAL = "local"
POLL_S = 0.1
END_S = 30.0
"""So long a job may take to end that was cancelled, before its folder goes."""
_SETS = (
    "run.log_every_s=0",
    "run.lint=false",
    "run.restarts_in_job=0",
    "checkpoint.mode=sync",
    "environment.stage=no",
    "notify.webhook_file=",
    "notify.command=",
    "evaluate.script=",
    "budget.time_limits=1",
    "budget.crashes=3",
)
_ENV = ("CUDA_VISIBLE_DEVICES=", "WANDB_MODE=offline")


class RehearsalFailed(HpctrainError):
    """A rehearsal came to no end that tells something."""


MOST_FILES = 20_000
_CHECKPOINTS = frozenset(
    {".bin", ".ckpt", ".msgpack", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tar"}
)


class RehearsalStage:
    """Runs of a program on this machine's processors. A context manager."""

    def __init__(self, request: SubmitRequest, *, patience_s: float) -> None:
        """Set nothing up yet.

        Args:
            request: The run that is to come.
            patience_s: So long may each wait take.
        """
        self._request = request
        self._patience_s = patience_s
        self._jobs: list[str] = []
        self._folder = Path()
        self._new_runs: list[Path] = []
        self._before: str | None = None

    def __enter__(self) -> Self:
        """Make the folder; local jobs of this process lie in it from now on."""
        runs = Path(os.path.normpath(self._request.cwd / self._request.runs))
        self._new_runs = [one for one in (runs, *runs.parents) if not one.exists()]
        make_runs_folder(runs)
        self._folder = Path(tempfile.mkdtemp(prefix=".rehearsal-", dir=runs))
        self._before = os.environ.get(HPCTRAIN_LOCAL_DIR)
        os.environ[HPCTRAIN_LOCAL_DIR] = str(self._folder / "jobs")
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End the jobs, then remove the folder."""
        try:
            for job_id in self._jobs:
                self.end(job_id)
        finally:
            if self._before is None:
                del os.environ[HPCTRAIN_LOCAL_DIR]
            else:
                os.environ[HPCTRAIN_LOCAL_DIR] = self._before
            shutil.rmtree(self._folder, ignore_errors=True)
            for folder in self._new_runs:
                with contextlib.suppress(OSError):  # somebody else has put something there
                    remove_runs_folder(folder)

    def start(
        self, name: str, ranks: int, *, sets: tuple[str, ...] = (), faults: str = ""
    ) -> tuple[RunDir, str]:
        """Start a run.

        Args:
            name: Of the run.
            ranks: On one node.
            sets: More settings.
            faults: What is to go wrong in it.

        Raises:
            HpctrainError: it cannot be made.
        """
        asked = self._request
        env = [*asked.env, *_ENV, *([f"{HPCTRAIN_FAULTS}={faults}"] if faults else [])]
        request = replace(
            asked,
            cluster=LOCAL,
            runs=self._folder / "runs",
            name=name,
            nodes="1",
            ranks_per_node=ranks,
            gpus_per_node=0,
            job={},
            begin="",
            without=(),
            time="0:30:00",
            site=None,
            partition=None,
            account=None,
            qos=None,
            container=None,
            snapshot=False,
            sets=[*asked.sets, *_SETS, *sets],
            env=env,
            ask_accounting=False,
        )
        submitted = submit_run(request)
        if submitted.job_id is None:
            raise RehearsalFailed(f"{name} has no job")
        self._jobs.append(submitted.job_id)
        return submitted.run, submitted.job_id

    def preempt(self, job_id: str) -> None:
        """Have a job hear of a preemption, with a grace time; it starts again after it."""
        get_cluster(LOCAL).rehearse(job_id, time_limit=False)

    def wait(self, run: RunDir, job_id: str, enough: Enough) -> list[RehearsedAttempt]:
        """The run's attempts, once there is enough of them, or once its job is over.

        Raises:
            RehearsalFailed: a rank has failed, or it took too long.
        """
        until = clock.monotonic() + self._patience_s
        while True:
            job = get_cluster(LOCAL).job(job_id)  # before the ledger: what it ended with is in it
            attempts = rehearsed(ledger.read(run))
            failure = next((one.failure for one in attempts if one.failure), "")
            if failure:
                raise RehearsalFailed(failure)
            if enough(attempts) or job is None or not job.alive:
                return attempts
            if clock.monotonic() > until:
                last = attempts[-1].last if attempts else 0
                raise RehearsalFailed(
                    f"after {self._patience_s:g} s it had come to step {last} of attempt "
                    f"{len(attempts)}; give it longer with --timeout"
                )
            clock.sleep(POLL_S)

    def has_saved(self, since: float) -> bool:
        """Whether the program has written what looks like a checkpoint into its folder.

        Args:
            since: Seconds since the epoch; older files are not meant.
        """
        seen = 0
        for folder, below, files in os.walk(self._request.cwd):
            below[:] = [name for name in below if not name.startswith(".") and name != "venv"]
            seen += len(files)
            if seen > MOST_FILES:
                return False  # a folder of data; nobody waits for a look at all of it
            for name in files:
                path = Path(folder, name)
                if path.suffix in _CHECKPOINTS and not path.is_relative_to(self._folder):
                    with contextlib.suppress(OSError):  # it is replaced at this moment
                        if path.stat().st_mtime >= since:
                            return True
        return False

    def end(self, job_id: str) -> None:
        """Cancel a job and wait for its end."""
        cluster = get_cluster(LOCAL)
        job = cluster.job(job_id)
        if job is None or not job.alive:
            return
        cluster.cancel(job_id)
        until = clock.monotonic() + END_S
        while clock.monotonic() < until:
            job = cluster.job(job_id)
            if job is None or not job.alive:
                return
            clock.sleep(POLL_S)
