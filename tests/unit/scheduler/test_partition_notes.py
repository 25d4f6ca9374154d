"""What a submit says of a job that its partition cannot start, or whose GPUs would stand idle."""

from __future__ import annotations

import pytest

from hpctrain.cluster.scheduler.base import Accounting
from hpctrain.cluster.scheduler.slurm import facts
from hpctrain.cluster.scheduler.slurm.facts import read_partitions
from hpctrain.cluster.scheduler.slurm.limits import check_site, partition_notes
from hpctrain.cluster.site.schema import Partition, Site
from hpctrain.core.settings.schema import AliveSettings, Settings, SlurmSettings
from hpctrain.errors import ClusterError, UsageError

SINFO = """\
cpu*|40|64|2-00:00:00|(null)
gpu|6|96|1-00:00:00|gpu:a100:4(S:0-1),nvme:1
gpu|2|128|1-00:00:00|gpu:h100:8(S:0-3)
any|48|64+|infinite|(null)
any|8|96+|infinite|gpu:a100:4
broken line
"""


def notes(origins=None, site=None, text=SINFO, alive=None, **slurm):
    asked = Accounting(lambda: None, lambda: None, partitions=lambda: read_partitions(text))
    given = {f"slurm.{key}": f"flag --{key}" for key in slurm} | (origins or {})
    settings = Settings(slurm=SlurmSettings(**slurm), alive=alive or AliveSettings())
    return partition_notes(settings, given, site, asked)


@pytest.mark.parametrize(
    ("printed", "known"),
    [("lab,normal\n lab2 \n\n", {"lab", "normal", "lab2"}), ("\n", None), (None, None)],
)
def test_accounting_names_what_a_user_has_or_nothing_is_known(monkeypatch, printed, known):
    def run(words, *, timeout_s):
        assert "format=QOS" in words
        if printed is None:
            raise ClusterError("no accounting here")
        return printed

    monkeypatch.setattr(facts, "run", run)

    assert facts.of_user("QOS") == known


def test_a_partition_of_several_kinds_of_nodes_is_read_as_one():
    found = read_partitions(SINFO)

    assert set(found) == {"cpu", "gpu", "any"}
    gpu = found["gpu"]
    assert (gpu.nodes, gpu.cpus, gpu.gpus, gpu.gpu_types) == (8, 128, 8, ("a100", "h100"))
    assert (gpu.max_time, found["any"].max_time) == ("1-00:00:00", "")
    assert [name for name, one in found.items() if one.is_default] == ["cpu"]
    assert (found["cpu"].gpus, found["any"].cpus) == (0, 96)


def test_no_gpus_on_a_partition_that_has_some_is_said_with_the_flag_to_add():
    (note,) = notes(partition="any")
    assert note == (
        "no GPUs are asked for, and nodes of partition any have 4 a100 GPUs: "
        "add --gpus-per-node 4; 0 if you mean none"
    )
    assert "have 8 GPUs: add --gpus-per-node 8" in notes(partition="gpu")[0]


@pytest.mark.parametrize(
    "asked",
    [
        {"partition": "cpu"},
        {},
        {"partition": "any", "gpus_per_node": 4},
        {"partition": "any", "gpus_per_node": 0},
        {"partition": "any", "extra": ["--gres=gpu:1"]},
        {"partition": "any", "extra": ["-G4"]},
        {"partition": "hidden"},
    ],
)
def test_nothing_is_said_where_gpus_are_asked_for_or_refused_or_are_not_there(asked):
    assert notes(**asked) == []


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"nodes": "9", "partition": "gpu"}, ("--nodes: the job asks for 9 nodes, and partition "
         "gpu has 8: it would wait for ever; ask for less, or name another --partition")),
        ({"nodes": "41"}, "asks for 41 nodes, and partition cpu has 40"),
        ({"nodes": "57-60", "partition": "any,gpu"}, "57 nodes, and partition gpu or any has 56"),
        ({"cpus_per_rank": 65}, "asks for 65 CPUs of a node, and partition cpu has 64"),
        ({"nodes": "8", "partition": "gpu", "alive": AliveSettings(spares=1)}, "asks for 9 nodes"),
    ],
)  # fmt: skip
def test_what_slurm_would_never_start_is_refused(asked, why):
    with pytest.raises(UsageError) as caught:
        notes(**asked)

    assert why in str(caught.value)


def test_a_range_that_begins_within_the_partition_is_taken():
    assert notes(nodes="8-100", partition="gpu", gpus_per_node=4) == []


def test_a_time_limit_above_the_partitions_is_a_note_since_a_qos_may_lift_it():
    (note,) = notes(time="3d", partition="cpu")

    assert note == (
        "partition cpu allows 2-00:00:00 at most, and --time is 3d: without a QOS that lifts this "
        "the job waits for ever"
    )
    assert notes(time="3d", partition="cpu,any", gpus_per_node=0) == []
    assert notes(time="2-0", partition="cpu") == []


def test_where_slurm_does_not_answer_nothing_is_said():
    silent = Accounting(lambda: None, lambda: None, partitions=lambda: None)

    assert partition_notes(Settings(slurm=SlurmSettings(nodes="999")), {}, None, silent) == []
    assert partition_notes(Settings(slurm=SlurmSettings(nodes="999")), {}, None, None) == []


def site_of(**partition):
    return Site(partitions={"work": Partition(**partition)})


def test_a_presets_partition_is_not_asked_about():
    site = site_of(gpus_per_node=4, gpu="A100")

    (note,) = notes(partition="work", site=site, text="work|1|1|1:00|(null)", nodes="9")
    assert note.startswith("no GPUs are asked for, and nodes of partition work have 4 A100 GPUs")


def test_a_preset_that_knows_nothing_of_gpus_or_of_the_partition_says_nothing():
    assert notes(partition="work", site=site_of()) == []
    settings = Settings(slurm=SlurmSettings(partition="other"))
    chosen = check_site(
        settings, {}, site_of(gpus_per_node=4, exclusive=True), is_script=True, accounting=None
    )
    assert "slurm.gpus_per_node" not in chosen.changes


@pytest.mark.parametrize(
    ("partition", "origins", "gpus"),
    [
        ({"gpus_per_node": 4, "exclusive": True}, {}, 4),
        ({"gpus_per_node": 4, "exclusive": True}, {"slurm.gpus_per_node": "flag"}, 0),
        ({"gpus_per_node": 4}, {}, 0),
        ({"gpus_per_node": 0, "exclusive": True}, {}, 0),
        ({"exclusive": True}, {}, 0),
    ],
)
def test_whole_nodes_come_with_their_gpus(partition, origins, gpus):
    settings = Settings(slurm=SlurmSettings(partition="work"))
    chosen = check_site(settings, origins, site_of(**partition), is_script=True, accounting=None)

    given, places = chosen.upon(settings, origins)
    assert given.slurm.gpus_per_node == gpus
    if gpus:
        assert places["slurm.gpus_per_node"].startswith("chosen from site")
        assert "each node's 4 GPUs are taken: a job in work has whole nodes" in chosen.notes
        assert given.slurm.ranks() == 4
