"""SLURM's word on very many jobs: one question to slurmctld, one to accounting, however many.

`hpctrain status` looks at every run there is; two questions for each would be a storm, for which
sites block users. tests/unit/test_status_questions.py holds the promises.
"""

from __future__ import annotations

import os
import threading
from pathlib import PurePath
from typing import TYPE_CHECKING

from hpctrain.errors import AccountingSilent, ClusterError
from hpctrain.scheduler.slurm.client import SlurmCluster
from hpctrain.scheduler.slurm.jobs import accounted_job, is_alive, job_starts, queued_job
from hpctrain.scheduler.slurm.parse import SURVEY_FORMAT, parse_survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.base.records import JobInfo, JobStart
    from hpctrain.scheduler.slurm.parse import AccountRow


class Survey(SlurmCluster):
    """Answers about this user's jobs from what it has asked once; safe for several threads."""

    def __init__(self, job_ids: Sequence[str], *, query_timeout_s: float) -> None:
        """Ask nothing yet.

        Args:
            job_ids: All that accounting may be asked about.
            query_timeout_s: Of each of the two questions.
        """
        super().__init__(query_timeout_s=query_timeout_s)
        self._job_ids = job_ids
        self._lock = threading.Lock()
        self._queue: list[JobInfo] | ClusterError | None = None
        self._rows: list[AccountRow] | ClusterError | None = None

    def job(self, job_id: str) -> JobInfo | None:
        """As `SlurmCluster.job`."""
        queued = next((one for one in self._queued() if one.job_id == job_id), None)
        if queued is not None:
            return queued
        try:
            return accounted_job([row for row in self._accounted_rows() if row.job_id == job_id])
        except ClusterError as error:
            raise AccountingSilent(str(error)) from error

    def find_job(self, token: str) -> JobInfo | None:
        """As `SlurmCluster.find_job`."""
        found = [one for one in self._queued() if PurePath(one.script).name == f"{token}.sh"]
        return max(found, key=lambda one: is_alive(one.state), default=None)

    def starts(self, job_ids: Sequence[str]) -> list[JobStart]:
        """As `SlurmCluster.starts`."""
        return job_starts([row for row in self._accounted_rows() if row.job_id in set(job_ids)])

    def _queued(self) -> list[JobInfo]:
        with self._lock:
            if self._queue is None:
                squeue = ("squeue", "--noheader", "--states=all", f"--user={os.getuid()}")
                try:
                    rows = parse_survey(self._run(*squeue, f"--format={SURVEY_FORMAT}"))
                    self._queue = [queued_job(row) for row in rows]
                except ClusterError as error:
                    self._queue = error
            if isinstance(self._queue, ClusterError):
                raise self._queue
            return self._queue

    def _accounted_rows(self) -> list[AccountRow]:
        with self._lock:
            if self._rows is None:
                try:
                    self._rows = self._rows_of(self._job_ids) if self._job_ids else []
                except ClusterError as error:
                    self._rows = error
            if isinstance(self._rows, ClusterError):
                raise self._rows
            return self._rows
