"""After which ends of a round ranks may go on from what others have left."""

from __future__ import annotations

import pytest

from hpctrain.agent.last_will import NodeWills, may_count
from hpctrain.agent.rounds import RoundEnd
from hpctrain.base.records import HANG, FailureReport


def report(kind="signal", summary="killed by SIGKILL"):
    return FailureReport(1, "n1", kind, summary)


def test_they_count_where_a_rank_was_killed_and_ranks_start_again():
    assert may_count(RoundEnd("failed", restart=True, failure=report()))
    echo = report("exception", "RuntimeError: Connection closed by peer [127.0.0.1]")
    assert may_count(RoundEnd("failed", restart=True, failure=echo))


@pytest.mark.parametrize(
    "end",
    [
        RoundEnd("failed", restart=False, failure=report()),
        RoundEnd("failed", restart=True, failure=report("exception", "ValueError: bad batch")),
        RoundEnd(
            "failed",
            restart=True,
            failure=report("exception", "ReplicasDiverged: rank 2 differs, training goes back"),
        ),
        RoundEnd("failed", restart=True, failure=report("exit", "exit code 3")),
        RoundEnd("hung", restart=True, failure=report(HANG, "ranks hang")),
        RoundEnd("failed", restart=True, failure=report(), silent_nodes=[1]),
        RoundEnd("failed", restart=True, why="n3 joined the job"),
        RoundEnd("killed", why="a stop took too long"),
        RoundEnd("left"),
    ],
)
def test_they_do_not_where_weights_may_be_bad_or_a_node_is_gone(end):
    assert not may_count(end)


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        (RoundEnd("failed", restart=True, failure=report()), True),
        (RoundEnd("left"), False),
        (None, True),  # the first node says so by its own ranks' parts
    ],
)
def test_the_keeper_hears_whether_they_count(end, counts):
    orders = []

    NodeWills(orders.append).settle(end, 3)

    assert orders == [{"wills": {"attempt": 3, "counts": counts}}]
