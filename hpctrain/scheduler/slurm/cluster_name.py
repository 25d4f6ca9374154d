"""SLURM's name for this cluster: a site is known by it, and a job of another one is told by it."""

from __future__ import annotations

import contextlib
import os
import re

from hpctrain.errors import ClusterError
from hpctrain.scheduler.slurm.command import run

TIMEOUT_S = 3.0


def cluster_name() -> str | None:
    """ClusterName of the slurmctld that answers here; None without SLURM or without an answer.

    A site can be known by other means, so a silent slurmctld is no error here, and is not waited
    for longer than TIMEOUT_S.
    """
    try:
        text = run(["scontrol", "show", "config"], timeout_s=TIMEOUT_S)
    except ClusterError:
        return None
    found = re.search(r"^ClusterName\s*=\s*(\S+)\s*$", text, re.MULTILINE)
    return found[1] if found else None


_KNOWN: dict[tuple[str | None, ...], str] = {}


def name_here() -> str:
    """The same, asked once in a process; "" where it is not known."""
    whose = tuple(os.environ.get(name) for name in ("PATH", "SLURM_CONF", "SLURM_CLUSTERS"))
    if whose not in _KNOWN:
        found = cluster_name()
        if found is None:
            return ""
        _KNOWN[whose] = found
    return _KNOWN[whose]


def submitted_here(answer: str) -> str:
    """The job's id in what `sbatch --parsable` printed, `id` or `id;cluster`, after any greeting.

    Raises:
        ClusterError: there is none, or the job went to another cluster (a wrapper around sbatch can
            do that). There it would look forgotten to us, so it is cancelled.
    """
    words = answer.split()
    job_id, _, cluster = words[-1].partition(";") if words else ("", "", "")
    if not job_id.isdigit():
        raise ClusterError(f"sbatch printed no job id: {answer.strip()[:80]!r}")
    here = cluster_name() if cluster else None
    if here is not None and here != cluster:
        with contextlib.suppress(ClusterError):  # a start that comes all the same ends itself
            run(["scancel", f"--clusters={cluster}", job_id])
        raise ClusterError(
            f"sbatch sent job {job_id} to the cluster {cluster}, and this is {here}: it was "
            "cancelled; submit on a login node of that cluster"
        )
    return job_id
