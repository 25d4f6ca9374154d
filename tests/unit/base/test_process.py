"""What a process finds out about its own open files."""

from __future__ import annotations

import socket
from pathlib import Path

from hpctrain.base.process import connections_to


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
