"""The process whose ranks try the collective: what it forks inherits nobody's locks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hpctrain.cluster.preflight.bounded import MODULE
from hpctrain.core.base.process import own_program
from tests.support import patience
from tests.support.ports import free_port
from tests.support.processes import alive, descendants


def _say(process, order):
    process.stdin.write(json.dumps(order) + "\n")
    return json.loads(process.stdout.readline())


@pytest.fixture
def collective():
    pipe = subprocess.PIPE
    with subprocess.Popen(own_program(MODULE), stdin=pipe, stdout=pipe, text=True, bufsize=1) as it:
        yield it
        it.kill()


def test_the_process_that_forks_ranks_serves_no_store(collective):
    """torch's server holds glibc's resolver lock in a thread; a fork would keep it for ever."""
    port = free_port()
    assert _say(collective, {"store": port, "host": True, "address": "127.0.0.1"})["ready"]
    order = {"name": "1.0", "first": 0, "world": 1, "ranks": 1, "size_mib": 1, "timeout_s": 30.0,
             "address": "127.0.0.1", "port": port}  # fmt: skip

    assert "ranks" in _say(collective, order)
    threads = Path(f"/proc/{collective.pid}/task").iterdir()
    assert [thread.name for thread in threads] == [str(collective.pid)]
    assert len(descendants(collective.pid)) == 1


def test_the_store_ends_with_the_process_whose_ranks_meet_in_it(collective):
    _say(collective, {"store": free_port(), "host": True, "address": "127.0.0.1"})
    (store,) = descendants(collective.pid)

    collective.kill()
    collective.wait()

    patience.until(lambda: not alive(store), f"the end of store {store}")
