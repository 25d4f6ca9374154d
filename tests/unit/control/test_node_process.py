"""What node processes leave behind, and what they do not take for left behind."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from hpctrain.core.base.locks import _here
from hpctrain.errors import ControlLost
from hpctrain.node.control import node_process
from hpctrain.node.control.node_process import NodeProcess
from tests.support.control_tree import ControlTree

PREFIX = f"hpctrain-control-{_here()}"


@pytest.fixture
def tmp_path():
    """A short one: the path of a socket has a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="hpct-") as name:
        yield Path(name)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(node_process, "MEMORY", tmp_path)
    return tmp_path


def test_the_round_of_an_agent_that_was_killed_is_removed(memory):
    left = memory / f"{PREFIX}killed"
    left.mkdir()

    with ControlTree(1, 1):
        assert not left.exists()


def test_a_round_that_is_served_stays(memory):
    with ControlTree(1, 1) as served, ControlTree(1, 1):
        assert (served.folder(0) / "board").exists()


def test_where_there_is_no_memory_to_write_to_its_folder_is_with_other_temporary_ones(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(node_process, "MEMORY", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{PREFIX}killed"
    left.mkdir()

    with ControlTree(1, 1) as tree:
        assert tree.folder(0).parent == tmp_path
        assert not left.exists()


def begun(process):
    tree = ControlTree(0, 1)
    tree.nodes.append(process)
    return process.begin(tree.place(0), secret="s", about="round 0", address="127.0.0.1")


def test_where_no_folder_can_be_made_it_is_one_clear_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(node_process, "MEMORY", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nor this"))

    with NodeProcess() as process, pytest.raises(ControlLost, match="no folder for the ranks' agr"):
        begun(process)


def test_an_address_that_is_not_this_nodes_is_one_clear_loss_and_the_process_goes_on(memory):
    with NodeProcess() as process:
        tree = ControlTree(0, 1)
        tree.nodes += [process, process]  # two places: node 0 listens for node 1
        place = tree.place(0)
        with pytest.raises(ControlLost, match=r"198\.51\.100\.1"):
            process.begin(place, secret="s", about="round 0", address="198.51.100.1")
        assert process.begin(place, secret="s", about="round 0", address="127.0.0.1") > 0


def test_before_a_round_was_begun_there_is_nothing_to_join():
    with NodeProcess() as process, pytest.raises(ControlLost, match="no round was begun"):
        process.join("127.0.0.1", 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGXCPU])
def test_how_the_process_has_ended_is_told_as_often_as_one_asks(number):
    with NodeProcess() as process:
        assert process.end() == ""
        os.kill(process.pid, number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        told = f"was killed by {number.name}"
        assert (process.end(), process.end()) == (told, told)
        with pytest.raises(ControlLost, match="the process that carries the ranks' agreement: "):
            process.join("127.0.0.1", 1)


def test_signals_that_slurm_sends_to_every_process_of_a_step_do_not_end_it(memory):
    with NodeProcess() as process:
        begun(process)
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGHUP,
        ):
            os.kill(process.pid, number)
        begun(process)
        assert process.end() == ""


def test_a_process_that_does_not_answer_is_a_loss(memory, monkeypatch):
    monkeypatch.setattr(node_process, "ANSWER_S", 0.1)
    with NodeProcess() as process:
        begun(process)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ControlLost, match=r"did not answer for 0\.1 s"):
            process.join("127.0.0.1", 1)


def test_what_was_stopped_may_be_stopped_again(memory):
    process = NodeProcess()
    begun(process)
    process.stop()
    process.stop()

    assert (process.pid, process.end(), list(memory.iterdir())) == (0, "", [])
