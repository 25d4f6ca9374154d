"""What a process finds out about its own open files, and the end of its threads."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpctrain.core.base import process
from hpctrain.core.base.process import connections_to
from tests.support.patience import PATIENCE_S


def open_files():
    return {one.name for one in Path("/proc/self/fd").iterdir()}


def test_connections_to_a_port_are_found_among_all_that_is_open():
    with (
        socket.create_server(("127.0.0.1", 0)) as there,
        socket.create_server(("127.0.0.1", 0)) as elsewhere,
        socket.create_connection(there.getsockname()) as first,
        socket.create_connection(there.getsockname()) as second,
        socket.create_connection(elsewhere.getsockname()),
    ):
        before = open_files()
        found = connections_to(there.getsockname()[1])

        assert {one.getsockname() for one in found} == {first.getsockname(), second.getsockname()}
        for one in found:
            one.shutdown(socket.SHUT_RDWR)
            one.close()
        assert open_files() == before, "nothing else was left open"
        assert (first.recv(1), second.recv(1)) == (b"", b"")


def test_what_can_be_read_is_seen_behind_a_thousand_open_files():
    """`select.select` ends there with "filedescriptor out of range"."""
    program = """
import os, resource
from hpctrain.core.base.process import is_readable
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
reading, writing = os.pipe()
assert reading > 1024 and not is_readable(reading, 0.01)
os.write(writing, b"1")
assert is_readable(reading, 10)
os.read(reading, 1)
os.close(writing)
assert is_readable(reading, 10)  # its end
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


def test_a_thread_that_is_joined_before_a_fork_is_gone_from_the_kernel_too(monkeypatch):
    """Its number is that of one that still lives, which ends at the first look."""
    gate, over = threading.Event(), threading.Thread(target=lambda: None)
    other = threading.Thread(target=gate.wait)
    for thread in (over, other):
        thread.start()
    over.join()
    monkeypatch.setattr(over, "_native_id", other.native_id)
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        gate.set()
        other.join()

    monkeypatch.setattr(process.clock, "sleep", sleep)
    monkeypatch.setattr(process, "EXIT_LOOKS", 10**9)  # the kernel's end takes what it takes
    process.join_before_fork(over)

    assert looks
    assert not Path(f"/proc/self/task/{other.native_id}").exists()


def test_a_thread_that_does_not_end_is_waited_for_as_long_as_was_said(monkeypatch):
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, daemon=True)
    thread.start()
    monkeypatch.setattr(process.clock, "sleep", lambda _: pytest.fail("its limit is over"))
    process.join_before_fork(thread, 0.01)
    assert thread.is_alive()
    gate.set()
