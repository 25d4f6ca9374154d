"""submitit's interface, with hpctrain's rules for requeueing: `from hpctrain import submitit`.

Each job is a run: `hpctrain status`, `logs`, `cancel` and `resume` know it. What is the same and
what differs: docs/api.md. tests/unit/submitit and tests/slurm/test_submitit.py hold the
promises.
"""

from __future__ import annotations

from submitit import helpers
from submitit.core.core import Executor
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import (
    FailedJobError,
    FailedSubmissionError,
    JobPaths,
    UncompletedJobError,
)

from hpctrain.submitit.executor import AutoExecutor, LocalExecutor, SlurmExecutor
from hpctrain.submitit.job import Job

__all__ = [
    "AutoExecutor",
    "Executor",
    "FailedJobError",
    "FailedSubmissionError",
    "Job",
    "JobEnvironment",
    "JobPaths",
    "LocalExecutor",
    "SlurmExecutor",
    "UncompletedJobError",
    "helpers",
]
