"""Does SLURM itself run a job again that leaves in its grace time? Since 24.05 it may.

Then nothing else may ask for the requeue: SLURM would remember the grace time beyond it, and run
the job again at its next end as well, even after an exit code of 0 (seen with 24.11.5, no more with
26.05.5). Up to 23.11 a job that leaves without a requeue is over.

SLURM holds a job (JobHoldMaxRequeue) that it has run again MaxBatchRequeue times by itself. Before
that happens we ask again, and `JobControl.forbid_requeue` sees to the last end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpctrain.errors import ClusterError
from hpctrain.scheduler.slurm.command import run
from hpctrain.scheduler.slurm.parse import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SINCE = (24, 5)
TIMEOUT_S = 5.0
_SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)


def comes_back(job: Mapping[str, str], ask: Callable[[list[str]], str] | None = None) -> bool:
    """Whether SLURM runs the job again once it has left; False where that is not certain.

    Args:
        job: Its record, as `scontrol show job` printed it.
        ask: Runs a command of SLURM's and returns what it printed.
    """
    if job.get("PreemptTime", "") in NOTHING or job.get("Requeue") != "1":
        return False
    ask = ask or _ask
    try:
        config = dict(_SETTING.findall(ask(["scontrol", "show", "config"])))
        if _version(config) < SINCE or _is_held_next(job, config):
            return False
        return "REQUEUE" in _preempt_mode(job, config, ask)
    except ClusterError:  # a requeue too many is better than a run that does not come back
        return False


def _ask(args: list[str]) -> str:
    return run(args, timeout_s=TIMEOUT_S)


def _version(config: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", config.get("SLURM_VERSION", ""))[:2])


def _is_held_next(job: Mapping[str, str], config: Mapping[str, str]) -> bool:
    """Whether one more start by SLURM's own doing would hold the job. BatchFlag counts them."""
    flag, most = job.get("BatchFlag", ""), config.get("MaxBatchRequeue", "")
    return not flag.isdigit() or not most.isdigit() or int(flag) >= int(most)


def _preempt_mode(
    job: Mapping[str, str], config: Mapping[str, str], ask: Callable[[list[str]], str]
) -> list[str]:
    """What preemption does to this job: the words of its partition or QOS, else the cluster's.

    Beside the one that counts there may be others, such as GANG and (since 25.05) PRIORITY.
    """
    mode = ""
    if config.get("PreemptType") == "preempt/partition_prio":
        text = ask(["scontrol", "show", "partition", job.get("Partition", "")])
        found = re.search(r"\bPreemptMode=(\S+)", text)
        mode = found[1] if found else ""
    elif config.get("PreemptType") == "preempt/qos":
        columns = ["--noheader", "--parsable2", "show", "qos", job.get("QOS", "")]
        mode = ask(["sacctmgr", *columns, "format=PreemptMode"]).strip()
        mode = "" if mode.lower() == "cluster" else mode
    return (mode or config.get("PreemptMode", "")).upper().split(",")
