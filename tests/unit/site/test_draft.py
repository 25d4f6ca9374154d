"""A preset's draft says what SLURM says, and nothing that it does not."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.slurm.facts import read_facts
from hpctrain.cluster.site.detect import ClusterFacts, PartitionFacts, draft, site_name
from hpctrain.cluster.site.load import load_site
from hpctrain.cluster.site.validate import validate

DATA = Path(__file__).parents[2] / "data" / "slurm-answers"
CONFIG, PARTITIONS, NODES = (
    (DATA / f"show_{what}.txt").read_text() for what in ("config", "partitions", "nodes")
)
TYPE = "PreemptType             = preempt/partition_prio"
WORDS = "SlurmctldParameters     = (null)"
GPU_NODE = """\
NodeName={name} Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv={cpus} CPUTot=64 CPULoad=0.01
   Gres={gres}
   RealMemory=512000 MemSpecLimit=12288 Sockets=2 Boards=1
"""
GPU_PARTITION = """\
PartitionName=gpu
   AllocNodes=ALL Default=YES QoS=gpu-limit
   MaxNodes=16 MaxTime=2-00:00:00 MinNodes=2 GraceTime=120
   Nodes=g[1-2]
   PriorityTier=1 OverSubscribe=EXCLUSIVE PreemptMode=CANCEL
   State=UP TotalCPUs=128 TotalNodes=2
"""


def facts(config=CONFIG, partitions=PARTITIONS, nodes=NODES):
    return read_facts(config, partitions, nodes)


def written(found, tmp_path, name="mine"):
    path = tmp_path / f"{name}.toml"
    path.write_text(draft(found, name=name, today="2026-01-31"))
    return load_site(str(path), environ={})


def test_a_requeue_waits_as_long_as_slurm_says():
    assert facts().requeue_wait_s == 6
    assert facts(CONFIG + "SchedulerParameters = defer,requeue_delay=30\n").requeue_wait_s == 31


def test_the_draft_of_a_real_cluster_loads_and_has_its_preemption_right(tmp_path):
    site = written(facts(), tmp_path)

    assert site.detect.slurm_cluster == ["hpct"]
    assert (site.slurm.kill_wait_s, site.slurm.send_user_signal) == (8, False)
    kinds = {
        name: (one.preemption.mode, one.preemption.grace_s, one.auto)
        for name, one in site.partitions.items()
    }
    assert kinds == {
        "work": ("requeue", 0, True),
        "grace": ("requeue", 20, True),
        "urgent": ("none", None, False),
    }
    assert {one.cpus_per_node for one in site.partitions.values()} == {8}
    assert [f.path for f in validate(site, today=date(2026, 2, 1))] == ["contact"]


def test_gpus_limits_and_what_slurm_keeps_for_itself_are_read():
    nodes = "\n".join(
        GPU_NODE.format(name=name, cpus=cpus, gres="gpu:a100:4(S:0-1),nvme:1")
        for name, cpus in (("g1", 56), ("g2", 60))
    )

    (gpu,) = facts(partitions=GPU_PARTITION, nodes=nodes).partitions

    assert gpu == PartitionFacts(
        name="gpu",
        is_default=True,
        max_time="2-00:00:00",
        min_nodes=2,
        max_nodes=16,
        nodes=2,
        cpus_per_node=56,
        mem_mib=512000 - 12288,
        gpus_per_node=4,
        gpu="a100",
        differing="CPUs 56 to 60",
        grace_s=120,
        qos="gpu-limit",
        exclusive=True,
    )


def test_nodes_with_different_gpus_leave_the_number_unknown_and_say_so(tmp_path):
    nodes = "\n".join(
        GPU_NODE.format(name=name, cpus=64, gres=gres)
        for name, gres in (("g1", "gpu:a100:4"), ("g2", "gpu:h100:8"))
    )
    found = facts(partitions=GPU_PARTITION, nodes=nodes)

    text = draft(found, name="mine", today="2026-01-31")

    assert (found.partitions[0].gpus_per_node, found.partitions[0].gpu) == (None, "")
    assert "# nodes differ: GPUs 4 to 8" in text
    assert "gpus_per_node" not in tomllib.loads(text)["partitions"]["gpu"]


@pytest.mark.parametrize(
    ("gres", "count", "kind"),
    [
        ("gpu:2", 2, ""),
        ("gpu:a100:4(S:0-1)", 4, "a100"),
        ("gpu:a100:2,gpu:h100:2", 4, ""),
        ("(null)", 0, ""),
        ("nvme:1,gpu", 1, ""),
    ],
)
def test_gres_is_read_in_each_of_its_forms(gres, count, kind):
    nodes = GPU_NODE.format(name="g1", cpus=64, gres=gres)

    (gpu,) = facts(partitions=GPU_PARTITION, nodes=nodes).partitions

    assert (gpu.gpus_per_node, gpu.gpu) == (count, kind)


@pytest.mark.parametrize(
    ("before", "after", "mode", "signal"),
    [
        (TYPE, "PreemptType = preempt/none", "none", ""),
        (TYPE, "PreemptType = preempt/qos", "unknown", ""),
        (WORDS, "SlurmctldParameters = preempt_send_user_signal", "requeue", "SIGUSR2"),
        (WORDS, "PreemptParameters = send_user_signal", "requeue", "SIGUSR2"),
    ],
)
def test_preemption_follows_slurms_own_words(tmp_path, before, after, mode, signal):
    assert before in CONFIG

    site = written(facts(config=CONFIG.replace(before, after)), tmp_path)

    grace = site.partitions["grace"].preemption
    assert (grace.mode, grace.signal) == (mode, signal)


def test_a_partition_of_a_higher_tier_on_other_nodes_preempts_nobody():
    apart = PARTITIONS.replace("Nodes=n[1-4]", "Nodes=n[1-3]").rsplit("Nodes=n[1-3]", 1)

    found = facts(partitions="Nodes=n4".join(apart))

    assert [one.preempted_by for one in found.partitions] == [(), (), ()]


@pytest.mark.parametrize(
    ("cluster", "name"),
    [("Juniper", "juniper"), ("big cluster", "big-cluster"), ("4ever", "site-4ever"), ("", "site")],
)
def test_a_clusters_name_becomes_one_that_a_preset_can_have(cluster, name):
    assert site_name(cluster) == name


def test_odd_names_survive_the_way_through_toml(tmp_path):
    odd = 'a"b".c'
    found = ClusterFacts(name='x\\y"', partitions=(PartitionFacts(odd, max_time="1:00:00"),))

    site = written(found, tmp_path)

    assert site.partitions[odd].max_time == "1:00:00"
