"""Ports at which a test's processes meet, somewhat later than the test has looked for one.

Where tests have a network of their own (`tests.support.network`) nobody else can take them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import secrets
import socket
import tempfile
from pathlib import Path

PORTS = range(61_000, 65_500)
"""Above Linux's ephemeral range, and above those of the test clusters."""
BLOCKS = 15
_SIZE = len(PORTS) // BLOCKS
_COUNTER = itertools.count(secrets.randbelow(_SIZE))
"""Two runs of tests that began together would else ask for the same ports in step."""


def free_port() -> int:
    """One that neither an outgoing connection nor another process's tests can take meanwhile.

    The kernel's own choice (port 0) is one that it gives to the next who asks, too.
    """
    own = PORTS[_block() * _SIZE :][:_SIZE]
    for _ in own:
        port = own[next(_COUNTER) % _SIZE]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port is free in {own}")


@functools.cache
def _block() -> int:
    """The first block that no other process draws from; this one and its children keep it."""
    folder = Path(tempfile.gettempdir(), f"hpctrain-test-ports-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in range(BLOCKS):
        lock = os.open(folder / f"{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number  # the lock is held until the process ends
        os.close(lock)
    return secrets.randbelow(BLOCKS)
