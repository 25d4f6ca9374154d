"""SLURM's variables of a task, set to what each rank is.

SLURM starts one task on each node, the agent. A program that reads SLURM_PROCID, as Lightning's
SLURMEnvironment and many scripts do, would take itself for that task: of one rank per node.
tests/unit/agent/test_task_variables.py and tests/slurm/test_programs.py hold the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def of_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """What to change in a rank's environment; nothing where SLURM has not started its agent.

    Variables of the job and of the node (SLURM_JOB_ID, SLURM_NNODES, GPUs, CPUs) are true as they
    are.

    Args:
        environ: The rank's, with torchrun's variables.
    """
    if "SLURM_PROCID" not in environ:
        return {}
    rank, local_rank = environ["RANK"], environ["LOCAL_RANK"]
    ranks, ranks_here = environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"]
    nodes = int(ranks) // int(ranks_here)
    per_node = ranks_here if nodes == 1 else f"{ranks_here}(x{nodes})"
    first = int(rank) - int(local_rank)
    ours = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": environ["GROUP_RANK"],
        "SLURM_NTASKS": ranks,
        "SLURM_NPROCS": ranks,
        "SLURM_NTASKS_PER_NODE": ranks_here,
        "SLURM_TASKS_PER_NODE": per_node,
    }
    of_step = {
        "SLURM_STEP_NUM_TASKS": ranks,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_GTIDS": ",".join(str(first + number) for number in range(int(ranks_here))),
    }
    return ours | {name: value for name, value in of_step.items() if name in environ}
