from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.preflight.meeting import Alone, Host, Member

KEY = "key"
PATIENCE_S = 20.0


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def nodes():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def member(rank, port, key=KEY):
    return Member(rank, "127.0.0.1", port, key, PATIENCE_S)


def say(rank, port, value):
    with member(rank, port) as one:
        return one.agree(value, None, PATIENCE_S)


def test_every_node_gets_what_the_first_made_of_all_values(port, nodes):
    others = [nodes.submit(say, rank, port, rank * 10) for rank in (1, 2, 3)]
    with Host(4, port, KEY, PATIENCE_S) as host:
        answer = host.agree(7, lambda values: sorted(values.items()), PATIENCE_S)

    assert answer == [(0, 7), (1, 10), (2, 20), (3, 30)]
    assert [one.result() for one in others] == [[[0, 7], [1, 10], [2, 20], [3, 30]]] * 3
    assert host.missing == {}


def test_a_node_that_never_comes_is_named_and_the_others_go_on(port, nodes):
    one = nodes.submit(say, 2, port, "here")

    with Host(3, port, KEY, 1.0) as host:
        assert host.agree("first", dict, PATIENCE_S) == {0: "first", 2: "here"}
    assert one.result() == {"0": "first", "2": "here"}
    assert list(host.missing) == [1]


def test_a_node_that_falls_silent_is_named_and_left_out(port, nodes):
    heard = threading.Event()

    def silent():
        with member(1, port) as one:
            heard.wait(PATIENCE_S)
            with pytest.raises(Alone):
                one.agree("late", None, PATIENCE_S)

    gone = nodes.submit(silent)
    with Host(2, port, KEY, PATIENCE_S) as host:
        assert host.agree("first", dict, 0.2) == {0: "first"}

    assert host.missing == {1: "gave no answer in time"}
    heard.set()
    gone.result()


def test_a_node_that_dies_is_named(port, nodes):
    gone = nodes.submit(lambda: member(1, port).close())
    with Host(2, port, KEY, PATIENCE_S) as host:
        gone.result()
        host.agree("first", dict, PATIENCE_S)

    assert "has gone" in host.missing[1]


def test_strangers_are_not_let_in(port, nodes):
    def stranger(line):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as one:
                    one.sendall(line)
                    return one.recv(100)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline

    lines = [b"GET / HTTP/1.1\r\n\r\n", b'{"key": "key"}\n', b"[]\n"]
    lines.append(b'{"key": "other", "rank": 1}\n')
    strangers = [nodes.submit(stranger, line) for line in lines]
    real = nodes.submit(lambda: [s.result() for s in strangers] and say(1, port, 1))
    with Host(2, port, KEY, PATIENCE_S) as host:
        host.agree(0, dict, PATIENCE_S)

    assert real.result() == {"0": 0, "1": 1}
    assert all(one.result() == b"" for one in strangers)


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 2.5])
def test_a_clock_is_measured_within_its_bound(port, nodes, ahead):
    def slow_clock():
        time.sleep(0.03)  # a network that is slow one way
        return time.time() + ahead

    def other():
        with member(1, port) as one:
            one.tell_time(slow_clock)

    done = nodes.submit(other)
    with Host(2, port, KEY, PATIENCE_S) as host:
        skew = host.skews()[1]
    done.result()

    assert abs(skew.offset_s - ahead) <= skew.bound_s + 1e-3


def test_a_first_node_that_is_not_there_is_told(port):
    with pytest.raises(Alone, match=f"port {port} cannot be reached"):
        Member(1, "127.0.0.1", port, KEY, 0.1)
