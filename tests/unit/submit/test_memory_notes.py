"""What copies take of a node's memory is said where it is known, and else that it is not."""

from __future__ import annotations

import pytest

from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.settings.schema import AliveSettings, Settings, SlurmSettings
from hpctrain.launch.checks import memory_notes

GIB = 2**30


@pytest.mark.parametrize(
    ("settings", "outlives", "copies", "amount"),
    [
        ({}, True, 2, "6.0 GiB"),
        ({"spares": 1}, True, 4, "12.0 GiB"),
        ({"shrink": "auto"}, True, 4, "12.0 GiB"),
        ({"spares": 1}, False, 2, "6.0 GiB"),
        ({"spares": 1, "memory_peer": "no"}, True, 2, "6.0 GiB"),
    ],
)
def test_a_node_needs_its_part_of_the_state_for_each_copy(settings, outlives, copies, amount):
    asked = Settings(
        alive=AliveSettings(memory="auto", **settings), slurm=SlurmSettings(nodes="3-5")
    )
    cluster = get_cluster("slurm" if outlives else "local")

    (known,) = memory_notes(asked, cluster, 9 * GIB)
    (unknown,) = memory_notes(asked, cluster)

    assert f"about {amount} of each node's memory, {copies} times" in known
    assert f"is not known before the first checkpoint: {copies} times" in unknown
    assert ("next node" in known) is ("next node" in unknown) is (copies == 4)


def test_nothing_is_said_where_no_copies_are_made():
    assert memory_notes(Settings(), get_cluster("slurm"), 9 * GIB) == []
    assert memory_notes(Settings(), get_cluster("slurm")) == []
