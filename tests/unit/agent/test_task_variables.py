"""A rank's SLURM variables say which rank it is, where SLURM has set them at all."""

from __future__ import annotations

from hpctrain.node.agent.environment import as_task

SLURMS = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_GTIDS": "1",
}


def torchruns(rank, ranks_per_node, nodes):
    return {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank % ranks_per_node}",
        "GROUP_RANK": f"{rank // ranks_per_node}",
        "WORLD_SIZE": f"{ranks_per_node * nodes}",
        "LOCAL_WORLD_SIZE": f"{ranks_per_node}",
    }


def test_each_rank_is_a_task_of_its_own():
    assert as_task(SLURMS | torchruns(6, 4, 2)) == {
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_NPROCS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_GTIDS": "4,5,6,7",
    }


def test_one_node_is_written_as_slurm_writes_it():
    assert as_task(SLURMS | torchruns(1, 2, 1))["SLURM_TASKS_PER_NODE"] == "2"


def test_without_slurm_nothing_is_set():
    assert as_task(torchruns(1, 2, 1)) == {}
    assert as_task({"SLURM_JOB_ID": "7", **torchruns(1, 2, 1)}) == {}
