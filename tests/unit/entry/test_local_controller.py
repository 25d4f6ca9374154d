"""The embedded cluster signals what is its own: groups whose leader it has not reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from types import SimpleNamespace

import pytest

from hpctrain.cluster.scheduler import local
from hpctrain.core.base import locks
from hpctrain.entry import local_controller
from tests.support.processes import alive
from tests.support.slurm_boot import wait_for
from tests.unit.base.test_locks import killed_with


def _node(command):
    return subprocess.Popen(
        ["sh", "-c", command], start_new_session=True, stdout=subprocess.PIPE, text=True
    )


def test_how_an_agent_ended_is_known_before_it_is_reaped():
    with _node("exit 3") as node:
        wait_for(lambda: local_controller._code(node) == 3, "the end")
        assert node.returncode is None
        os.kill(node.pid, 0)  # its number is still its own
    assert local_controller._code(node) == 3


def test_what_a_dead_agent_left_behind_is_killed():
    with _node("trap '' HUP; sleep 600 & echo $!; exit 0") as node:
        child = int(node.stdout.readline())
        wait_for(lambda: local_controller._code(node) == 0, "the end")
        local_controller._kill_group(node, signal.SIGKILL)
        wait_for(lambda: not alive(child), "the child's end")


def test_a_group_whose_leader_was_reaped_is_nobodys(monkeypatch):
    with _node("exit 0") as node:
        node.wait()
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("another's group was signalled"))
    local_controller._kill_group(node, signal.SIGKILL)


def test_folders_of_agents_that_were_killed_are_removed_with_their_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(locks, "MEMORY", tmp_path)
    killed_with(tmp_path)
    assert list(tmp_path.iterdir())

    record = SimpleNamespace(starts=[(0, 1.0, 0.0, ["n1"])], previous_stop=2.0)
    local_controller.Controller._let_go(SimpleNamespace(record=record))

    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_node_without_a_controller(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    record = local.create(local.LocalJobRecord("", "t", str(tmp_path / "run"), 1, 1, 60.0, 10.0))
    controller = local_controller.Controller(record.job_id)
    monkeypatch.setattr(local, "write", lambda _: (_ for _ in ()).throw(OSError(28, "full")))

    with _node("sleep 600") as node:
        controller._nodes = [node]
        controller._on_cancel()
        assert node.wait(60) == -signal.SIGTERM

    assert f"the record of {record.job_id} cannot be written: [Errno 28] full" in caplog.text
