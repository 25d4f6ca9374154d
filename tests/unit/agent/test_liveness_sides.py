"""Both sides of the liveness channel in one event loop whose time jumps: leases to the moment.

A node here is its process's coroutine, and the test is its agent. test_liveness.py has the
processes, and real time.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket

import pytest

from hpctrain.core.base.secret import code
from hpctrain.node.agent import liveness
from hpctrain.node.agent.liveness import (
    BEATS,
    FIRST_S,
    LEAVE_S,
    RUNS,
    LivenessPlace,
    _First,
    _Other,
)
from hpctrain.node.control.endpoint import ChildrenListener, meet_parent
from hpctrain.node.control.wire import Greeting, packed
from tests.support.clocks import ManualClock
from tests.support.jumping_loop import run_jumping

HERE = "127.0.0.1"
SECRET = "the same on all nodes"  # noqa: S105 - of a test
LEASE_S = 30.0
TURN_S = LEASE_S / BEATS
LONG_S = 10 * LEASE_S
AGENT = 4711
"""An agent's process: nobody is killed here."""


def greeting(secret=SECRET):
    return Greeting(code(secret, "liveness"), "liveness")


class Node:
    """A node's process, as its agent sees it."""

    def __init__(self, side, line, guarded=None):
        self.side, self.guarded = side, guarded
        self._line, self._heard = line, []

    async def begin(self):
        self.reader, self.writer = await asyncio.open_connection(sock=self._line)
        self.task = asyncio.create_task(self.side.serve())

    def say(self, **message):
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def hear(self, kind, most_s=LONG_S):
        """The next word of this kind."""
        async with asyncio.timeout(most_s):
            while True:
                said = await self.word()
                if kind in said:
                    return said

    async def is_quiet(self, seconds=LONG_S):
        """Nothing is said for so long."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.word()

    async def word(self):
        """The next word, but for those that it runs."""
        while (said := json.loads(await self.reader.readline())) == RUNS:
            pass
        return said


class Job:
    """Nodes that find each other; `killed` has what would have been killed, and when."""

    def __init__(self, hands, patch):
        self.hands, self.patch = hands, patch
        self.killed, self.listeners, self.guards = [], [], []
        self.nodes = []

    async def open(self):
        listens, opened = asyncio.Event(), ChildrenListener.open

        def kept(listener, *at):
            self.port = opened(listener, *at)
            self.listeners.append(listener)
            listens.set()
            return self.port

        self.patch.setattr(ChildrenListener, "open", kept)
        self.first = await self.node(0)
        await listens.wait()
        return self

    async def node(self, number, *, nodes=3, secret=SECRET, port=None):
        place = LivenessPlace(number, nodes, HERE, 0 if number == 0 else port or self.port, LEASE_S)
        mine, theirs = socket.socketpair()
        if number == 0:
            node = Node(_First(place, code(secret, "liveness"), theirs, AGENT), mine)
        else:
            own, guarded = socket.socketpair()
            self.guards += [own, guarded]
            side = _Other(place, code(secret, "liveness"), theirs, AGENT + number, guarded)
            node = Node(side, mine, own)
        self.nodes.append(node)
        await node.begin()
        return node

    async def ready(self, number):
        """Another node, which has said that it may have ranks."""
        node = await self.node(number)
        node.say(ready=True, switch=f"s{number}")
        assert await self.first.hear("ready") == {
            "ready": number,
            "switch": f"s{number}",
        }
        return node

    def close(self):
        for listener in self.listeners:
            listener.close()
        loop = asyncio.get_running_loop()
        for transport in list(loop._transports.values()):
            transport.abort()
        for guard in self.guards:
            if loop._selector.get_map().get(guard.fileno()):
                loop.remove_reader(guard)
            guard.close()


@pytest.fixture
def run(monkeypatch):
    """Runs `act(job)`."""

    def within(act):
        hands = ManualClock()

        async def live():
            job = Job(hands, monkeypatch)
            monkeypatch.setattr(
                liveness.os, "kill", lambda pid, sig: job.killed.append((pid, sig, hands.passed_s))
            )
            try:
                return await act(await job.open())
            finally:
                job.close()
                await asyncio.sleep(TURN_S)  # the connections' ends

        return run_jumping(live(), hands)

    return within


class Silent:
    """A first node that lets everybody in and says nothing; or that is told what to say."""

    async def open(self):
        self.inside, self.come = {}, asyncio.Queue()
        listener = ChildrenListener({1, 2}, greeting, self._let_in)
        return listener.open(HERE)

    def _let_in(self, node, end):
        self.inside[node] = end
        end.on_message = lambda *_: self.come.put_nowait(node)
        end.on_end = lambda *_: None


def test_who_lives_is_never_lost(run):
    async def act(job):
        others = [await job.ready(1), await job.ready(2)]
        await job.first.is_quiet()
        for other in others:
            await other.is_quiet()
        return job.killed

    assert run(act) == []


def test_a_silent_node_is_lost_after_a_lease_and_not_before(run):
    async def act(job):
        await job.ready(1)
        silent = await meet_parent(HERE, job.port, greeting(), 2)
        silent.say(packed({"beat": 0}))
        began_s = job.hands.passed_s
        lost = await job.first.hear("lost")
        silent.close()
        return lost, job.hands.passed_s - began_s

    lost, after_s = run(act)
    assert lost == {"lost": 2, "why": "silent for 30 s"}
    assert LEASE_S < after_s <= LEASE_S + TURN_S + 0.01


def test_each_word_is_a_sign_of_life(run):
    async def act(job):
        end = await meet_parent(HERE, job.port, greeting(), 1)
        for _ in range(20):
            end.say(packed({"beat": 1}))
            await job.first.is_quiet(LEASE_S - TURN_S)
        end.close()
        return await job.first.hear("lost")

    assert "closed" in run(act)["why"]


def test_a_first_node_that_stood_still_itself_calls_nobody_silent(run):
    async def act(job):
        silent = await meet_parent(HERE, job.port, greeting(), 1)
        silent.say(packed({"beat": 0}))
        await job.first.is_quiet(TURN_S / 2)
        job.hands.advance(10 * LEASE_S)
        await job.first.is_quiet(LEASE_S - TURN_S)  # its lease begins anew
        lost = await job.first.hear("lost")
        silent.close()
        return lost["lost"]

    assert run(act) == 1


@pytest.mark.parametrize("leases", [0.9, 1.2, 100.0])
def test_where_all_nodes_stood_still_as_in_a_suspended_job_nobody_leaves(run, leases):
    """Each had ended its ranks, and the first node went on alone."""

    async def act(job):
        others = [await job.ready(1), await job.ready(2)]
        for _ in range(2):
            job.hands.advance(leases * LEASE_S)
            await job.first.is_quiet()
            for other in others:
                await other.is_quiet()
        return job.killed

    assert run(act) == []


def test_a_node_that_stood_still_leaves_as_it_hears_that_it_was_left_out(run):
    async def act(job):
        other = await job.ready(1)
        (end,) = job.first.side._others.values()
        other.side._stood_s = 40.0  # it woke, and asks
        end.close()
        began_s = job.hands.passed_s
        said = await other.hear("dropped")
        left_s = job.hands.passed_s - began_s
        await other.is_quiet(LEAVE_S)
        return said["dropped"], left_s, [pid for pid, _, _ in job.killed]

    said, left_s, killed = run(act)
    assert said == "this node stood still for 40.0 s"
    assert left_s < TURN_S
    assert killed == [AGENT + 1]


def test_a_node_that_stood_still_leaves_where_the_first_does_not_answer_within_a_lease(run):
    """What was said before it stood is no answer: meanwhile it may have been left out."""

    async def act(job):
        silent = Silent()
        other = await job.node(1, port=await silent.open())
        other.say(ready=True)
        await silent.come.get()
        await asyncio.sleep(TURN_S * 1.5)
        job.hands.advance(2 * LEASE_S)
        began_s = job.hands.passed_s
        silent.inside[1].say(packed({"beat": 0}))
        await other.is_quiet(2 * TURN_S)  # it has asked
        silent.inside[1].say(packed({"beat": 0}))
        said = await other.hear("dropped")
        left_s = job.hands.passed_s - began_s
        await other.is_quiet(LEAVE_S)
        return said["dropped"], left_s, [pid for pid, _, _ in job.killed]

    said, left_s, killed = run(act)
    assert said.startswith("this node stood still for ")
    assert LEASE_S < left_s < LEASE_S + 3 * TURN_S
    assert killed == [AGENT + 1]


def test_others_that_hear_nothing_of_the_first_node_leave_after_a_lease(run):
    """Their agents are killed where they do not leave; those without ranks are left alone."""

    async def act(job):
        silent = Silent()
        port = await silent.open()
        ready, young = await job.node(1, port=port), await job.node(2, port=port)
        ready.say(ready=True)
        for _ in range(2):
            await silent.come.get()
        began_s = job.hands.passed_s
        said = [(await node.hear("gone"))["gone"] for node in (ready, young)]
        left_s = job.hands.passed_s - began_s
        await young.is_quiet(10 * LEASE_S)
        return said, left_s, [(*who, at_s - began_s - left_s) for *who, at_s in job.killed]

    said, left_s, killed = run(act)
    assert said == ["nothing was heard from the first node for 30 s"] * 2
    assert LEASE_S < left_s <= LEASE_S + TURN_S + 0.01
    ((pid, sign, after_s),) = killed
    assert (pid, sign) == (AGENT + 1, signal.SIGKILL)
    assert after_s == pytest.approx(LEAVE_S, abs=0.01)


def test_what_an_agent_waits_on_is_closed_as_it_is_to_leave(run):
    pairs = [socket.socketpair() for _ in range(5)]

    async def act(job):
        silent = Silent()
        other = await job.node(1, port=await silent.open())
        for mine, _ in pairs:
            socket.send_fds(other.guarded, [b"guard"], [mine.fileno()])
            await asyncio.sleep(TURN_S)
        await other.hear("gone")

    run(act)

    for mine, theirs in pairs[:3]:
        theirs.sendall(b"x")
        assert mine.recv(1) == b"x", "only those of the last two calls are held"
    assert [mine.recv(1) for mine, _ in pairs[3:]] == [b"", b""]
    for pair in pairs:
        for end in pair:
            end.close()


def test_what_an_agent_begins_to_wait_on_after_that_is_closed_at_once(run):
    mine, theirs = socket.socketpair()

    async def act(job):
        silent = Silent()
        other = await job.node(1, port=await silent.open())
        await other.hear("gone")
        socket.send_fds(other.guarded, [b"guard"], [mine.fileno()])
        await asyncio.sleep(TURN_S)

    run(act)

    mine.settimeout(0)
    with mine, theirs:
        assert mine.recv(1) == b""


def test_one_that_is_dropped_hears_why_and_is_not_lost_besides(run):
    async def act(job):
        other, dropped = await job.ready(1), await job.ready(2)
        job.first.say(drop=[2], why="its ranks died twice")
        said = await dropped.hear("dropped")
        await job.first.is_quiet()
        job.first.say(over="done")
        await job.first.hear("all_informed")
        return said, await other.hear("over"), job.killed

    said, over, killed = run(act)
    assert (said, over) == ({"dropped": "its ranks died twice"}, {"over": "done"})
    assert [pid for pid, _, _ in killed] == [AGENT + 2]


def test_at_the_end_all_are_told_also_who_comes_later_and_nobody_is_killed(run):
    async def act(job):
        early = await job.ready(1)
        job.first.say(over="done")
        told = [await early.hear("over")]
        await job.first.is_quiet(LEASE_S)  # not all are told
        late = await job.node(2)
        told.append(await late.hear("over"))
        await job.first.hear("all_informed")
        for listener in job.listeners:
            listener.close()
        for end in list(job.first.side._others.values()):
            end.close()  # as the first node's process ends
        await late.is_quiet(10 * LEASE_S)
        return told, job.killed

    assert run(act) == ([{"over": "done"}] * 2, [])


def test_who_is_not_awaited_any_more_does_not_hold_up_the_end_and_may_come_all_the_same(run):
    async def act(job):
        await job.ready(1)
        job.first.say(absent=[2])
        job.first.say(over="done")
        began_s = job.hands.passed_s
        await job.first.hear("all_informed")
        waited_s = job.hands.passed_s - began_s
        return waited_s, await (await job.node(2)).hear("over")

    assert run(act) == (0.0, {"over": "done"})


@pytest.mark.parametrize(
    ("number", "secret"), [(1, "another"), (5, SECRET)], ids=["stranger", "not awaited"]
)
def test_who_is_another_user_or_not_awaited_is_not_let_in_and_gives_up(
    run, monkeypatch, number, secret
):
    monkeypatch.setattr(liveness, "TRY_AGAIN_S", 10.0)

    async def act(job):
        other = await job.node(number, secret=secret)
        other.say(ready=True)
        await job.first.is_quiet(FIRST_S / 2)
        said = await other.hear("gone", FIRST_S)
        return said["gone"], job.hands.passed_s

    why, at_s = run(act)
    assert why.startswith("the first node's agent cannot be reached")
    assert FIRST_S < at_s <= FIRST_S + 10.0


def test_all_hear_of_a_round_also_who_comes_later(run):
    async def act(job):
        early = await job.ready(1)
        job.first.say(round={"round": 3, "members": [0, 1]})
        late = await job.node(2)
        return await early.hear("round"), await late.hear("round")

    assert run(act) == ({"round": {"round": 3, "members": [0, 1]}},) * 2
