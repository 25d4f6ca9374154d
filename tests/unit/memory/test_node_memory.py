"""An agent whose replica server was killed or stopped has another one for the next round."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from hpctrain.node.agent.control import NodeMemory
from hpctrain.node.control import node_process
from hpctrain.node.control.node_server import TreePlace
from hpctrain.node.memory.replica_client import ReplicaClient
from tests.support.processes import alive


class Store:
    """What node 0 says of its replica server."""

    def set(self, key, value):
        assert key.endswith("/memory")
        self.address, self.port = value


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_the_next_round_has_another_one(monkeypatch, capsys, signum):
    monkeypatch.setattr(node_process, "BEGIN_S", 1.0)
    memory, store = NodeMemory("secret"), Store()
    try:
        with tempfile.TemporaryDirectory(prefix="hpct-") as name:
            for number in (1, 2):
                folder = Path(name, str(number))
                folder.mkdir()
                place = TreePlace(0, 2, 0, 1, 2, "n0")
                here = ("127.0.0.1", "127.0.0.1")
                memory.begin(place, folder, store, f"round/{number}/{{}}".format, here)
                ReplicaClient(folder, 0, number).close()
                if number == 1:
                    first = memory.pid
                    os.kill(first, signum)
    finally:
        memory.stop()

    assert store.port
    assert not alive(first)
    assert "another one takes its place, and copies in memory are lost" in capsys.readouterr().err
