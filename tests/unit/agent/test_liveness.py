"""Who of a job's nodes lives, by their processes: one that died, one that stands still.

These are wired up, in real time; test_liveness_sides.py has all cases, in time that jumps.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from contextlib import ExitStack

import pytest

from hpctrain.core.base import clock
from hpctrain.node.agent import liveness
from hpctrain.node.agent.liveness import LivenessChannel, LivenessPlace
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

pytestmark = pytest.mark.realtime(proved_by="tests/unit/agent/test_liveness_sides.py")

SECRET = "the same on all nodes"  # noqa: S105 - of a test
LEASE_S = 1.0
LONG_LEASE_S = 1000.0
"""Where no lease is to run out: on a busy machine a process may stand still for longer than one."""
FOR_EVER_S = 1e6


def _other(place, secret, line):
    """An agent of another node: hands on what it hears."""
    with LivenessChannel(place, secret) as own:
        line.send(own.pid)
        own.say({"ready": True, "switch": f"s{place.node}"})
        while True:
            for said in own.news(0.1):
                line.send(said)
            if line.poll():
                line.recv()
                return


class Nodes:
    """Node 0's liveness channel in this process, two others in processes of their own."""

    def __init__(self, lease_s):
        self.port, self.lease_s = free_port(), lease_s
        self.first = LivenessChannel(LivenessPlace(0, 3, "127.0.0.1", self.port, lease_s), SECRET)
        self.lines, self.agents, self.pids, self.heard = {}, {}, {}, []

    def begin(self, node, secret=SECRET):
        fork = multiprocessing.get_context("fork")
        self.lines[node], theirs = fork.Pipe()
        place = LivenessPlace(node, 3, "127.0.0.1", self.port, self.lease_s)
        self.agents[node] = fork.Process(target=_other, args=(place, secret, theirs))
        self.agents[node].start()
        theirs.close()
        self.pids[node] = self.lines[node].recv()

    def hear(self, kind):
        """The next word of this kind at node 0; those before it are dropped."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.heard += self.first.news(0.0 if self.heard else 0.2)  # often two at once
            while self.heard:
                if kind in (said := self.heard.pop(0)):
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


WITHOUT_LEASES = pytest.mark.parametrize("nodes", [LONG_LEASE_S], indirect=True)


@pytest.fixture
def nodes(request):
    nodes = Nodes(getattr(request, "param", LEASE_S))
    yield nodes
    nodes.end()


@pytest.fixture
def both(nodes):
    for node in (1, 2):
        nodes.begin(node)
    assert {nodes.hear("ready")["ready"] for _ in range(2)} == {1, 2}
    return nodes


@WITHOUT_LEASES
def test_a_node_that_died_is_lost_at_once_and_one_that_lives_is_not(both):
    both.agents[1].kill()
    lost = both.hear("lost")

    assert (lost["lost"], "silent" in lost["why"]) == (1, False), lost
    both.first.say({"round": {"round": 1, "members": [0, 2]}})
    assert both.hears(2, "round")["round"]["members"] == [0, 2], "it is still let in"
    assert (both.heard, both.first.news()) == ([], [])


def test_a_node_that_stands_still_is_lost_after_a_lease_and_leaves_as_it_goes_on(both):
    os.kill(both.pids[1], signal.SIGSTOP)
    stopped = time.monotonic()
    lost = both.hear("lost")
    assert (lost["lost"], "silent" in lost["why"]) == (1, True)
    assert time.monotonic() - stopped > LEASE_S * 0.8

    os.kill(both.pids[1], signal.SIGCONT)
    said = both.lines[1].recv()  # the first word after it, whichever it noticed
    assert {"dropped", "gone"} & said.keys()
    both.agents[1].join(PATIENCE_S)
    assert both.agents[1].exitcode == -signal.SIGKILL, "it did not leave by itself"


@WITHOUT_LEASES
def test_what_an_agent_waits_on_is_closed_as_it_is_to_leave(nodes, monkeypatch):
    """What a frozen node serves is not closed by itself, and its reader would not hear of it."""
    monkeypatch.setattr(liveness, "LEAVE_S", 0.0)
    place = LivenessPlace(1, 2, "127.0.0.1", nodes.port, LONG_LEASE_S)
    with LivenessChannel(place, SECRET) as own, ExitStack() as ends:
        pairs = [socket.socketpair() for _ in range(6)]  # not before: its process would have them
        for mine, theirs in pairs:
            ends.enter_context(mine), ends.enter_context(theirs)
            mine.settimeout(PATIENCE_S), theirs.settimeout(PATIENCE_S)
        nodes.first.say({"round": {"round": 0, "members": [0, 1]}})
        assert "round" in own.news(PATIENCE_S)[-1], "it has met the first node's"
        for mine, _ in pairs[:5]:
            own.guard([mine])
        for mine, theirs in pairs[:3]:
            mine.close()
            assert theirs.recv(1) == b"", "only those of the last two calls are held"

        os.kill(nodes.first.pid, signal.SIGKILL)
        assert [mine.recv(1) for mine, _ in pairs[3:5]] == [b"", b""]
        assert "gone" in own.news(PATIENCE_S)[-1]
        own.guard([pairs[5][0]])
        assert pairs[5][0].recv(1) == b"", "what came too late as well"
        # This process is not killed: it has not said that it is ready, so it has no ranks.


@WITHOUT_LEASES
def test_others_are_told_of_the_first_nodes_death_at_once(both):
    os.kill(both.first.pid, signal.SIGKILL)

    assert "is gone" in both.hears(1, "gone")["gone"]


@WITHOUT_LEASES
def test_who_is_not_awaited_any_more_does_not_hold_up_the_end_and_may_come_all_the_same(nodes):
    nodes.begin(1)
    nodes.hear("ready")
    nodes.first.say({"absent": [2]})
    nodes.first.end("done", FOR_EVER_S)  # it is not waited for
    nodes.begin(2)
    assert nodes.hears(2, "over")["over"] == "done"


@WITHOUT_LEASES
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
