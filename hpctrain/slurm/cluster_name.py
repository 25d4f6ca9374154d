"""SLURM's name for this cluster, one of the things by which a site is known."""

from __future__ import annotations

import re

from hpctrain.errors import ClusterError
from hpctrain.slurm.command import run

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
