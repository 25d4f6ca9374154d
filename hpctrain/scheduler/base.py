"""The choice of a scheduler: the one place that knows all of them.

Each is imported only when it is asked for, so nothing heavy comes with this module.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.base.records import Cluster, JobControl

NAMES = ("slurm", "local")


def default_cluster() -> str:
    """The one to use where none is named: slurm where there is an sbatch, else local."""
    return "slurm" if shutil.which("sbatch") else "local"


def get_cluster(name: str) -> Cluster:
    """The login node's side of a scheduler.

    Raises:
        UsageError: no such scheduler.
    """
    if name == "slurm":
        from hpctrain.scheduler.slurm.client import SlurmCluster

        return SlurmCluster()
    if name == "local":
        from hpctrain.scheduler.local.client import LocalCluster

        return LocalCluster()
    raise UsageError(f"cluster {name!r} is not known; use one of {', '.join(NAMES)}")


def get_control(name: str, job_id: str, restarts: int) -> JobControl:
    """A job's own view of its scheduler, from inside the job.

    Args:
        name: Which scheduler.
        job_id: Our own job.
        restarts: The restart count with which this process was started.

    Raises:
        UsageError: no such scheduler.
    """
    if name == "slurm":
        from hpctrain.scheduler.slurm.control import SlurmControl

        return SlurmControl(job_id, restarts=restarts)
    if name == "local":
        from hpctrain.scheduler.local.control import LocalControl

        return LocalControl(job_id)
    raise UsageError(f"cluster {name!r} is not known; use one of {', '.join(NAMES)}")
