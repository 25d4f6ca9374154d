"""Replica servers with real sockets and memory, and ranks that are played by the test."""

from __future__ import annotations

import os
import socket

import pytest

from hpctrain.checkpoint.format.shard import proof_bytes
from hpctrain.node.memory import replica_server as replica_servers_module
from hpctrain.node.memory.replica_client import SOCKET, ReplicaClient, ReplicaServerLost
from hpctrain.node.memory.slots import HeldCopy, Mark
from tests.support.replica_servers import (
    ROOM,
    ReplicaServers,
    covered_by_all,
    plan_of,
    ready,
    until,
    values_of,
    write_copy,
)


@pytest.fixture
def one(tmp_path):
    """A node with two ranks."""
    replica_servers = ReplicaServers(tmp_path, nodes=1, ranks=2)
    yield replica_servers
    replica_servers.close()


@pytest.fixture
def three(tmp_path):
    """Three nodes with a rank each."""
    replica_servers = ReplicaServers(tmp_path, nodes=3, ranks=1)
    yield replica_servers
    replica_servers.close()


def content(line, mark, rank):
    handle = line.open(mark, rank)
    assert handle is not None
    plan, _ = plan_of(rank, 3)
    nbytes = sum(plan.sizes)
    try:
        return os.pread(handle, nbytes, plan_of(rank, 2)[0].head)
    finally:
        os.close(handle)


def test_copies_of_all_ranks_make_a_step_covered_again_and_again(one):
    lines = ready(one)

    for step in range(10, 110, 10):
        covered_by_all(lines, step)

    held, _, _, nbytes = lines[0].held()
    assert {copy.step for copy in held} <= {90, 100}
    assert {copy.rank for copy in held if copy.step == 100} == {0, 1}
    assert nbytes >= 4 * ROOM
    for rank in (0, 1):
        plan, _ = plan_of(rank, 2)
        assert content(lines[0], Mark(1, 100), rank) == values_of(100, rank, sum(plan.sizes))


def test_all_nodes_must_have_a_step(three):
    lines = ready(three)
    covered_by_all(lines, 10)

    write_copy(lines[0], 20, 0, 3)
    write_copy(lines[1], 20, 1, 3)
    lines[2].left_out(20)
    for line in lines:
        until(lambda line=line: line.settled == 20, "step 20 is not settled")
        assert line.covered == 10

    covered_by_all(lines, 30)


def test_copies_outlive_the_round_and_what_is_not_gone_on_from_goes(one):
    lines = ready(one)
    covered_by_all(lines, 10)
    covered_by_all(lines, 20)
    slot = lines[0].take_slot()  # it dies in the middle of a copy

    again = one.begin()

    marks = {copy.mark for copy in again[0].held()[0]}
    assert slot is not None
    assert Mark(1, 20) in marks
    for line in again:
        line.chosen(Mark(1, 20))
        assert line.take_room(ROOM) == ""
    until(lambda: {c.mark for c in again[1].held()[0]} == {Mark(1, 20)}, "the others are there")
    covered_by_all(again, 25)
    assert again[0].held()[0].count(HeldCopy(2, 25, 2, 0)) == 1


def test_where_nothing_was_chosen_no_memory_is_given(one):
    lines = one.begin()
    lines[0].take_room(ROOM)

    assert lines[0].take_slot() is None


def test_too_little_memory_on_one_node_ends_copies_on_all(three, monkeypatch):
    lines = three.begin()
    for line in lines:
        line.chosen(None)
    assert lines[0].take_room(ROOM) == ""

    why = lines[1].take_room(1 << 60)

    assert "GB" in why
    for line in lines:
        until(lambda line=line: line.is_off, "a node has not heard of it")
        assert line.why_off().startswith("n1: copies in memory need")


def test_a_replica_server_that_is_lost_ends_copies_on_the_others(three):
    lines = ready(three)
    covered_by_all(lines, 10)

    three.loop.call_soon_threadsafe(three.replica_servers[1]._round.close)

    for line in (lines[0], lines[2]):
        until(lambda line=line: line.is_off, "a node has not heard of it")
    assert "replica server of node 1 is lost" in lines[0].why_off()
    assert {copy.step for copy in lines[0].held()[0]} == {10}, "they are still there"


def test_another_user_is_not_let_in_between_replica_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_servers_module, "JOIN_S", 0.1)
    replica_servers = ReplicaServers(tmp_path, nodes=2, ranks=1)
    try:
        with pytest.raises(replica_servers_module.ControlLost):
            replica_servers.begin(secrets=["secret", "another"])
    finally:
        replica_servers.close()


def test_another_users_process_is_not_let_in(one, monkeypatch):
    monkeypatch.setattr(replica_servers_module.os, "getuid", lambda: 12345)

    with pytest.raises(ReplicaServerLost):
        one.begin()


@pytest.mark.parametrize(
    "packet", [b"", b"[]", b"{", b'{"is":"hello","rank":7,"attempt":1}', b'{"is":"room","bytes":1}']
)
def test_what_makes_no_sense_ends_that_line_alone(one, packet):
    lines = ready(one)
    other_user = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other_user.connect(str(one.folder(0) / SOCKET))
    other_user.settimeout(20)

    if packet:
        other_user.send(packet)
        assert b"error" in other_user.recv(1 << 16)
        assert other_user.recv(1 << 16) == b""
    other_user.close()

    covered_by_all(lines, 10)


def test_a_copy_into_a_slot_that_was_not_given_is_none(one):
    lines = ready(one)
    plan, _ = plan_of(0, 2)

    lines[0].copied(1, 10, plan)  # it was given slot 0
    with pytest.raises(ReplicaServerLost):
        lines[0].held()  # the replica server has ended the line

    assert lines[1].held()[0] == []


def test_a_copy_that_is_longer_than_its_slot_is_none(one):
    lines = one.begin()
    for line in lines:
        line.chosen(None)
        assert line.take_room(100) == ""
    until(lambda: lines[0]._words[lines[0]._at], "no slot")
    slot = lines[0].take_slot()
    plan, _ = plan_of(0, 2)

    lines[0].copied(slot, 10, plan)

    assert proof_bytes(5) < plan.size
    write_copy(lines[1], 10, 1, 2) if plan.size < 100 else lines[1].left_out(10)
    until(lambda: lines[1].settled == 10, "it is not settled")
    assert lines[1].covered == -1


def test_a_rank_that_meets_no_replica_server_is_told(tmp_path):
    with pytest.raises(ReplicaServerLost, match="cannot be met"):
        ReplicaClient(tmp_path, 0, 1)
