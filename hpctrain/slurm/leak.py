"""Which variables of the calling shell must not reach SLURM's commands or the job. Pure.

sbatch takes SBATCH_* before the script's own header, and a shell inside salloc or srun carries
SLURM_* that would tell our srun of somebody else's allocation. squeue, sacct and scancel have such
families too: SQUEUE_STATES alone is enough to hide a job that is alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIXES = (
    "SACCT_",
    "SALLOC_",
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SLURM_",
    "SQUEUE_",
    "SRUN_",
)
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""How the commands reach and convince their slurmctld. SLURM_CLUSTERS is not among them: a job sent
to another cluster would look forgotten from the next shell, and a second writer would be let in."""

OF_ONE_JOB = frozenset(
    {
        "HPCTRAIN_ATTEMPT",
        "HPCTRAIN_ATTEMPT_DIR",
        "HPCTRAIN_BATCH_STARTED",
        "HPCTRAIN_CLUSTER",
        "HPCTRAIN_JOB_END",
        "HPCTRAIN_JOB_ID",
        "HPCTRAIN_KILL_WAIT_S",
        "HPCTRAIN_MASTER_ADDR",
        "HPCTRAIN_NODE",
        "HPCTRAIN_NODES",
        "HPCTRAIN_PORT",
        "HPCTRAIN_RESTARTS",
        "HPCTRAIN_RUN_DIR",
        "HPCTRAIN_TOKEN",
    }
)
"""What our own batch side and agents export: true for one job, so a `submit` from inside it drops
it."""


class Cleaned(NamedTuple):
    """An environment fit for SLURM's commands."""

    env: dict[str, str]
    dropped: list[str]
    """Names of what was not passed on, sorted."""


def clean(environ: Mapping[str, str]) -> Cleaned:
    """Leave out everything by which a shell could change a submission or an answer."""
    dropped = sorted(name for name in environ if _leaks(name))
    return Cleaned(
        env={name: value for name, value in environ.items() if not _leaks(name)}, dropped=dropped
    )


def _leaks(name: str) -> bool:
    return name in OF_ONE_JOB or (name.startswith(PREFIXES) and name not in KEPT)
