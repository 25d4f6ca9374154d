from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.cluster.preflight import node as preflight_run
from hpctrain.cluster.preflight import rendezvous
from hpctrain.cluster.preflight.checks import Expected, Order
from hpctrain.cluster.preflight.node import NodePlace
from hpctrain.cluster.preflight.rendezvous import (
    COORDINATOR,
    PEER,
    Alone,
    Connection,
    Coordinator,
    Peer,
    UnauthenticatedPeer,
)
from hpctrain.core.base import listener
from hpctrain.core.base.secret import code
from hpctrain.errors import ChecksFailed
from tests.support.ports import free_port
from tests.support.users import OWNER, STRANGER, run_as, start_as

KEY = "key"
PATIENCE_S = 20.0


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def nodes():
    with ThreadPoolExecutor(64) as pool:
        yield pool


def member(rank, port, key=KEY):
    return Peer(rank, "127.0.0.1", port, key, PATIENCE_S)


def say(rank, port, value):
    with member(rank, port) as one:
        return one.agree(value, PATIENCE_S)


def test_every_node_gets_what_the_first_made_of_all_values(port, nodes):
    others = [nodes.submit(say, rank, port, rank * 10) for rank in (1, 2, 3)]
    with Coordinator(4, port, KEY, PATIENCE_S) as host:
        answer = host.agree(7, lambda values: sorted(values.items()), PATIENCE_S)

    assert answer == [(0, 7), (1, 10), (2, 20), (3, 30)]
    assert [one.result() for one in others] == [[[0, 7], [1, 10], [2, 20], [3, 30]]] * 3
    assert host.missing == {}


def test_a_node_that_never_comes_is_named_and_the_others_go_on(port, nodes):
    one = nodes.submit(say, 2, port, "here")

    with Coordinator(3, port, KEY, 1.0) as host:
        assert host.agree("first", dict, PATIENCE_S) == {0: "first", 2: "here"}
    assert one.result() == {"0": "first", "2": "here"}
    assert list(host.missing) == [1]


def test_a_node_that_falls_silent_is_named_and_left_out(port, nodes):
    heard = threading.Event()

    def silent():
        with member(1, port) as one:
            heard.wait(PATIENCE_S)
            with pytest.raises(Alone):
                one.agree("late", PATIENCE_S)

    gone = nodes.submit(silent)
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        assert host.agree("first", dict, 0.2) == {0: "first"}

    assert host.missing == {1: "gave no answer in time"}
    heard.set()
    gone.result()


def test_a_node_that_dies_is_named(port, nodes):
    gone = nodes.submit(lambda: member(1, port).__exit__())
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        gone.result()
        host.agree("first", dict, PATIENCE_S)

    assert "has gone" in host.missing[1]


def connected(port):
    """A connection to the host, as soon as it listens, and its first line."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            one = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            continue
        return one, json.loads(one.makefile("rb").readline())["challenge"]


def words_of_a_stranger(their):
    """What one may say who does not know the secret."""
    proof = code("another secret", PEER, their, "mine", 1)
    hello = {"rank": 1, "challenge": "mine", "proof": proof}
    right = code(KEY, PEER, their, "mine", 1)
    return [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"[" * 4000 + b"\n",
        b"\xff\xfe\n",
        b"x" * 5000,
        json.dumps({"key": KEY, "rank": 1}).encode() + b"\n",
        json.dumps(hello).encode() + b"\n",
        json.dumps(hello | {"proof": None}).encode() + b"\n",
        json.dumps(hello | {"proof": right, "rank": 2}).encode() + b"\n",  # another's proof
        json.dumps(hello | {"proof": right, "rank": True}).encode() + b"\n",
        json.dumps(hello | {"proof": right, "rank": "1"}).encode() + b"\n",
        json.dumps(hello | {"proof": right}).encode() + b"\n{}\n",  # says more than it is asked
    ]


def test_strangers_are_not_let_in(port, nodes):
    count = len(words_of_a_stranger(""))

    def other_user(number):
        one, their = connected(port)
        with one:
            one.sendall(words_of_a_stranger(their)[number])
            try:
                return one.recv(100)
            except ConnectionResetError:
                return b""

    other_users = [nodes.submit(other_user, number) for number in range(count)]
    real = nodes.submit(lambda: [s.result() for s in other_users] and say(1, port, 1))
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        host.agree(0, dict, PATIENCE_S)

    assert real.result() == {"0": 0, "1": 1}
    assert [one.result() for one in other_users] == [b""] * count


def test_silent_strangers_keep_nobody_out(port, nodes, monkeypatch):
    """None of them is sent away before the real one is there."""
    monkeypatch.setattr(rendezvous, "HELLO_S", PATIENCE_S)
    silent = [nodes.submit(connected, port) for _ in range(40)]

    def real():
        for one in silent:
            one.result()
        return say(1, port, 1)

    answer = nodes.submit(real)
    with Coordinator(2, port, KEY, PATIENCE_S / 2) as host:
        host.agree(0, dict, PATIENCE_S)

    assert answer.result() == {"0": 0, "1": 1}
    for one in silent:
        one.result()[0].close()


def test_of_more_strangers_than_are_borne_the_first_have_to_go(port, nodes, monkeypatch):
    monkeypatch.setattr(listener, "PLACES", 3)
    waiting = []

    def real():
        waiting.extend(connected(port)[0] for _ in range(20))
        return say(1, port, 1)

    answer = nodes.submit(real)
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        host.agree(0, dict, PATIENCE_S)

    assert answer.result() == {"0": 0, "1": 1}
    for one in waiting:
        one.close()


def test_the_first_of_a_rank_is_it(port, nodes):
    first = threading.Event()

    def impostor():
        first.wait(PATIENCE_S)
        with pytest.raises(Alone), member(1, port) as one:
            one.agree("an impostor", PATIENCE_S)

    def real():
        with member(1, port) as one:
            first.set()
            return one.agree("the first", PATIENCE_S)

    late, answer = nodes.submit(impostor), nodes.submit(real)
    third = nodes.submit(lambda: late.result() or say(2, port, "third"))
    with Coordinator(3, port, KEY, PATIENCE_S) as host:
        host.agree("host", dict, PATIENCE_S)

    assert answer.result() == {"0": "host", "1": "the first", "2": "third"}
    third.result()


def test_a_member_takes_nothing_from_one_who_does_not_know_the_secret(port, nodes):
    """Neither an order nor anything else: what answers on the port may be anybody."""
    said = []

    def other_user():
        with socket.create_server(("127.0.0.1", port)) as server:
            while True:
                one = server.accept()[0]
                if server.gettimeout() is None and not said:
                    said.append(b"")
                with one, one.makefile("rb") as lines:
                    one.sendall(b'{"challenge": "c"}\n')
                    said.append(lines.readline())
                    if said[-1] == b"":
                        return
                    one.sendall(b'{"proof": "' + b"0" * 64 + b'"}\n{"answer": {"ranks": 1}}\n')

    nodes.submit(other_user)
    with pytest.raises(Alone, match="is answered by another: it does not know the secret"):
        Peer(1, "127.0.0.1", port, KEY, 0.3)
    socket.create_connection(("127.0.0.1", port)).close()  # lets it go

    assert all(KEY.encode() not in line for line in said)


def test_who_passes_every_word_on_can_say_none_of_his_own(port, nodes):
    """In between, with both ends' proofs passing through."""
    relay_port = free_port()

    def relay():
        with socket.create_server(("127.0.0.1", relay_port)) as server:
            theirs = server.accept()[0]
        ours, _ = connected_raw(port)
        with theirs, ours:
            down, up = ours.makefile("rb"), theirs.makefile("rb")
            theirs.sendall(down.readline())  # challenge
            ours.sendall(up.readline())
            theirs.sendall(down.readline())  # the host's proof
            up.readline()
            theirs.sendall(b"0" * 64 + b'{"answer": "of a stranger"}\n')
            theirs.recv(1)

    def connected_raw(at):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", at), timeout=PATIENCE_S), at
            except ConnectionRefusedError:
                assert time.monotonic() < deadline

    def victim():
        with pytest.raises(Alone, match="somebody else has spoken in its place"):
            say(1, relay_port, "mine")

    passing, heard = nodes.submit(relay), nodes.submit(victim)
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        heard.result()
        host.agree("host", dict, PATIENCE_S)
    passing.result()

    assert "has gone" in host.missing[1]


@pytest.mark.parametrize("odd", [None, 7, "text", [], {"answer": 1}, {"values": 1}])
def test_a_node_that_says_something_odd_is_named_and_left_out(port, nodes, odd):
    def strange():
        with member(1, port) as one:
            one._line.send(odd)
            with pytest.raises(Alone):
                one.agree(1, PATIENCE_S)

    done = nodes.submit(strange)
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        assert host.agree("first", dict, PATIENCE_S) == {0: "first"}
    done.result()

    assert "said nothing that a node of this version says" in host.missing[1]


def test_no_line_can_be_said_twice_or_in_anothers_place(nodes):
    left, right = socket.socketpair()
    with left, right:
        one = Connection(left, "session", side=COORDINATOR)
        other = Connection(right, "session", side=PEER)
        one.send(1)
        line = right.recv(1000)
        left.sendall(line + line)

        assert other.hear(1.0) == 1
        with pytest.raises(UnauthenticatedPeer):
            other.hear(1.0)
        right.sendall(line)  # back to who said it
        with pytest.raises(UnauthenticatedPeer):
            one.hear(1.0)
        one.close()
        other.close()


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 2.5])
def test_a_clock_is_measured_within_its_bound(port, nodes, ahead):
    def slow_clock():
        time.sleep(0.03)  # a network that is slow one way
        return time.time() + ahead

    def other():
        with member(1, port) as one:
            one.serve_time(slow_clock)

    done = nodes.submit(other)
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        skew = host.skews()[1]
    done.result()

    assert abs(skew.offset_s - ahead) <= skew.bound_s + 1e-3


def test_the_quickest_answer_tells_the_time_best(port, nodes):
    pauses = iter([0.4, 0.4])

    def clock_of_a_busy_node():
        threading.Event().wait(next(pauses, 0.0))
        return time.time()

    def other():
        with member(1, port) as one:
            one.serve_time(clock_of_a_busy_node)

    done = nodes.submit(other)
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        skew = host.skews()[1]
    done.result()

    assert skew.bound_s < 0.2


def test_a_first_node_that_is_not_there_is_told(port):
    with pytest.raises(Alone, match=f"port {port} cannot be reached"):
        Peer(1, "127.0.0.1", port, KEY, 0.1)


def test_no_environment_comes_over_the_network(port, nodes, monkeypatch, tmp_path):
    """A node starts a program with it: PYTHONPATH or LD_PRELOAD would run what another sends."""
    begun, theirs = [], {"PYTHONPATH": "/a/strangers", "LD_PRELOAD": "/a/strangers.so"}
    monkeypatch.setattr(
        preflight_run,
        "CollectiveProcess",
        lambda env: begun.append(env) or pytest.fail("no further"),
    )
    order = Order(Expected(env=theirs), bandwidth=True)
    assert order.to_others()["expected"]["env"] == {}
    place = NodePlace(["n0", "n1"], 1, "127.0.0.1", port, KEY, tmp_path, env={"NCCL_DEBUG": "WARN"})

    def other():
        with pytest.raises(pytest.fail.Exception, match="no further"):
            preflight_run.run_checks(place, None, print)

    done = nodes.submit(other)
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        host.agree(None, lambda _: order.plain(), PATIENCE_S)  # as an older version would
        host.skews()
        done.result()

    assert begun == [{"NCCL_DEBUG": "WARN"}]


@pytest.mark.parametrize("order", [None, [], {"expected": 7}, {"expected": {"new": 1}}])
def test_an_order_of_another_version_is_one_clear_refusal(port, nodes, tmp_path, order):
    place = NodePlace(["n0", "n1"], 1, "127.0.0.1", port, KEY, tmp_path)

    def other():
        with pytest.raises(ChecksFailed, match="is the same hpctrain installed on all of them"):
            preflight_run.run_checks(place, None, print)

    done = nodes.submit(other)
    with Coordinator(2, port, KEY, PATIENCE_S) as host:
        host.agree(None, lambda _: order, PATIENCE_S)
        done.result()


@pytest.mark.two_users
def test_another_user_who_has_the_port_first_gets_nothing_and_gives_nothing(common_path):
    """The attack as it was: a member comes to a stranger, who sends it an order."""
    port = free_port()
    run = common_path / "run"
    run.mkdir()
    os.chown(run, OWNER.uid, OWNER.gid)
    attack = (
        "import json, socket, sys\n"
        f"server = socket.create_server(('127.0.0.1', {port}))\n"
        "print('ready', flush=True)\n"
        "order = {'answer': {'expected': {'env': {'PYTHONSTARTUP': '/x'}}, 'bandwidth': True}}\n"
        "one, _ = server.accept()\n"
        'one.sendall(b\'{"challenge": "0"}\\n\')\n'
        "said = one.makefile('rb').readline()\n"
        "one.sendall(b'{\"proof\": \"0\"}\\n' + json.dumps(order).encode() + b'\\n')\n"
        "print(said.decode(), flush=True)\n"
    )
    member_of = (
        "import sys; from pathlib import Path\n"
        "from hpctrain.cluster.preflight.rendezvous import Peer\n"
        "from hpctrain.ledger.run.layout import RunDir\n"
        "from hpctrain.ledger.run.ownership import start_secret\n"
        f"secret = start_secret(RunDir(Path({str(run)!r})), '7', 0)\n"
        f"Peer(1, '127.0.0.1', {port}, secret, 0.0)\n"
    )
    with start_as(STRANGER, [sys.executable, "-c", attack]) as other_user:
        assert other_user.stdout.readline() == "ready\n"
        done = run_as(OWNER, [sys.executable, "-c", member_of], check=False)
        said = json.loads(other_user.stdout.readline())
        other_user.kill()

    assert "is answered by another: it does not know the secret of this job" in done.stderr
    assert sorted(said) == ["challenge", "proof", "rank"]
    assert (run / "secret").read_text().strip() not in json.dumps(said)
