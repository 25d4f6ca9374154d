"""What a preflight's first node does grows with the nodes, and not with their square."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.cluster.preflight import rendezvous
from hpctrain.cluster.preflight.checks import Expected, Order
from hpctrain.cluster.preflight.facts import NodeFacts
from hpctrain.cluster.preflight.node import NodePlace, _Judge
from hpctrain.cluster.preflight.rendezvous import Acceptor, Coordinator, Peer
from hpctrain.core.base import listener
from tests.support import gates
from tests.support.ports import free_port

KEY = "key"
PATIENCE_S = 20.0


@pytest.fixture
def port():
    return free_port()


def answers_of(size, folder, *, silent=()):
    """What the first of so many nodes tells each to look for."""
    names = [f"accelerated-node{rank:06d}" for rank in range(size)]
    place = NodePlace(names, 0, "127.0.0.1", 1, KEY, folder)
    values = {
        rank: {
            "facts": NodeFacts(node=name, host=name).plain(),
            "nonce": f"{rank:016x}",
            "error": "",
        }
        for rank, name in enumerate(names)
        if rank not in silent
    }
    with _Judge(place, Order(Expected(), bandwidth=False), {}) as judge:
        return judge.facts(values)


def test_what_each_node_is_told_does_not_grow_with_the_nodes(tmp_path):
    sizes = {
        size: [len(json.dumps(one)) for rank, one in answers_of(size, tmp_path).items() if rank]
        for size in (64, 2048)
    }

    assert max(sizes[2048]) < 3 * max(sizes[64])
    assert max(sizes[2048]) < 4096


def test_nobody_looks_for_a_node_that_did_not_answer_and_all_for_some(tmp_path):
    answers = answers_of(100, tmp_path, silent={1, 50})
    gone = {"accelerated-node000001", "accelerated-node000050"}

    assert answers.keys() == set(range(100)) - {1, 50}
    assert all(gone.isdisjoint(one["nonces"]) for one in answers.values())
    assert all(len(one["nonces"]) >= 10 for one in answers.values())
    assert [rank for rank, one in answers.items() if one["list"]] == [0]
    assert len(answers[0]["nonces"]) == 98


def test_who_sees_none_of_those_that_it_was_told_of_is_the_one_to_blame(tmp_path):
    size = 100
    names = [f"n{rank}" for rank in range(size)]
    place = NodePlace(names, 0, "127.0.0.1", 1, KEY, tmp_path)
    facts = {
        rank: {"facts": NodeFacts(node=name, host=name).plain(), "nonce": name, "error": ""}
        for rank, name in enumerate(names)
    }
    with _Judge(place, Order(Expected(), bandwidth=False), {}) as judge:
        told = judge.facts(facts)
        lost = [name for name in told[7]["nonces"] if name != "n7"]
        parts = judge.look(
            {
                rank: {"unresolved": [], "unseen": lost if rank == 7 else [], "lock": ""}
                for rank in range(size)
            }
        )
        report = judge.report({}, 1.0)

    assert parts == dict.fromkeys(range(size))
    assert list(report.bad) == ["n7"]


class CountedGuest(listener._Unproved):
    """Counts how often anybody looks at how long a guest may stay."""

    looks = 0

    def __getattribute__(self, name):
        if name == "until_s":
            CountedGuest.looks += 1
        return super().__getattribute__(name)


def test_who_comes_costs_nothing_for_each_of_those_who_are_there(monkeypatch):
    monkeypatch.setattr(listener, "_Unproved", CountedGuest)
    CountedGuest.looks = 0
    count = 150
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        waiting = [socket.create_connection(server.getsockname()) for _ in range(count)]

        def come():
            for one in waiting:
                one.recv(1000)  # all are guests now
            Peer(1, "127.0.0.1", server.getsockname()[1], KEY, PATIENCE_S).__exit__()

        last = threading.Thread(target=come)
        last.start()
        found = Acceptor(server, 2, KEY).admit(time.monotonic() + PATIENCE_S)
        last.join()
    for one in [*waiting, *found.values()]:
        one.close()

    assert list(found) == [1]
    assert CountedGuest.looks < 4 * count


def test_those_who_do_not_tell_the_time_are_waited_for_together(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.5)
    silent, told = range(1, 33), range(33, 41)
    done, at_once = threading.Event(), []
    gates.before(
        monkeypatch, rendezvous, "_skew_of", lambda *_: at_once.append(threading.current_thread())
    )

    def node(rank):
        with Peer(rank, "127.0.0.1", port, KEY, PATIENCE_S) as peer:
            if rank in told:
                peer.serve_time(lambda: time.time() + rank)
            done.wait(PATIENCE_S)

    with ThreadPoolExecutor(41) as pool:
        nodes = [pool.submit(node, rank) for rank in range(1, 41)]
        with Coordinator(41, port, KEY, PATIENCE_S) as first:
            skews = first.skews()
        done.set()
        for one in nodes:
            one.result()

    assert sorted(skews) == list(told)
    assert all(abs(skew.offset_s - rank) <= skew.bound_s + 1e-3 for rank, skew in skews.items())
    assert first.missing == dict.fromkeys(silent, "gave no answer in time")
    assert len(at_once) == 40
    assert len(set(at_once)) <= rendezvous.ASKED_AT_ONCE


def test_each_node_gets_its_own_answer(port):
    def node(rank):
        with Peer(rank, "127.0.0.1", port, KEY, PATIENCE_S) as peer:
            return peer.agree(rank * 10, PATIENCE_S)

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(node, rank) for rank in (1, 2, 3)]
        with Coordinator(4, port, KEY, PATIENCE_S) as first:
            own = first.agree_each(
                7, lambda values: {r: f"{r}: {v}" for r, v in values.items()}, PATIENCE_S
            )

    assert own == "0: 7"
    assert [one.result() for one in others] == ["1: 10", "2: 20", "3: 30"]
