"""Replica servers in processes that are killed at every point of a copy's way to another node."""

from __future__ import annotations

import contextlib
import os
import random
import time

import pytest

from hpctrain.core.testing.faults import armed
from hpctrain.node.memory.replica_client import ReplicaServerLost
from hpctrain.node.memory.slots import choose
from tests.support.replica_servers import (
    ReplicaServerProcesses,
    plan_of,
    until,
    values_of,
    write_copy,
)

ROOM = 8000
NODES = 3
POINTS = [
    "memory.digest",
    "memory.proved",
    "memory.send",
    "memory.received",
    "memory.acknowledge",
]


def job_with(tmp_path, faults):
    """Replica servers of three nodes with a rank each, in which these faults happen."""
    with armed(faults):
        return ReplicaServerProcesses(tmp_path, NODES, 1, to_peer=True)


def ready(lines):
    for line in lines:
        line.chosen(None)
    for line in lines:
        assert line.take_room(ROOM) == ""


def copy_until_off(lines, steps):
    """Let ranks copy steps until a replica server is lost; return the newest that was covered."""

    def is_off():
        return sum(line.is_off for line in lines) >= NODES - 1

    for step in steps:
        for rank, line in enumerate(lines):
            until(lambda line=line: line._words[line._at] or is_off(), f"no slot for {rank}")
            with contextlib.suppress(ReplicaServerLost):  # its rank would be killed with the node
                write_copy(line, step, rank, NODES)
        until(
            lambda step=step: is_off() or all(line.settled == step for line in lines),
            f"step {step} does not end",
        )
        if is_off():
            break
    return max(line.covered for line in lines)


def lost_of(job):
    """The node whose replica server was killed."""
    until(
        lambda: any(replica_server.end() for replica_server in job.replica_servers),
        "no replica server was killed",
    )
    return next(
        node for node, replica_server in enumerate(job.replica_servers) if replica_server.end()
    )


def choices(lines):
    return choose([line.held() for line in lines], 0)


def assert_whole(lines, choice):
    """Every node reads every rank's part of the one step."""
    for rank in range(NODES):
        plan, _ = plan_of(rank, NODES)
        for line in lines:
            handle = line.open(choice.mark, rank, choice.addresses[rank])
            assert handle is not None
            try:
                content = os.pread(handle, sum(plan.sizes), plan.head)
            finally:
                os.close(handle)
            assert content == values_of(choice.mark.step, rank, sum(plan.sizes))


@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_node_killed_on_a_copys_way_leaves_the_newest_covered_step_whole(tmp_path, point, hit):
    rank = 0 if point in {"memory.received", "memory.acknowledge"} else 1  # both on node 1
    job = job_with(tmp_path, f"kill:{point},rank={rank},hit={hit}")
    try:
        ready(job.begin())
        covered = copy_until_off(job.lines, range(10, 60, 10))
        assert lost_of(job) == 1

        job.lose(1)
        there = choices(job.begin())

        assert covered == (-1 if hit == 1 else 20)
        assert [choice.mark.step for choice in there][:1] in (
            [[], [10]] if hit == 1 else [[20], [30]]
        )
        for choice in there[:1]:
            assert_whole(job.lines, choice)
    finally:
        job.close()


def test_a_replica_server_killed_while_it_fetches_costs_its_node_alone(tmp_path):
    job = job_with(tmp_path, "")
    try:
        ready(job.begin())
        assert copy_until_off(job.lines, [10]) == 10
        with armed("kill:memory.fetch"):
            job.lose(1)
        lines = job.begin()
        choice = choices(lines)[0]
        with pytest.raises(ReplicaServerLost):
            lines[2].open(choice.mark, 2, choice.addresses[2])

        job.lose(lost_of(job))

        assert_whole(job.begin(), choices(job.lines)[0])
    finally:
        job.close()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_random_kills_on_a_copys_way_leave_the_newest_covered_step_whole(tmp_path):
    """Of any of the nodes, the first one too, at any point and any step of some."""
    seed = int(os.environ.get("HPCTRAIN_SEED", time.time_ns() % 10**9))
    chance, met = random.Random(seed), 0
    for number in range(int(os.environ.get("HPCTRAIN_DISTURBANCES", "300"))):
        point, hit = chance.choice([*POINTS, "memory.publish"]), chance.randint(1, 6)
        whose = "" if point == "memory.publish" else f",rank={chance.randrange(NODES)}"
        told = f"seed {seed}, kill {number}: {point}{whose}, hit {hit}"
        job = job_with(tmp_path / f"{number}", f"kill:{point}{whose},hit={hit}")
        try:
            ready(job.begin())
            covered = copy_until_off(job.lines, range(10, 110, 10))
            job.lose(lost_of(job))
            there = choices(job.begin())

            assert [choice.mark.step for choice in there[:1]] >= [covered] * (covered > 0), told
            for choice in there:
                assert_whole(job.lines, choice)
            met += bool(there)
        finally:
            job.close()
    assert met > 0, seed
