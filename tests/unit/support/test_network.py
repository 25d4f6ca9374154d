"""Tests have ports of their own: by a network of their own, or by a block that nobody else has."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import network, ports

TOP = Path(__file__).parents[3]
IN_A_NETWORK = """
import socket
from pathlib import Path
from tests.support import network

assert network.enter_own()
with socket.create_server(("127.0.0.1", PORT)) as server:
    socket.create_connection(("127.0.0.1", PORT)).close()
socket.create_server((socket.gethostbyname(socket.gethostname()), 0)).close()
try:
    socket.create_connection(("198.51.100.1", 80), timeout=5)
except OSError as error:
    print(error.strerror)
try:
    socket.getaddrinfo("no-such-name.example", 1)
except socket.gaierror as error:
    assert error.errno == socket.EAI_NONAME, error
print(socket.getnameinfo(("::ffff:127.0.0.1", 1), 0)[0])
print(*sorted(line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]))
"""


def _run(code):
    env = os.environ | {"PYTHONPATH": str(TOP)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.two_users  # root, that is
def test_a_port_that_is_taken_elsewhere_is_free_in_a_network_of_its_own():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = _run(IN_A_NETWORK.replace("PORT", f"{taken.getsockname()[1]}"))

    assert done.returncode == 0, done.stderr
    said, name, devices = done.stdout.splitlines()
    assert said == "Network is unreachable"
    assert name in {"::ffff:127.0.0.1", "localhost"}
    found = network.host_interface()
    assert set(devices.split()) >= {"lo", found} - {""}, "a tunnel of the name that /sys shows"


@pytest.mark.two_users
def test_this_process_has_a_network_of_its_own():
    with pytest.raises(OSError, match="Network is unreachable"):
        socket.create_connection(("198.51.100.1", 80), timeout=5)


def test_whoever_is_not_root_keeps_the_network_and_is_told(monkeypatch):
    before = Path("/proc/self/ns/net").readlink()
    monkeypatch.setattr(os, "getuid", lambda: 1000)

    assert not network.enter_own()
    assert Path("/proc/self/ns/net").readlink() == before


def test_processes_without_xdist_draw_from_blocks_of_their_own(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    own = ports._block()
    code = "from tests.support import ports; print(ports._block(), flush=True); input()"
    env = os.environ | {"PYTHONPATH": str(TOP)}
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        blocks = [int(one.stdout.readline()) for one in others]
    finally:
        for one in others:
            one.communicate("\n")

    assert len({*blocks, own}) == 4


def test_each_call_has_another_port_of_its_block():
    block = ports.PORTS[ports._block() * ports._SIZE :][: ports._SIZE]

    found = [ports.free_port() for _ in range(20)]

    assert len(set(found)) == 20
    assert set(found) <= set(block)


def test_a_port_on_which_somebody_listens_is_passed(monkeypatch):
    import itertools

    monkeypatch.setattr(ports, "_COUNTER", itertools.count())
    first = ports.free_port()
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr(ports, "_COUNTER", itertools.count())
        second = ports.free_port()

    assert second == first + 1
