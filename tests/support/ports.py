"""Ports at which a test's processes meet, somewhat later than the test has looked for one."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket

PORTS = range(61_000, 65_500)
"""Above Linux's ephemeral range, and above those of the test clusters."""
SIDES = 4
_COUNTER = itertools.count(secrets.randbelow(len(PORTS)))
"""Two runs of tests that began together would else ask for the same ports in step. Not the
process's number: the systems of other SLURM versions count their processes from 1, each by itself.
"""


def free_port() -> int:
    """One that neither an outgoing connection nor the other side's tests can take meanwhile.

    The kernel's own choice (port 0) is one that it gives to the next who asks, too.
    """
    side = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SIDES
    size = len(PORTS) // SIDES
    own = PORTS[side * size : (side + 1) * size]
    for _ in own:
        port = own[next(_COUNTER) % size]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port is free in {own}")
