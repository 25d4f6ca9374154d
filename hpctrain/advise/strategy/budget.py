"""What a run costs by its plan: checkpoints, their interval and disk, GPU-hours, jobs of the queue.

Pure; the interval is `hpctrain.ledger.plan.interval`'s. tests/unit/strategy/test_budget.py holds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32
from hpctrain.ledger.plan import interval
from hpctrain.ledger.plan.interval import Failures

if TYPE_CHECKING:
    from hpctrain.advise.strategy.strategies import Machines

STATE_BYTES = 3 * FP32
"""A parameter's in a checkpoint: its master and two moments, whatever the strategy."""


@dataclass(frozen=True)
class CheckpointPlan:
    """The checkpoints of a run.

    Attributes:
        nbytes: Of one.
        save_s: To write it; None where the disk's rate is not known.
        interval_s: Between two.
        why: What decided on it.
        kept: On disk at most, one that is being written among them.
    """

    nbytes: int
    save_s: float | None
    interval_s: float
    why: str
    kept: int

    @property
    def disk(self) -> int:
        """Bytes that all of them need."""
        return self.nbytes * self.kept


@dataclass(frozen=True)
class Cost:
    """Of the whole run; None where the step's time is not known.

    Attributes:
        hours: Of training.
        gpu_hours: Of all GPUs.
        jobs: That the queue has to give, one after the other.
        limit_s: Time limit of each.
    """

    hours: float | None
    gpu_hours: float | None
    jobs: int | None
    limit_s: float | None


def saving(
    params: int,
    cluster: Machines,
    *,
    save_gbs: float | None,
    max_loss_s: float,
    keep_last: int,
    limit_s: float | None,
) -> CheckpointPlan:
    """Return how often to save, and what that takes.

    `save_gbs` is the job's GB/s to the file system, None if nobody measured it. `max_loss_s` is
    what a hard kill may cost. `limit_s` is the time limit of a job.
    """
    nbytes = params * STATE_BYTES
    save_s = nbytes / (save_gbs * 1e9) if save_gbs else None
    chosen = interval.choose(
        save_s,
        interval.mtbf_s(Failures(), cluster.nodes),
        max_loss_s=max_loss_s,
        job_s=limit_s,
        write_s=save_s or 0.0,
    )
    return CheckpointPlan(nbytes, save_s, chosen.seconds, chosen.why, keep_last + 1)


def cost(steps: int | None, step_s: float | None, ranks: int, limit_s: float | None) -> Cost:
    """Of so many steps, without waiting in the queue, saves and what failures throw away."""
    if not steps or step_s is None:
        return Cost(None, None, None, limit_s)
    seconds = steps * step_s
    jobs = None if not limit_s else max(1, math.ceil(seconds / limit_s))
    return Cost(seconds / 3600, seconds / 3600 * ranks, jobs, limit_s)
