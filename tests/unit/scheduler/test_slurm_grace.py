"""Whether SLURM runs a job again that leaves in its grace time."""

from __future__ import annotations

import pytest

from hpctrain.cluster.scheduler.slurm.control import comes_back
from hpctrain.errors import ClusterUnreachable

IN_GRACE = {
    "JobId": "26",
    "QOS": "long",
    "Partition": "grace",
    "Requeue": "1",
    "BatchFlag": "1",
    "PreemptTime": "1795241509",
}
CONFIG = {
    "MaxBatchRequeue": "5",
    "PreemptMode": "REQUEUE",
    "PreemptType": "preempt/partition_prio",
    "SLURM_VERSION": "24.11.5",
}
PARTITION = "PartitionName=grace\n   Default=NO PreemptMode={} PriorityTier=1\n"


class Slurm:
    """Answers as its configuration says, and remembers what it was asked."""

    def __init__(self, *, partition="REQUEUE", qos="cluster", **config):
        self.config = CONFIG | config
        self.partition, self.qos = partition, qos
        self.asked = []

    def __call__(self, args):
        self.asked.append(" ".join(args))
        match args:
            case ["scontrol", "show", "config"]:
                return "".join(f"{name:<23} = {value}\n" for name, value in self.config.items())
            case ["scontrol", "show", "partition", "grace"]:
                return PARTITION.format(self.partition)
            case ["sacctmgr", *_, "show", "qos", "long", "format=PreemptMode"]:
                return f"{self.qos}\n"
        raise ClusterUnreachable(" ".join(args))


@pytest.mark.parametrize(
    ("version", "expected"),
    [("22.05.8", False), ("23.11.10", False), ("24.05.0", True), ("26.05.5", True), ("", False)],
)
def test_slurm_does_it_by_itself_since_24_05(version, expected):
    assert comes_back(IN_GRACE, Slurm(SLURM_VERSION=version)) is expected


def test_nothing_is_asked_of_a_job_that_is_not_preempted():
    slurm = Slurm()

    assert not comes_back(IN_GRACE | {"PreemptTime": "None"}, slurm)
    assert not slurm.asked


def test_a_job_that_may_not_be_requeued_does_not_come_back():
    assert not comes_back(IN_GRACE | {"Requeue": "0"}, Slurm())


@pytest.mark.parametrize(("flag", "expected"), [("4", True), ("5", False), ("", False)])
def test_before_slurm_would_hold_the_job_it_does_not_count_on_it(flag, expected):
    assert comes_back(IN_GRACE | {"BatchFlag": flag}, Slurm()) is expected


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("REQUEUE", True),
        ("GANG,REQUEUE", True),
        ("REQUEUE,PRIORITY", True),
        ("CANCEL", False),
        ("OFF", False),
    ],
)
def test_the_partition_says_what_preemption_does(mode, expected):
    assert comes_back(IN_GRACE, Slurm(partition=mode)) is expected


@pytest.mark.parametrize(
    ("qos", "cluster", "expected"),
    [
        ("requeue", "CANCEL", True),
        ("cancel", "REQUEUE", False),
        ("cluster", "GANG,REQUEUE", True),
        ("", "CANCEL", False),
    ],
)
def test_or_the_quality_of_service_does(qos, cluster, expected):
    slurm = Slurm(qos=qos, PreemptType="preempt/qos", PreemptMode=cluster, partition="OFF")

    assert comes_back(IN_GRACE, slurm) is expected


def test_where_slurm_does_not_answer_it_is_asked_for_the_requeue():
    def silent(args):
        raise ClusterUnreachable("scontrol gave no answer")

    assert not comes_back(IN_GRACE, silent)
