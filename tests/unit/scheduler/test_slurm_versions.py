"""What is read from SLURM, recorded on every version by tests/support/record_slurm.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.control import comes_back
from hpctrain.cluster.scheduler.slurm.facts import read_cpus_per_gpu, read_facts
from hpctrain.cluster.scheduler.slurm.jobs import job_facts, job_id_of, job_info, queued_job
from hpctrain.cluster.scheduler.slurm.parse import parse_records, parse_sacct
from hpctrain.core.base.host_list import expand_nodes
from hpctrain.ledger.plan.decide import is_cancelled, is_requeued
from tests.support.record_slurm import ODD_NAME

DATA = Path(__file__).parents[2] / "data" / "slurm-answers"
VERSIONS = sorted(path.name for path in DATA.iterdir() if path.is_dir())


@pytest.fixture(params=VERSIONS)
def said(request):
    """What a version printed, by the recording's name."""
    return lambda name: (DATA / request.param / f"{name}.txt").read_text()


@pytest.fixture
def record(said):
    def of_job(name):
        (found,) = parse_records(said(f"show_job_{name}"))
        return found

    return of_job


def test_there_are_recordings_of_three_versions():
    assert VERSIONS == ["22.05", "24.11", "26.05"]


def test_nothing_that_a_user_writes_passes_itself_off_as_a_field(record):
    """The job's name has a state in it, its comment a restart count; 26.05 prints both twice."""
    found = record("running")

    facts, info = job_facts(found), job_info(found)

    assert (facts.state, facts.restarts, facts.reason) == ("RUNNING", 0, None)
    assert (facts.preempt_time, facts.comes_back) == (None, False)
    assert (found["JobName"], found["Comment"]) == (ODD_NAME, "hello Restarts=9")
    assert (info.alive, info.nodes, info.end_time - info.start_time) == (True, "n1", 3600.0)


def test_a_pending_job(record):
    info = job_info(record("pending"))

    assert (info.state, info.alive, info.nodes) == ("PENDING", True, "")
    assert info.reason in {"BeginTime", None}
    assert info.start_time is not None
    assert info.restarts == 0


def test_a_finished_job(record):
    info = job_info(record("completed"))

    assert (info.state, info.alive, info.reason) == ("COMPLETED", False, None)
    assert info.end_time >= info.start_time


@pytest.mark.parametrize("name", ["requeued", "node_failed"])
def test_a_job_that_is_requeued_is_ahead_of_its_start(record, name):
    facts = job_facts(record(name))

    assert is_requeued(facts, 0)
    assert not is_cancelled(facts, 0)
    assert (facts.restarts, facts.reason, facts.preempt_time) == (1, None, None)
    assert job_info(record(name)).alive


def test_a_cancelled_job_ends_with_its_own_count(record):
    facts = job_facts(record("cancelled"))

    assert is_cancelled(facts, 0)
    assert (facts.state, facts.restarts, facts.reason) == ("COMPLETING", 0, None)


def test_the_time_limit_is_the_reason(record):
    facts = job_facts(record("time_limit"))

    assert (facts.state, facts.restarts, facts.reason) == ("COMPLETING", 0, "TimeLimit")
    assert not is_cancelled(facts, 0)


def test_in_its_grace_time_a_job_has_a_preempt_time_and_may_come_back(record, said, request):
    found = record("preempted_with_grace")
    answers = {"config": said("show_config"), "partition": said("show_partitions")}
    only = "PartitionName=grace" + answers["partition"].split("PartitionName=grace")[1]
    answers["partition"] = only.split("PartitionName=urgent")[0]

    facts = job_facts(found)

    assert (facts.restarts, facts.reason) == (0, None)
    assert facts.end_time - facts.preempt_time == pytest.approx(20, abs=1)
    assert not is_requeued(facts, 0)
    assert comes_back(found, lambda argv: answers[argv[2]]) is ("22.05" not in request.node.name)


def test_the_tasks_of_an_array_and_the_parts_of_a_het_job_are_told_apart(said):
    array = [job_id_of(one) for one in parse_records(said("show_job_array"))]
    het = parse_records(said("show_job_het"))

    assert sorted(name.partition("_")[2] for name in array) == ["0", "1"]
    assert [one["HetJobOffset"] for one in het] == ["0", "1"]
    assert {job_info(one).nodes for one in het} == {"n1", "n2"}


def test_every_job_of_the_queue_has_its_state(said):
    rows = [line.split("|", 2) for line in said("queue").splitlines()]
    jobs = [queued_job([job, state, *[""] * 5, script]) for job, state, script in rows]

    assert sorted(job.state for job in jobs) == ["PENDING", *["RUNNING"] * (len(jobs) - 1)]
    assert sum("_" in job.job_id for job in jobs) == 2
    assert sum("+" in job.job_id for job in jobs) == 2


def test_accounting_has_a_row_for_each_start(said):
    first, second = parse_sacct(said("sacct_requeued"))
    (cancelled,) = parse_sacct(said("sacct_cancelled"))

    assert (first.state, second.state, cancelled.state) == ("REQUEUED", "RUNNING", "CANCELLED")
    assert first.job_id == second.job_id
    assert (first.nodes, first.end <= second.start, second.end) == ("n2", True, None)


def test_node_states_are_words(said):
    states = said("node_states").split()

    assert states
    assert not any(state.startswith("down") for state in states)


def test_the_cluster_is_read_the_same_way(said):
    facts = read_facts(said("show_config"), said("show_partitions"), said("show_nodes"))

    assert (facts.name, facts.preempt_type) == ("hpct", "preempt/partition_prio")
    assert facts.version.startswith(("22.05", "24.11", "26.05"))
    assert (facts.kill_wait_s, facts.requeue_wait_s, facts.job_requeue) == (8, 6, True)
    kinds = {
        one.name: (one.preempt_mode, one.grace_s, one.nodes, one.cpus_per_node, one.exclusive)
        for one in facts.partitions
    }
    assert kinds == {
        "work": ("REQUEUE", 0, 4, 8, False),
        "grace": ("REQUEUE", 20, 4, 8, False),
        "urgent": ("", 0, 4, 8, True),
    }
    assert {one.name: one.is_default for one in facts.partitions}["work"]
    assert set(said("associations").split()) == {"root", "lab"}


@pytest.mark.parametrize(
    ("partition", "everywhere", "cpus"),
    [
        ("grace", "", 6),
        ("grace", "DefCpuPerGPU=9", 6),
        ("work", "", 0),
        ("work", "DefMemPerGPU=100,DefCpuPerGPU=9", 9),
        ("", "DefCpuPerGPU=9", 9),
        ("work,grace", "DefCpuPerGPU=9", 6),
        ("work,grace", "", 0),
        ("nowhere", "", None),
    ],
)
def test_the_cpus_that_a_partition_gives_for_each_gpu(said, partition, everywhere, cpus):
    config = said("show_config").replace(
        "JobDefaults             = (null)", f"JobDefaults = {everywhere or '(null)'}"
    )
    assert everywhere in config

    found = read_cpus_per_gpu(config, said("show_partitions_gpu_defaults"), partition)

    assert found == cpus


def test_the_nodes_of_a_job_are_named_one_by_one(record):
    assert expand_nodes(record("node_failed")["ReqNodeList"]) == ["n2", "n3"]
