"""Agents give their ranks a control plane in each round, and tell whose part of it has died."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hpctrain.core.base.env import HPCTRAIN_CONTROL
from hpctrain.core.base.records import FailureReport
from hpctrain.node.agent import control as module
from hpctrain.node.agent.control import EVERYWHERE, NodeControl, addresses
from hpctrain.node.agent.ranks import first_causal
from hpctrain.node.control.node_process import NodeProcess
from hpctrain.node.control.node_server import TreePlace
from tests.support.rank_agents import Agents

pytestmark = pytest.mark.usefixtures("preloaded")

FIND = """
import os, pathlib
folder = pathlib.Path(os.environ["HPCTRAIN_CONTROL"])
attempt = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
sockets = [line.split() for line in pathlib.Path("/proc/net/unix").read_text().splitlines()]
served = {f"socket:[{line[6]}]" for line in sockets if line[7:] == [f"{folder}/socket"]}
def is_node(pid):
    try:  # ranks have the folder open too: its lock
        open_files = pathlib.Path(f"/proc/{pid}/fd").iterdir()
        return any(os.readlink(path) in served for path in open_files)
    except OSError:  # it ended while we looked
        return False
agent = os.getppid()
children = pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
node = next(pid for pid in map(int, children) if is_node(pid))
"""
JOIN = (
    FIND
    + """
import signal
from hpctrain.node.control.client import ControlClient
rank = int(os.environ["RANK"])
exchange = ControlClient.take(folder, rank).exchange(30)
(attempt / f"said-{rank}").write_text(f"{exchange.gather(rank)} {folder}")
"""
)
CRASH = (
    JOIN
    + """
if attempt.name == "1" and rank == 3:
    raise ValueError("the cause")
if attempt.name == "1":
    exchange.gather("waits for the rank that has crashed")
"""
)
KILL = (
    JOIN
    + """
if attempt.name == "1":
    if rank == 2:
        os.kill(node, signal.SIGKILL)
    exchange.gather("waits for what is gone")
"""
)
FOREIGN = (
    FIND
    + """
import signal, time
os.kill(node, signal.SIGKILL)
time.sleep(1)  # its agent has the time to notice
"""
)


@pytest.fixture
def agents(tmp_path):
    agents = Agents(tmp_path, ranks=2)
    yield agents
    agents.close()


def said(folder):
    return [(folder / f"said-{rank}").read_text().split("] ") for rank in range(4)]


def test_each_round_has_a_control_plane_of_its_own(agents, tmp_path):
    ends = agents.run(CRASH, nodes=2, starts=2)

    assert [end[0] for end in ends] == ["left", "left"]
    assert (tmp_path / "failure-1").read_text() == "ValueError: the cause"
    first, second = said(tmp_path / "1"), said(tmp_path / "2")
    assert [gathered for gathered, _ in (*first, *second)] == ["[0, 1, 2, 3"] * 8
    folders = {folder for _, folder in (*first, *second)}
    assert len(folders) == 4, "of two nodes and two rounds"
    assert not any(Path(folder).exists() for folder in folders)


def test_a_nodes_process_that_dies_ends_the_round_and_is_named(agents, tmp_path):
    ends = agents.run(KILL, nodes=2, starts=2)

    why = "the process that carries the ranks' agreement on n1 was killed by SIGKILL"
    assert (tmp_path / "failure-1").read_text() == why
    assert [end[0] for end in ends] == ["left", "left"], "the next round has a new one"
    assert [gathered for gathered, _ in said(tmp_path / "2")] == ["[0, 1, 2, 3"] * 4


def test_where_no_rank_uses_it_its_death_ends_no_round(tmp_path):
    agents = Agents(tmp_path, ranks=1)
    try:
        assert agents.run(FOREIGN)[0][0] == "left"
    finally:
        agents.close()


def test_that_the_agreement_was_lost_is_no_cause_where_there_is_another():
    lost = FailureReport(0, "n0", "exception", "hpctrain.errors.ControlLost: n0 has lost n1", "", 1)
    cause = FailureReport(2, "n1", "signal", "killed by SIGKILL", "", 2)

    assert first_causal([lost, cause]) is cause


class Store:
    """What the agents of one node after the other say."""

    def __init__(self) -> None:
        self.said = {}

    def set(self, key, value):
        self.said[key] = value

    def wait(self, key, _timeout_s):
        return self.said[key]


def test_nodes_find_the_one_above_them_by_the_store(monkeypatch):
    store, joined = Store(), []
    monkeypatch.setattr(NodeProcess, "join", lambda _self, *where: joined.append(where))
    monkeypatch.setenv(HPCTRAIN_CONTROL, "")
    nodes = [NodeControl("127.0.0.1", "secret") for _ in range(3)]
    try:
        for number, node in enumerate(nodes):
            place = TreePlace(number, 3, number, 1, 3, f"n{number}")
            node.begin(place, store, "round/0/{}".format)
            assert Path(os.environ[HPCTRAIN_CONTROL], "board").exists()
            node.join(store, "round/0/{}".format, 1)
    finally:
        for node in nodes:
            node.stop()

    assert list(store.said) == ["round/0/control/0"], "the others have no nodes below them"
    assert joined == [tuple(store.said["round/0/control/0"])] * 2
    assert HPCTRAIN_CONTROL not in os.environ


@pytest.mark.parametrize(
    ("master", "local"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")]
)
def test_nodes_of_one_machine_meet_where_nobody_else_can(master, local):
    assert addresses(master, 0) == addresses(master, 40) == (local, local)


def test_a_node_is_reached_under_the_address_by_which_it_reaches_node_0(monkeypatch):
    monkeypatch.setattr(module, "_own_address", lambda _: "10.1.2.3")

    assert addresses("n0", 7) == addresses("n0", 0) == ("10.1.2.3", "10.1.2.3")


def test_where_node_0_knows_its_name_as_its_own_loopback_others_use_the_name(monkeypatch):
    monkeypatch.setattr(module, "_own_address", lambda _: "127.0.1.1")

    assert addresses("n0", 0) == (EVERYWHERE, "n0")
    assert addresses("n0", 1) == ("127.0.1.1", "127.0.1.1"), "one machine plays several nodes"


def test_the_own_address_is_that_of_the_way_there():
    assert module._own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        module._own_address("no such host.invalid")
