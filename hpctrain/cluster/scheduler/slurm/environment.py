"""SLURM's variables: what a job learns from them, and which may not reach a command. Pure.

No command is run. sbatch takes SBATCH_* before the script's own header, and a shell inside salloc
or srun carries SLURM_* that would tell our srun of somebody else's allocation. squeue, sacct and
scancel have such families too: SQUEUE_STATES alone is enough to hide a job that is alive.
tests/unit/scheduler/test_slurm_environment.py holds the promises.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.core.base.env import (
    HPCTRAIN_JOB_END,
    HPCTRAIN_JOB_START,
    HPCTRAIN_KILL_WAIT_S,
    HPCTRAIN_MASTER_ADDR,
    HPCTRAIN_PORT,
    HPCTRAIN_TOKEN,
    OF_ONE_JOB,
)
from hpctrain.core.base.host_list import expand_nodes
from hpctrain.core.base.process import first_port
from hpctrain.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpctrain.core.base.records import JobContext

KILL_WAIT_S = 30.0
"""SLURM's default, where it could not be asked."""
SHARED = frozenset({"switch", "block"})
"""What nodes hang on together, in SLURM's patterns. In a ring each has a place of its own."""
LONGEST_SWITCH = 1000
PREFIXES = (
    "PMI2_",
    "PMIX_NAMESPACE",  # PMIX_MCA_* are a user's
    "PMIX_RANK",
    "PMIX_SERVER",
    "PMI_",
    "SACCT_",
    "SALLOC_",
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SLURMD_",
    "SLURM_",
    "SQUEUE_",
    "SRUN_",
)
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""How the commands reach and convince their slurmctld. SLURM_CLUSTERS is not among them: a job sent
to another cluster would look forgotten from the next shell, and a second writer would be let in."""
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
SHELL_DEFAULTS = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS")
"""What users set once for all their jobs: it counts where nothing else is said."""


def job_context(environ: Mapping[str, str] | None = None) -> JobContext:
    """This node's place in the job.

    Raises:
        ClusterError: this process was not started by srun inside a job.
    """
    from hpctrain.core.base.records import JobContext  # the batch side uses this module without it

    env = os.environ if environ is None else environ
    for name in ("SLURM_JOB_ID", "SLURM_NODEID"):
        if name not in env:
            raise ClusterError(f"{name} is not set: an agent is started by srun inside a SLURM job")
    job_id, restarts = own_job_id(env), own_restarts(env)
    try:
        nodes = expand_nodes(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    except ValueError as error:
        raise ClusterError(f"{error}: nobody can say which nodes the job has") from None
    return JobContext(
        job_id=job_id,
        restarts=restarts,
        node_rank=int(env["SLURM_NODEID"]),
        nodes=nodes,
        master_addr=master_addr(env, nodes),
        port=int(env.get(HPCTRAIN_PORT) or first_port(job_id, restarts)),
        token=env.get(HPCTRAIN_TOKEN, ""),
        end_time=own_end(env),
        kill_wait_s=float(env.get(HPCTRAIN_KILL_WAIT_S) or KILL_WAIT_S),
        start_time=own_start(env),
        cluster=env.get("SLURM_CLUSTER_NAME", ""),
        switch=own_switch(env),
    )


def own_job_id(env: Mapping[str, str]) -> str:
    """The id that means this job only: ``A_t`` in an array, since a raw id may mean all of it."""
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env["SLURM_JOB_ID"]


def own_restarts(env: Mapping[str, str]) -> int:
    """How often SLURM has restarted this job; the variable is not there in the first run."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def own_start(env: Mapping[str, str]) -> float | None:
    """When SLURM began this start of the job: what slurmctld said, else SLURM's own variable."""
    begun = env.get(HPCTRAIN_JOB_START) or env.get("SLURM_JOB_START_TIME")
    return float(begun) if begun else None


def own_end(env: Mapping[str, str]) -> float | None:
    """When SLURM will end this start of the job: what slurmctld said, else SLURM's own variable."""
    end = env.get(HPCTRAIN_JOB_END) or env.get("SLURM_JOB_END_TIME")
    return float(end) if end else None


def own_switch(env: Mapping[str, str]) -> str:
    """The switches above this node, or its block, down to the one it hangs on; "" for not known.

    slurmd says it to each task, so no command is asked that could be late or wrong: `top.s2.n3`
    with the pattern `switch.switch.node`, `b8.n3` with `block.node`, and without a topology the
    node alone. A level at which it has none is empty (`top..n3`).
    """
    address = env.get("SLURM_TOPOLOGY_ADDR", "")
    *kinds, last = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    above = address.removesuffix(f".{env.get('SLURMD_NODENAME', '')}")  # names may have dots
    is_plain = above.isprintable() and len(above) <= LONGEST_SWITCH
    is_known = bool(kinds) and last == "node" and set(kinds) <= SHARED and above != address
    return above if is_known and is_plain else ""


def master_addr(env: Mapping[str, str], nodes: Sequence[str]) -> str:
    """An address of the first node that every node of the job can connect to.

    The batch script exports what it has found out (`entry/slurm_batch.py`). Where it could not ask,
    the node's name does if it resolves, else the address from which srun was launched: that is the
    first node.
    """
    if exported := env.get(HPCTRAIN_MASTER_ADDR):
        return exported
    first = nodes[0] if nodes else "localhost"
    if resolves(first):
        return first
    return env.get("SLURM_LAUNCH_NODE_IPADDR") or first


def resolves(name: str) -> bool:
    """Whether this host can turn the name into an address."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):  # no name that could be asked for at all
        return False
    return True


OF_DEVICES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
    }
)
"""What SLURM sets for the GPUs of a job, without a name that says so."""


def script_environment(pid: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for what a job submits: the batch script's, before its setup.

    So another job gets what the user's shell had, and nothing of this job. `environ` counts if that
    of `pid`, the batch script, cannot be read.
    """
    try:
        pairs = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        pairs = []
    given = dict(pair.split("=", 1) for pair in pairs if "=" in pair) or dict(environ)
    job_id = given.get("SLURM_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    temporary = given.get("TMPDIR", "")
    gone = set(OF_DEVICES)
    if job_id and job_id in temporary:  # a prolog's, which goes with the job
        gone.add("TMPDIR")
    return {name: value for name, value in clean(given).env.items() if name not in gone}


class CleanedEnvironment(NamedTuple):
    """An environment fit for SLURM's commands."""

    env: dict[str, str]
    dropped: list[str]
    """Names of what was not passed on, sorted."""


def clean(environ: Mapping[str, str], kept: Collection[str] = ()) -> CleanedEnvironment:
    """Leave out everything by which a shell could change a submission or an answer.

    SBATCH_* variables that are `kept` (`slurm.sbatch_env` of a site) count as settings
    (`kept_settings`). They do not reach sbatch, where they would win over the script's header and
    the user's flags.
    """
    dropped = sorted(name for name in environ if _leaks(name) and name not in kept)
    return CleanedEnvironment(
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
