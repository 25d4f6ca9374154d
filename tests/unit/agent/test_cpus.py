"""Ranks are bound near their GPUs, share what they share, and stay in what the job was given."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.site.load import load_site
from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.ledger.history.progress import RankSample
from hpctrain.node.agent import cpus
from hpctrain.node.agent.cpus import Machine, as_list, cpus_of, plan
from hpctrain.observe.status.tables import _bound, ranks_table

NUMA = [frozenset(range(4)), frozenset(range(4, 8))]
THREADS = [frozenset({core, core + 4}) for core in range(4)]


def lists(found):
    return [as_list(one) for one in found]


@pytest.mark.parametrize(
    ("ranks", "allowed", "machine", "expected"),
    [
        # as near as the map says
        (2, range(8), Machine(near=[NUMA[1], NUMA[0]]), ["4-7", "0-3"]),
        # two GPUs of a NUMA node share its cores
        (4, range(8), Machine(near=[*[NUMA[1]] * 2, *[NUMA[0]] * 2]), ["4-5", "6-7", "0-1", "2-3"]),
        # two ranks of one GPU
        (4, range(8), Machine(near=[NUMA[0], NUMA[1]]), ["0-1", "4-5", "2-3", "6-7"]),
        # a core's threads stay together
        (2, range(8), Machine(THREADS, near=[frozenset(range(8))] * 2), ["0-1,4-5", "2-3,6-7"]),
        # the first core of each half is the system's
        (2, {1, 2, 3, 5, 6, 7}, Machine(near=[NUMA[1], NUMA[0]]), ["5-7", "1-3"]),
        # without GPUs: NUMA node by NUMA node
        (2, range(8), Machine(numa=[frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})]),
         ["0,2,4,6", "1,3,5,7"]),
        # fewer cores than ranks: they share
        (2, {0}, Machine(), []),
        (3, {0, 4}, Machine(near=[NUMA[0], NUMA[0], NUMA[1]]), ["0", "0", "4"]),
        # alone on a node: nothing to choose
        (1, range(8), Machine(), []),
        # CPUs of the job that are not near some GPU
        (2, range(4), Machine(near=[NUMA[0], NUMA[1]]), []),
    ],
)  # fmt: skip
def test_each_rank_gets_its_share_of_what_is_near_its_gpu(ranks, allowed, machine, expected):
    assert lists(plan(ranks, allowed, machine, own=True)) == expected


def test_where_slurm_confines_nobody_a_rank_gets_the_whole_neighbourhood():
    """A share of it could be what another job on the node has taken too."""
    machine = Machine(near=[NUMA[1], NUMA[1], NUMA[0]])

    assert lists(plan(3, range(8), machine, own=False)) == ["4-7", "4-7", "0-3"]
    assert plan(2, range(8), Machine(), own=False) == []


@given(
    ranks=st.integers(1, 9),
    allowed=st.sets(st.integers(0, 15), min_size=1),
    near=st.lists(st.frozensets(st.integers(0, 15), min_size=1), max_size=8),
    own=st.booleans(),
)
def test_no_rank_is_bound_outside_of_what_the_job_was_given_or_to_nothing(
    ranks, allowed, near, own
):
    found = plan(ranks, allowed, Machine(THREADS, NUMA, near), own=own)

    assert len(found) in {0, ranks}
    assert all(one and one <= allowed for one in found)
    assert plan(ranks, allowed, Machine(THREADS, NUMA, near), own=own) == found


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_lists_are_read_as_they_are_written(cpus):
    assert cpus_of(as_list(cpus)) == cpus


AZURE_MASKS = (
    "ffffff000000,ffffff000000,ffffff,ffffff,ffffff000000000000000000,ffffff000000000000000000,"
    "ffffff000000000000,ffffff000000000000"
)
"""CPU_BIND of Azure's hopper.conf."""
LUMI_MASKS = "fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000"
"""`--cpu-bind=mask_cpu` of LUMI's example, with its c=fe put in."""
FRONTIER_REGIONS = """
    * hardware threads 000-007, 064-071 | GPU 4
    * hardware threads 008-015, 072-079 | GPU 5
    * hardware threads 016-023, 080-087 | GPU 2
    * hardware threads 024-031, 088-095 | GPU 3
    * hardware threads 032-039, 096-103 | GPU 6
    * hardware threads 040-047, 104-111 | GPU 7
    * hardware threads 048-055, 112-119 | GPU 0
    * hardware threads 056-063, 120-127 | GPU 1
"""
"""Of OLCF's user guide."""
FRONTIER_SEEN = {4: "1 2 3 4 5 6 7", 2: "17 18 19 20 21 22 23", 6: "33 34 35 36 37 38 39"}
"""What OLCF's PyTorch page prints of `srun -n8 -c7 --gpu-bind=closest`."""
ALLOCATABLE = set(range(64)) - set(range(0, 64, 8))
"""Both keep the first core of each eight for the system, and use one thread of a core."""


def map_of(name):
    return [cpus_of(text) for text in load_site(name, environ={}).cpus.of_gpu]


@pytest.mark.parametrize(("name", "masks"), [("lumi-g", LUMI_MASKS), ("azure-ndv5", AZURE_MASKS)])
def test_maps_of_presets_are_those_of_their_masks(name, masks):
    numbers = [int(mask, 16) for mask in masks.split(",")]

    assert map_of(name) == [{cpu for cpu in range(96) if mask >> cpu & 1} for mask in numbers]


def test_the_map_of_frontier_is_that_of_its_guide():
    told = {}
    for line in FRONTIER_REGIONS.split("* hardware threads ")[1:]:
        threads, _, gpu = line.partition(" | GPU ")
        told[int(gpu)] = cpus_of(threads.replace(" ", ""))
    near = map_of("frontier")

    assert near == [told[gpu] for gpu in range(8)]
    bound = plan(8, ALLOCATABLE, Machine(near=near), own=True)
    for gpu, seen in FRONTIER_SEEN.items():
        assert bound[gpu] == set(map(int, seen.split()))


# ---- the agent's part


def a_spec(*, site=None, bind="auto", gpus=2):
    settings = Settings()
    settings = replaced(settings, {"run.cpu_bind": bind})
    settings = replaced(settings, {"slurm.gpus_per_node": gpus})
    settings = replaced(settings, {"slurm.ranks_per_node": 2})
    preset = None if site is None else load_site(site, environ={}).as_plain()
    return SimpleNamespace(settings=settings, preset=preset)


def test_the_presets_map_counts_for_the_gpus_that_the_job_was_given(tmp_path):
    spec = a_spec(site="frontier")
    environ = {"SLURM_JOB_GPUS": "4,2", "SLURM_CPUS_ON_NODE": "56"}

    assert cpus.cpus_of_ranks(spec, environ, ALLOCATABLE, tmp_path) == ["1-7", "17-23"]
    assert cpus.cpus_of_ranks(spec, {"SLURM_CPUS_ON_NODE": "56"}, ALLOCATABLE, tmp_path) == [
        "49-55",
        "57-63",
    ]


@pytest.mark.parametrize(
    "changes", [{"bind": "no"}, {"shared": True}, {"gpus": 0}, {"site": None}], ids=str
)
def test_ranks_stay_unbound_where_nothing_is_known_or_nobody_wants_it(tmp_path, changes):
    shared = changes.pop("shared", False)
    spec = a_spec(**{"site": "frontier", **changes})

    environ = {"SLURM_CPUS_ON_NODE": "56"}
    assert cpus.cpus_of_ranks(spec, environ, ALLOCATABLE, tmp_path, shared=shared) == []


def test_ranks_without_gpus_are_bound_where_that_is_asked_for(tmp_path):
    spec = a_spec(bind="yes", gpus=0)

    assert cpus.cpus_of_ranks(spec, {"SLURM_CPUS_ON_NODE": "4"}, range(4), tmp_path) == [
        "0-1",
        "2-3",
    ]
    assert cpus.cpus_of_ranks(spec, {"SLURM_CPUS_ON_NODE": "2"}, range(4), tmp_path) == []


def test_a_rank_that_cannot_be_bound_says_so_and_goes_on(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    before = os.sched_getaffinity(0)

    cpus.bind(["0", "4000"])
    cpus.bind(["0"])
    cpus.bind([])

    assert capsys.readouterr().err == "hpctrain: not bound to CPUs 4000: Invalid argument\n"
    assert os.sched_getaffinity(0) == before


def test_status_shows_the_cpus_of_each_rank_of_the_newest_attempt():
    sample = RankSample(0.0, 2, 5, 5, (1.0,) * 4)
    attempts = [SimpleNamespace(number=1), SimpleNamespace(number=2)]
    status = SimpleNamespace(cpus=["49-55", "57-63"], attempts=attempts)

    (column,) = _bound(status, sample, [0, 1, 3])
    assert (column.title, column.cells) == ("cpus", ["49-55", "57-63", "57-63"])
    attempts.append(SimpleNamespace(number=3))
    assert _bound(status, sample, [0]) == []
    assert str(ranks_table(status, None, 80)[-1]).endswith("CPUs of a node's ranks: 49-55; 57-63")
