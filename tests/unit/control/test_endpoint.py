"""A node's listener: each child is accepted once, other users never, however often they connect."""

from __future__ import annotations

import asyncio
import socket

import pytest

from hpctrain.core.base import listener
from hpctrain.errors import ControlLost
from hpctrain.node.control import endpoint
from hpctrain.node.control.endpoint import ChildrenListener, NotAwaited, meet_parent
from hpctrain.node.control.wire import GREETING_BYTES, Greeting, Splitter, framed, packed
from tests.support.clocks import ManualClock
from tests.support.jumping_loop import run_jumping

HERE = "127.0.0.1"


def greeting(secret: str = "s") -> Greeting:
    return Greeting(secret, "round")


class Parent:
    """A parent of nodes 1 and 2 that listens. An asynchronous context manager."""

    def __init__(self) -> None:
        self.inside: dict[int, endpoint.Endpoint] = {}
        self.heard: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.parent = ChildrenListener({1, 2}, greeting, self.let_in)

    def let_in(self, node, child):
        self.inside[node] = child
        child.on_message = lambda _, message: self.heard.put_nowait((node, message))
        child.on_end = lambda _, why: self.ended.put_nowait(why)

    async def __aenter__(self):
        self.port = self.parent.open(HERE)
        return self

    async def __aexit__(self, *_):
        self.parent.close()
        for child in self.inside.values():
            child.close()


def run(act):
    async def within():
        async with asyncio.timeout(5 * endpoint.GREET_S), Parent() as parent:
            return await act(parent)

    return run_jumping(within())


def test_a_child_comes_in_and_is_heard_and_spoken_to():
    async def act(parent):
        child = await meet_parent(HERE, parent.port, greeting(), 2)
        heard = asyncio.Queue()
        child.on_message = lambda _, message: heard.put_nowait(message)
        child.say(b"up")
        assert await parent.heard.get() == (2, b"up")
        parent.inside[2].say(b"d" * 3_000_000)
        assert await heard.get() == b"d" * 3_000_000
        child.close()
        assert await parent.ended.get() == "it has closed the connection"

    run(act)


@pytest.mark.parametrize("node", [1, 3, 0])
def test_a_node_comes_in_once_and_no_other_ones_child(node):
    async def act(parent):
        child = await meet_parent(HERE, parent.port, greeting(), 1)
        with pytest.raises(
            NotAwaited, match=f" has let node {node} in before, or never awaited it"
        ):
            await meet_parent(HERE, parent.port, greeting(), node)
        child.say(b"still here")
        assert await parent.heard.get() == (1, b"still here")
        child.close()

    run(act)


def test_who_does_not_know_the_secret_stays_outside():
    async def act(parent):
        with pytest.raises(ControlLost, match="it has closed the connection"):
            await meet_parent(HERE, parent.port, greeting("another"), 1)
        assert parent.inside == {}

    run(act)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b""),
        framed(packed({"node": 1})),
        framed(bytes(GREETING_BYTES + 1)),
        (GREETING_BYTES + 1).to_bytes(4, "big"),
    ],
)
def test_strangers_words_end_their_connection_and_nothing_else(said):
    async def act(parent):
        reader, writer = await asyncio.open_connection(HERE, parent.port)
        writer.write(said)
        await reader.read()  # until it is closed
        writer.close()
        child = await meet_parent(HERE, parent.port, greeting(), 1)
        child.close()
        assert list(parent.inside) == [1]

    run(act)


def test_silent_strangers_are_sent_away_and_keep_no_child_out(monkeypatch):
    monkeypatch.setattr(listener, "PLACES", 6)  # and one for each child

    async def act(parent):
        other_users = [await asyncio.open_connection(HERE, parent.port) for _ in range(20)]
        for reader, _ in other_users[:12]:
            await reader.read()  # the oldest were closed
        child = await meet_parent(HERE, parent.port, greeting(), 1)
        assert list(parent.inside) == [1]
        for _, writer in other_users:
            writer.close()
        child.close()

    run(act)


def test_a_child_that_is_in_stays_in():
    """The time to say who one is ends with having said it."""

    async def act(parent):
        child = await meet_parent(HERE, parent.port, greeting(), 1)
        reader, writer = await asyncio.open_connection(HERE, parent.port)
        await reader.read()  # a stranger who came later was sent away for its silence
        writer.close()
        child.say(b"still here")
        assert await parent.heard.get() == (1, b"still here")
        assert parent.ended.empty()
        child.close()

    run(act)


def test_an_end_is_told_once_and_nothing_is_said_behind_it():
    async def act(parent):
        child = await meet_parent(HERE, parent.port, greeting(), 1)
        child.say(b"up")
        await parent.heard.get()
        child.codes = None
        child.say(b"not sealed")
        child.say(b"nor this")
        await parent.ended.get()
        parent.inside[1].say(b"to nobody")
        parent.inside[1].data_received(b"late")
        parent.inside[1].connection_lost(None)
        assert parent.ended.empty()
        child.close()

    run(act)


def test_another_user_may_not_stay_silent_for_ever():
    async def act(parent):
        reader, writer = await asyncio.open_connection(HERE, parent.port)
        await reader.read()
        writer.close()

    run(act)


def test_a_parent_that_says_nothing_is_given_up():
    hands = ManualClock()
    with socket.create_server((HERE, 0)) as silent, pytest.raises(TimeoutError):
        run_jumping(meet_parent(HERE, silent.getsockname()[1], greeting(), 1), hands)
    assert hands.passed_s == pytest.approx(endpoint.GREET_S)


def test_a_child_that_says_what_nobody_sealed_is_ended():
    async def act(parent):
        child = await meet_parent(HERE, parent.port, greeting(), 1)
        child.codes = None
        child.say(b"not sealed")
        assert "without the code of this attempt" in await parent.ended.get()
        child.close()

    run(act)


def test_a_child_that_says_more_before_it_is_answered_is_not_let_in():
    async def act(parent):
        reader, writer = await asyncio.open_connection(HERE, parent.port)
        own, splitter = greeting(), Splitter(GREETING_BYTES)
        (challenge,) = splitter.feed(await reader.read(GREETING_BYTES))
        said, _ = own.answer(challenge, 1)
        writer.write(framed(said) + b"\0\0")
        assert await reader.read() == b""
        writer.close()
        child = await meet_parent(HERE, parent.port, greeting(), 1)  # the place is still its own
        child.close()

    run(act)


def test_a_child_that_comes_as_the_listener_closes_is_not_accepted():
    async def act(parent):
        accept = parent.parent._accept
        descriptor = parent.parent._listener.fileno()

        def accept_and_close(*given):
            accept(*given)
            parent.parent.close()

        parent.parent._accept = accept_and_close
        with pytest.raises((ControlLost, OSError)):
            await meet_parent(HERE, parent.port, greeting(), 1)
        assert parent.inside == {}
        assert not asyncio.get_running_loop().remove_reader(descriptor)

    run(act)
