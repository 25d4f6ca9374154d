"""Which variables of the calling shell must not reach SLURM's commands or the job. Pure.

sbatch takes SBATCH_* before the script's own header, and a shell inside salloc or srun carries
SLURM_* that would tell our srun of somebody else's allocation. squeue, sacct and scancel have such
families too: SQUEUE_STATES alone is enough to hide a job that is alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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
        "HPCTRAIN_JOB_START",
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


SETTINGS = {
    "SBATCH_ACCOUNT": "slurm.account",
    "SBATCH_CONSTRAINT": "slurm.constraint",
    "SBATCH_NETWORK": "slurm.network",
    "SBATCH_PARTITION": "slurm.partition",
    "SBATCH_QOS": "slurm.qos",
    "SBATCH_RESERVATION": "slurm.reservation",
    "SBATCH_TIMELIMIT": "slurm.time",
}
"""What a site may let its users' shells decide, and the setting that takes it."""


class Cleaned(NamedTuple):
    """An environment fit for SLURM's commands."""

    env: dict[str, str]
    dropped: list[str]
    """Names of what was not passed on, sorted."""


def clean(environ: Mapping[str, str], kept: Collection[str] = ()) -> Cleaned:
    """Leave out everything by which a shell could change a submission or an answer.

    Args:
        environ: The shell's.
        kept: SBATCH_* variables that count all the same (`slurm.sbatch_env` of a site). They do so
            as settings (`kept_settings`), and not by reaching sbatch, where they would win over
            the script's header and so over the user's own flags.
    """
    dropped = sorted(name for name in environ if _leaks(name) and name not in kept)
    return Cleaned(
        env={name: value for name, value in environ.items() if not _leaks(name)}, dropped=dropped
    )


def kept_settings(environ: Mapping[str, str], kept: Collection[str]) -> dict[str, str]:
    """The setting behind each SBATCH_* variable that is set and kept: {"slurm.account": its name}.

    Those of `kept` that no setting can take are left out here, and stay dropped.
    """
    return {
        setting: name
        for name, setting in SETTINGS.items()
        if name in kept and environ.get(name, "")
    }


def _leaks(name: str) -> bool:
    return name in OF_ONE_JOB or (name.startswith(PREFIXES) and name not in KEPT)
