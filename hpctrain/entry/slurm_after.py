"""The batch script's last act, after its srun: `agent/ending.py` with SLURM's facts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.agent.ending import JobStartFacts, finish
from hpctrain.base.env import HPCTRAIN_KILL_WAIT_S
from hpctrain.run.layout import RunDir
from hpctrain.scheduler.slurm.control import SlurmControl
from hpctrain.scheduler.slurm.environment import (
    KILL_WAIT_S,
    own_end,
    own_job_id,
    own_restarts,
    own_start,
)
from hpctrain.scheduler.slurm.parse import read_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE_S = 300.0
"""How long a silent slurmctld is waited for. After a SIGTERM it is KillWait: SIGKILL comes then."""


def after(root: str, token: str, *, rc: int, term: bool, env: Mapping[str, str]) -> int:
    """Finish what the agents began; returns the job's exit code."""
    start = JobStartFacts(
        job_id=own_job_id(env),
        restarts=own_restarts(env),
        token=token,
        nodes=read_nodes(env.get("SLURM_JOB_NODELIST", "")),
        rc=rc,
        term=term,
        start_time=own_start(env),
        end_time=own_end(env),
    )
    kill_wait_s = float(env.get(HPCTRAIN_KILL_WAIT_S) or KILL_WAIT_S)
    control = SlurmControl(
        start.job_id,
        restarts=start.restarts,
        nodes=start.nodes,
        timeout_s=kill_wait_s if term else PATIENCE_S,
    )
    return finish(RunDir(Path(root)), start, control)
