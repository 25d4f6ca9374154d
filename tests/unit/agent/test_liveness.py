"""Who of a job's nodes lives, by their processes: one that died, one that stands still.

These are wired up, in real time; test_liveness_sides.py has all cases, in time that jumps.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time

import pytest

from hpctrain.core.base import clock
from hpctrain.node.agent.liveness import LivenessChannel, LivenessPlace
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

SECRET = "the same on all nodes"  # noqa: S105 - of a test
LEASE_S = 1.0
FOR_EVER_S = 1e6


def _other(node, port, secret, line):
    """An agent of another node: hands on what it hears."""
    place = LivenessPlace(node, 3, "127.0.0.1", port, LEASE_S)
    with LivenessChannel(place, secret) as liveness:
        line.send(liveness.pid)
        liveness.say({"ready": True, "switch": f"s{node}"})
        while True:
            for said in liveness.news(0.1):
                line.send(said)
            if line.poll():
                line.recv()
                return


class Nodes:
    """Node 0's liveness channel in this process, two others in processes of their own."""

    def __init__(self):
        self.port = free_port()
        self.first = LivenessChannel(LivenessPlace(0, 3, "127.0.0.1", self.port, LEASE_S), SECRET)
        self.lines, self.agents, self.pids = {}, {}, {}

    def begin(self, node, secret=SECRET):
        fork = multiprocessing.get_context("fork")
        self.lines[node], theirs = fork.Pipe()
        self.agents[node] = fork.Process(target=_other, args=(node, self.port, secret, theirs))
        self.agents[node].start()
        theirs.close()
        self.pids[node] = self.lines[node].recv()

    def hear(self, kind):
        """The next word of this kind at node 0."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for said in self.first.news(0.2):
                if kind in said:
                    return said
        raise AssertionError(f"node 0 heard nothing of {kind}")

    def hears(self, node, kind):
        """The next word of this kind at another node."""
        while self.lines[node].poll(PATIENCE_S):
            said = self.lines[node].recv()
            if kind in said:
                return said
        raise AssertionError(f"node {node} heard nothing of {kind}")

    def end(self):
        self.first.stop()
        for agent in self.agents.values():
            agent.kill()
            agent.join()


@pytest.fixture
def nodes():
    nodes = Nodes()
    yield nodes
    nodes.end()


@pytest.fixture
def both(nodes):
    for node in (1, 2):
        nodes.begin(node)
    assert {nodes.hear("ready")["ready"] for _ in range(2)} == {1, 2}
    return nodes


def test_a_node_that_died_is_lost_at_once_and_one_that_lives_is_not(both):
    both.agents[1].kill()
    lost = both.hear("lost")

    assert (lost["lost"], "closed" in lost["why"]) == (1, True), "not by its silence"
    assert both.first.news(3 * LEASE_S) == []


def test_a_node_that_stands_still_is_lost_after_a_lease_and_leaves_as_it_goes_on(both):
    os.kill(both.pids[1], signal.SIGSTOP)
    stopped = time.monotonic()
    lost = both.hear("lost")
    assert (lost["lost"], "silent" in lost["why"]) == (1, True)
    assert time.monotonic() - stopped > LEASE_S * 0.8

    os.kill(both.pids[1], signal.SIGCONT)
    said = both.lines[1].recv()  # the first word after it, whichever it noticed
    assert {"dropped", "gone"} & said.keys()
    both.agents[1].join(20)
    assert both.agents[1].exitcode == -signal.SIGKILL, "it did not leave by itself"


def test_what_an_agent_waits_on_is_closed_as_it_is_to_leave(nodes):
    """What a frozen node serves is not closed by itself, and its reader would not hear of it."""
    place = LivenessPlace(1, 2, "127.0.0.1", nodes.port, LEASE_S)
    pairs = [socket.socketpair() for _ in range(5)]
    with LivenessChannel(place, SECRET) as own:
        nodes.first.say({"round": {"round": 0, "members": [0, 1]}})
        assert own.news(20.0), "it has met the first node's"
        for mine, _ in pairs:
            mine.settimeout(20)
            own.guard([mine])

        os.kill(nodes.first.pid, signal.SIGSTOP)
        closed = [mine.recv(1) for mine, _ in pairs[3:]]
        assert (closed, "gone" in own.news(1.0)[-1]) == ([b"", b""], True)
        # This process is not killed: it has not said that it is ready, so it has no ranks.
        time.sleep(2 * LEASE_S)
    for mine, theirs in pairs[:3]:
        theirs.sendall(b"x")
        assert mine.recv(1) == b"x", "only those of the last two calls are held"
    for pair in pairs:
        for end in pair:
            end.close()


def test_others_are_told_of_the_first_nodes_death_at_once(both):
    os.kill(both.first.pid, signal.SIGKILL)

    assert "is gone" in both.hears(1, "gone")["gone"]


def test_who_is_not_awaited_any_more_does_not_hold_up_the_end_and_may_come_all_the_same(nodes):
    nodes.begin(1)
    nodes.hear("ready")
    nodes.first.say({"absent": [2]})
    nodes.first.end("done", FOR_EVER_S)  # it is not waited for
    nodes.begin(2)
    assert nodes.hears(2, "over")["over"] == "done"


def test_an_agent_hears_that_its_own_process_has_ended(nodes):
    os.kill(nodes.first.pid, signal.SIGKILL)

    assert "has ended" in nodes.hear("dropped")["dropped"], "it says nothing of the first node"


def test_an_agent_takes_its_own_stopped_process_for_ended_after_a_lease(nodes):
    os.kill(nodes.first.pid, signal.SIGSTOP)
    stopped = time.monotonic()

    assert "is stopped" in nodes.hear("dropped")["dropped"]
    assert time.monotonic() - stopped >= LEASE_S * 0.8


def test_the_silence_of_its_process_counts_only_while_the_agent_runs(nodes, monkeypatch):
    """A suspended job: both stand still, and the agent may be the first one to go on."""
    os.kill(nodes.first.pid, signal.SIGSTOP)
    nodes.first.news()
    real, later_s = clock.monotonic, 0.0
    monkeypatch.setattr(clock, "monotonic", lambda: real() + later_s)
    later_s = 1000 * LEASE_S

    assert nodes.first.news() == []
    os.kill(nodes.first.pid, signal.SIGCONT)
    assert nodes.first.news(2 * LEASE_S) == []
