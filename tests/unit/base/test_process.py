"""What a process finds out about its own open files."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from hpctrain.core.base.process import connections_to


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
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
