"""Connections of a node's process: messages on a socket, and how nodes are let in.

tests/unit/control/test_endpoint.py holds the promises.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING, cast

from hpctrain.control.wire import (
    GREETING_BYTES,
    MOST_BYTES,
    Codes,
    Garbled,
    Greeting,
    Splitter,
    framed,
)
from hpctrain.errors import ControlLost

if TYPE_CHECKING:
    from collections.abc import Callable, Container

GREET_S = 10.0
"""So long may it take to say who one is."""
MOST_STRANGERS = 256
"""Of those that have not said who they are, so many are listened to: the newest."""


class NotAwaited(ControlLost):
    """The parent itself does not let this node in: to knock again would not help."""


class Endpoint(asyncio.Protocol):
    """An end of a connection to another process, which speaks in messages."""

    def __init__(
        self,
        on_message: Callable[[Endpoint, bytes], None],
        on_end: Callable[[Endpoint, str], None],
        on_made: Callable[[Endpoint], None] | None = None,
    ) -> None:
        """Wait to be connected.

        Args:
            on_message: Called with each message.
            on_end: Called once, with why, unless `close` came first.
            on_made: Called as soon as there is a connection.
        """
        self.on_message, self.on_end, self._on_made = on_message, on_end, on_made
        self.splitter = Splitter(GREETING_BYTES)
        self.codes: Codes | None = None
        self.silent_s = 0.0
        self._transport: asyncio.Transport | None = None

    def trust(self, codes: Codes | None) -> None:
        """The other end has proved who it is: it may say more, from here on with codes."""
        self.codes = codes
        self.splitter.most_bytes = MOST_BYTES

    def say(self, message: bytes) -> None:
        """Send a message, as soon as the other end takes it."""
        if self._transport is not None:
            self._transport.write(framed(self.codes.seal(message) if self.codes else message))

    def close(self) -> None:
        """Send what was said, and end it; `on_end` will not be called."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def option(self, name: int, size: int) -> bytes:
        """What `socket.getsockopt` says of the connection; nothing once it ended."""
        if self._transport is None:
            return b""
        own = cast("socket.socket", self._transport.get_extra_info("socket"))
        return own.getsockopt(socket.SOL_SOCKET, name, size)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio; so below."""
        self._transport = cast("asyncio.Transport", transport)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        try:
            for message in self.splitter.feed(data):
                opened = self.codes.opened(message) if self.codes else message
                if opened is not None:
                    self.silent_s = 0.0  # bytes alone are no sign of life: nothing may come of them
                    self.on_message(self, opened)
                if self._transport is None:
                    return
        except (Garbled, ValueError) as error:
            self._end(str(error))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._end(str(exc) if exc else "it has closed the connection")

    def _end(self, why: str) -> None:
        if self._transport is not None:
            self.close()
            self.on_end(self, why)


class ChildrenDoor:
    """Lets this node's children in, each once, and nobody else."""

    def __init__(
        self,
        children: Container[int],
        greeting: Callable[[], Greeting],
        on_child: Callable[[int, Endpoint], None],
    ) -> None:
        """Listen with `asyncio.loop.create_server(door.knock, ...)`.

        Args:
            children: Their numbers.
            greeting: Makes one for a connection.
            on_child: Called with a child's number and its connection, which it is to listen to.
                It must not say anything before the child does, which has yet to hear that it is in.
        """
        self._children, self._greeting, self._on_child = children, greeting, on_child
        self._strangers: dict[Endpoint, asyncio.TimerHandle] = {}
        self._admitted: set[int] = set()

    def knock(self) -> Endpoint:
        """A connection that somebody is about to make."""
        greeting = self._greeting()
        return Endpoint(
            partial(self._hear, greeting), self._forget, partial(self._challenge, greeting)
        )

    def close(self) -> None:
        """Send all away that were not let in."""
        for stranger in list(self._strangers):
            self._send_away(stranger)

    def _challenge(self, greeting: Greeting, stranger: Endpoint) -> None:
        if len(self._strangers) >= MOST_STRANGERS:
            self._send_away(next(iter(self._strangers)))  # who knows the secret has said so at once
        loop = asyncio.get_running_loop()
        self._strangers[stranger] = loop.call_later(GREET_S, self._send_away, stranger)
        stranger.say(greeting.challenge())

    def _hear(self, greeting: Greeting, stranger: Endpoint, message: bytes) -> None:
        node, said, codes = greeting.admit(message)  # Garbled ends the connection
        if node not in self._children or node in self._admitted:
            stranger.say(greeting.refusal(message))
            raise Garbled(f"node {node} is not awaited")
        self._forget(stranger, "")
        self._admitted.add(node)
        stranger.say(said)
        stranger.trust(codes)
        self._on_child(node, stranger)

    def _forget(self, stranger: Endpoint, why: str) -> None:
        del why
        if (timer := self._strangers.pop(stranger, None)) is not None:
            timer.cancel()

    def _send_away(self, stranger: Endpoint) -> None:
        self._forget(stranger, "")
        stranger.close()


async def meet_parent(address: str, port: int, greeting: Greeting, node: int) -> Endpoint:
    """A connection to this node's parent, on which both have proved that they know the secret.

    Args:
        address: The parent's.
        port: The parent's.
        greeting: For this connection.
        node: This node's number.

    Raises:
        OSError: it cannot be reached.
        TimeoutError: it says nothing.
        NotAwaited: it does not await this node, or not any more.
        ControlLost: something else is there.
    """
    heard: asyncio.Queue[bytes | str] = asyncio.Queue()
    parent = Endpoint(
        lambda _, message: heard.put_nowait(message), lambda _, why: heard.put_nowait(why)
    )
    try:
        async with asyncio.timeout(GREET_S):
            await asyncio.get_running_loop().create_connection(lambda: parent, address, port)
            challenge = _message(await heard.get())
            said, awaited = greeting.answer(challenge, node)
            parent.say(said)
            proof = _message(await heard.get())
            if not (refused := greeting.is_refusal(challenge, node, proof)):
                parent.trust(greeting.trusted(challenge, node, proof, awaited))
                _no_more(heard)
    except BaseException as error:
        parent.close()
        if isinstance(error, Garbled):
            why = f"{address}:{port} is not the parent of node {node}: {error}"
            raise ControlLost(why) from None
        raise
    if refused:
        parent.close()
        raise NotAwaited(f"{address}:{port} has let node {node} in before, or never awaited it")
    return parent


def _message(heard: bytes | str) -> bytes:
    if isinstance(heard, str):
        raise Garbled(heard)
    return heard


def _no_more(heard: asyncio.Queue[bytes | str]) -> None:
    """Nothing came behind the greeting: not even an end, of which nobody would hear later."""
    if not heard.empty():
        _message(heard.get_nowait())
        raise Garbled("it says more than it may")
