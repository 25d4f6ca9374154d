"""Copies on another node: real replica servers and sockets; the test plays the ranks."""

from __future__ import annotations

import os
import random
import socket
import threading

import pytest

from hpctrain.core.testing.faults import armed
from hpctrain.errors import ControlLost
from hpctrain.node.control.wire import Codes, Garbled, Greeting
from hpctrain.node.memory import copy_line
from hpctrain.node.memory.copy_line import CopyLine, CopyListener, meet
from hpctrain.node.memory.replica_peer import replica_peers_of
from hpctrain.node.memory.slots import HeldCopy, Mark, choose
from tests.support.patience import PATIENCE_S
from tests.support.replica_servers import (
    ROOM,
    ReplicaServers,
    copy_by_all,
    covered_by_all,
    plan_of,
    ready,
    until,
    values_of,
    write_copy,
)

NODES = 3


@pytest.fixture
def job(tmp_path):
    """Three nodes with two ranks each."""
    replica_servers = ReplicaServers(tmp_path, nodes=NODES, ranks=2, to_peer=True)
    yield replica_servers
    replica_servers.close()


def settled_by_all(lines, step):
    for line in lines:
        until(lambda line=line: line.settled >= step, f"step {step} is not settled")


def choices(lines, least_step=0):
    """What all nodes together can go on from, as `restore.NodesCopies` asks them."""
    return choose([line.held() for line in lines if line.is_first], least_step)


def content(line, choice, rank):
    """A rank's copy as it is read on a node."""
    handle = line.open(choice.mark, rank, choice.addresses.get(rank, []))
    assert handle is not None
    plan, _ = plan_of(rank, choice.world_size)
    try:
        return os.pread(handle, sum(plan.sizes), plan.head)
    finally:
        os.close(handle)


def expected(step, rank):
    return values_of(step, rank, sum(plan_of(rank, 2 * NODES)[0].sizes))


def memory(replica_servers, node, rank, mark):
    """The bytes of a copy in a node's memory."""
    return replica_servers.replica_servers[node]._copies.find(mark, rank).view


def test_a_covered_step_lies_on_two_nodes_again_and_again(job):
    lines = ready(job)

    for step in (10, 20, 30, 40):
        covered_by_all(lines, step)

    for node in range(NODES):
        held = lines[2 * node].held()
        before = (node - 1) % NODES
        assert HeldCopy(1, 40, 6, 2 * node) in held.own
        assert {copy.rank for copy in held.guests if copy.step == 40} == {
            2 * before,
            2 * before + 1,
        }
        assert held.nbytes >= 8 * ROOM
    assert lines[0].covered == 40


@pytest.mark.parametrize("lost", [1, 2])
def test_after_a_lost_node_every_rank_has_its_part_of_the_last_covered_step(job, lost):
    covered_by_all(ready(job), 10)
    covered_by_all(job.lines, 20)

    job.lose(lost)
    lines = job.begin()

    newest = choices(lines)[0]
    assert (newest.mark, newest.kept_by) == (Mark(1, 20), "peer")
    for rank, line in enumerate(lines):
        assert content(line, newest, rank) == expected(20, rank)
        assert content(line, newest, (rank + 3) % 6) == expected(20, (rank + 3) % 6)
    for line in lines:
        line.chosen(newest.mark)
        assert line.take_room(ROOM) == ""
    covered_by_all(lines, 25)
    job.lose(1)
    newest = choices(job.begin())[0]
    assert (newest.mark, newest.kept_by) == (Mark(2, 25), "peer")


def test_two_nodes_of_one_switch_may_go_at_once_where_their_copies_are_on_another(tmp_path):
    job = ReplicaServers(tmp_path, nodes=4, ranks=1, to_peer=True)
    job.peers = replica_peers_of(["s1", "s1", "s2", "s2"])
    covered_by_all(ready(job), 20)
    guests = [[copy.rank for copy in line.held().guests] for line in job.lines]
    assert guests == [[2], [3], [0], [1]]

    job.lose(3)
    job.lose(2)
    lines = job.begin()

    newest = choices(lines)[0]
    assert (newest.mark, newest.kept_by) == (Mark(1, 20), "peer")
    for rank, line in enumerate(lines):
        plan, _ = plan_of(rank, 4)
        assert content(line, newest, rank) == values_of(20, rank, sum(plan.sizes))
    job.close()


def test_what_a_spare_has_fetched_is_its_own_from_then_on(job):
    covered_by_all(ready(job), 20)
    job.lose(1)
    lines = job.begin()
    newest = choices(lines)[0]
    for rank, line in enumerate(lines):
        assert content(line, newest, rank) == expected(20, rank)
        line.chosen(newest.mark)
    until(
        lambda: all(replica_server._round._has_chosen for replica_server in job.replica_servers),
        "no word came",
    )

    assert lines[4].held().own == [HeldCopy(1, 20, 6, 4), HeldCopy(1, 20, 6, 5)]
    assert all(not replica_server._copies._fetched for replica_server in job.replica_servers)
    assert [line.take_room(ROOM) for line in lines] == [""] * 6
    covered_by_all(lines, 25)  # it takes no slot from a newer copy
    covered_by_all(lines, 30)


def test_a_copy_for_a_rank_whose_slot_holds_anothers_leaves_a_slot_free(job):
    covered_by_all(ready(job), 20)
    lines = job.begin()
    newest = choices(lines)[0]
    for rank, line in enumerate(lines):
        for other in range(6):
            assert content(line, newest, other) == expected(20, other)
        assert content(line, newest, rank) == expected(20, rank)
    for line in lines:
        line.chosen(newest.mark)
        assert line.take_room(ROOM) == ""

    covered_by_all(lines, 25)
    assert all(not replica_server._copies._fetched for replica_server in job.replica_servers)


def test_two_neighbours_lost_leave_nothing_to_go_on_from(job):
    covered_by_all(ready(job), 20)

    job.lose(1)
    job.lose(1)

    assert choices(job.begin()) == []


def test_the_same_nodes_go_on_from_their_own(job):
    covered_by_all(ready(job), 20)

    lines = job.begin()

    newest = choices(lines)[0]
    assert (newest.mark, newest.kept_by) == (Mark(1, 20), "memory")


def test_a_copy_that_is_not_sent_on_counts_nowhere(job):
    lines = ready(job)
    covered_by_all(lines, 10)
    with armed("fail:memory.send,rank=3,step=20,error=EPIPE"):
        copy_by_all(lines, 20)
        settled_by_all(lines, 20)

    for line in lines:
        assert line.covered == 10
        until(lambda line=line: line.is_off, "copies go on where the peer is lost")
    assert "n1: copies cannot be sent to another node" in lines[0].why_off()
    assert choices(lines)[-1].mark == Mark(1, 10)


@pytest.mark.parametrize("point", ["memory.received", "memory.acknowledge"])
def test_a_peer_lost_in_the_middle_of_a_copy_leaves_the_step_before(job, point):
    lines = ready(job)
    covered_by_all(lines, 10)
    with armed(f"fail:{point},rank=2,step=20"):
        copy_by_all(lines, 20)
        settled_by_all(lines, 20)
    assert {line.covered for line in lines} == {10}

    job.lose(2)  # which had nodes 1's
    newest = choices(job.begin())[0]

    assert newest.mark in {Mark(1, 10), Mark(1, 20)}
    for rank, line in enumerate(job.lines):
        assert content(line, newest, rank) == expected(newest.mark.step, rank)


def test_a_bit_that_flips_after_the_proof_is_not_sent_on(job, caplog):
    lines = ready(job)
    covered_by_all(lines, 10)
    with armed("flip:memory.proved,rank=3,step=20,bit=4001"):
        copy_by_all(lines, 20)
        settled_by_all(lines, 20)

    assert {line.covered for line in lines} == {10}
    assert not lines[0].is_off, "such a step is left out, and the next one is not"
    assert "step 20 is not on another node: its bytes are not those" in caplog.text
    covered_by_all(lines, 30)


def test_a_bad_copy_is_not_fetched_where_it_is_the_only_one(job):
    covered_by_all(ready(job), 20)
    job.lose(1)
    lines = job.begin()
    newest = choices(lines)[0]
    memory(job, 1, 2, newest.mark)[5000] ^= 1  # what the peer kept of the lost node's rank 2

    assert lines[5].open(newest.mark, 2, newest.addresses[2]) is None
    assert content(lines[5], newest, 3) == expected(20, 3)


def test_too_little_memory_for_the_peers_copies_ends_copies_on_all(job, monkeypatch):
    lines = job.begin()
    for line in lines:
        line.chosen(None)
    node_copies = job.replica_servers[1]._copies
    monkeypatch.setattr(
        node_copies,
        "take_guest",
        lambda local, _: type(node_copies).take_guest(node_copies, local, 1 << 60),
    )

    why = lines[0].take_room(ROOM)

    assert "the node for copies of n0: copies in memory need" in why
    assert 'alive.memory_peer = "no"' in why
    for line in lines:
        until(lambda line=line: line.is_off, "a node has not heard of it")


def test_another_user_at_the_listener_is_refused_and_noted(job, caplog):
    lines = ready(job)
    address = lines[0].held().address
    for said in (b"\0\0\0\2{}", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64):
        with socket.create_connection((address[0], address[1]), timeout=PATIENCE_S) as other_user:
            other_user.sendall(said)
            heard = b""
            while piece := other_user.recv(1 << 16):
                heard += piece
        assert b"nonce" in heard
        assert len(heard) < 200
    until(lambda: caplog.text.count("was refused copies of the state") == 3, "it is not noted")

    covered_by_all(lines, 10)


def test_nothing_is_taken_in_before_it_is_known_what_training_goes_on_from(job):
    lines = job.begin()
    for line in lines[:2]:
        line.chosen(None)
    for line in lines:
        assert line.take_room(ROOM) == ""
    for rank in (0, 1):
        until(lambda rank=rank: lines[rank]._words[lines[rank]._at], "no slot")
        write_copy(lines[rank], 10, rank, 6)
    for line in lines[2:]:
        line.left_out(10)
    settled_by_all(lines, 10)

    assert lines[0].covered == -1
    assert lines[2].held().guests == []


def test_a_round_that_is_over_takes_nothing_in(job):
    ready(job)
    over = job.replica_servers[1]._round
    assert over.needed() == (None, Mark(1, -1))

    job.begin()

    with pytest.raises(ControlLost, match="over"):
        over.needed()


@pytest.mark.parametrize(
    ("low", "high"), [(-1, 8), (8, 8), (0, 1 << 40), (0, copy_line.PIECE_BYTES + 1)]
)
def test_bytes_that_are_not_there_are_given_to_nobody(job, low, high):
    covered_by_all(ready(job), 10)
    address, port = job.lines[0].held().address
    line = meet((address, port), greeted("secret", "round 1/copies"), 1)
    asked = {"is": "read", "mark": [1, 10], "rank": 0}
    assert len(line.ask(asked | {"low": 0, "high": 100})[1]) == 100

    line.say(asked | {"low": low, "high": high})

    with pytest.raises(OSError, match=r"closed|reset"):
        line.hear(wait_s=20)
    line.close()


def greeted(secret, about="copies"):
    return lambda: Greeting(secret, about)


@pytest.mark.parametrize(
    ("secret", "about", "node"),
    [("another", "copies", 1), ("secret", "round 1", 1), ("secret", "copies", 7)],
)
def test_another_secret_round_or_node_is_not_let_in(monkeypatch, secret, about, node):
    monkeypatch.setattr(copy_line, "JOIN_S", 0.0)
    served = []
    listener = CopyListener(range(3), greeted("secret"), lambda number, _: served.append(number))
    port = listener.open("127.0.0.1")

    with pytest.raises(ControlLost, match="is no replica server"):
        meet(("127.0.0.1", port), greeted(secret, about), node)

    assert served == []
    meet(("127.0.0.1", port), greeted("secret"), 2).close()
    until(lambda: served == [2], "who knows the secret is let in")
    listener.close()


def test_of_many_strangers_the_log_hears_of_the_first(caplog):
    listener = CopyListener(range(3), greeted("secret"), lambda *_: None)
    for _ in range(2 * copy_line.MOST_NOTED):
        listener._note("10.0.0.1", "a stranger")
    assert caplog.text.count("was refused copies of the state") == copy_line.MOST_NOTED


def test_a_false_replica_server_is_found_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(copy_line, "JOIN_S", 0.0)
    false = CopyListener(range(3), greeted("another"), lambda *_: None)
    port = false.open("127.0.0.1")

    with pytest.raises(ControlLost):
        meet(("127.0.0.1", port), greeted("secret"), 1)
    false.close()


def test_a_closed_listener_accepts_nobody_and_ends_who_was():
    ended = threading.Event()

    def serve(_node, line):
        try:
            line.hear(wait_s=20)
        except OSError:
            ended.set()

    listener = CopyListener(range(3), greeted("secret"), serve)
    port = listener.open("127.0.0.1")
    line = meet(("127.0.0.1", port), greeted("secret"), 1)
    until(lambda: listener._lines, "it is not served")

    listener.close()

    assert ended.wait(PATIENCE_S)
    with pytest.raises((OSError, Garbled)):
        line.hear(wait_s=20)
    with socket.socket() as late:
        assert late.connect_ex(("127.0.0.1", port)) != 0
    until(lambda: not any(t.name == f"copies-{port}" for t in threading.enumerate()), "it waits on")
    line.close()


def test_every_bit_that_flips_on_the_way_is_found():
    dice = random.Random(5)
    for _ in range(300):
        here, wire = socket.socketpair()
        there, rest = socket.socketpair()
        sender, receiver = CopyLine(here), CopyLine(there)
        sender.trust(Codes(b"k" * 32, "child"))
        receiver.trust(Codes(b"k" * 32, "parent"))
        sender.say({"at": 0}, b"weights" * 40)
        frame = bytearray(wire.recv(1 << 16))
        frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
        rest.sendall(frame)
        rest.shutdown(socket.SHUT_WR)

        with pytest.raises((Garbled, OSError)):
            receiver.hear(wait_s=20)
        for end in (here, wire, there, rest):
            end.close()


def test_a_trusted_peer_has_longer_than_one_that_greets():
    here, there = socket.socketpair()
    with here, there:
        line = CopyLine(here)
        assert here.gettimeout() == copy_line.GREET_S

        line.trust(Codes(b"k" * 32, "child"))

        assert here.gettimeout() == copy_line.SILENT_S
