"""Connections of a node's process: messages on a socket, and how nodes are accepted.

tests/unit/control/test_endpoint.py holds the promises.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from hpctrain.core.base import clock
from hpctrain.core.base.listener import Listener, listen_at
from hpctrain.errors import ControlLost
from hpctrain.node.control.wire import (
    GREETING_BYTES,
    MOST_BYTES,
    Codes,
    Garbled,
    Greeting,
    Splitter,
    framed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from hpctrain.core.base.listener import Hear

    class Children(Sized, Protocol):
        """A set of numbers, or a range of them."""

        def __contains__(self, node: object, /) -> bool:
            """Whether it is one of them."""


GREET_S = 10.0
"""So long may it take to say who one is."""
CONNECT_AGAIN_S = 0.2


class NotAwaited(ControlLost):
    """The parent itself refuses this node: another connection would not help."""


class Endpoint(asyncio.Protocol):
    """An end of a connection to another process, which speaks in messages."""

    def __init__(
        self,
        on_message: Callable[[Endpoint, bytes], None],
        on_end: Callable[[Endpoint, str], None],
        on_made: Callable[[Endpoint], None] | None = None,
    ) -> None:
        """Wait to be connected.

        `on_end` is called once, with why, unless `close` came first.
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


class NodeListener:
    """Accepts nodes that know the secret, and nobody else; how they come on is a subclass's."""

    def __init__(
        self,
        nodes: Children,
        greeting: Callable[[], Greeting],
        *,
        once: bool = False,
        refused: Callable[[str, str], None] | None = None,
    ) -> None:
        """Accept nobody before `open`; each of `nodes` may come, `once` or as often as it likes.

        `refused` is as for `base.listener.Listener`.
        """
        self._nodes, self._greeting, self._once, self._refused = nodes, greeting, once, refused
        self._admitted: set[int] = set()
        self._listener: Listener | None = None

    def _listen(self, address: str, port: int = 0) -> Listener:
        self._listener = Listener(
            listen_at(address, port),
            self._begin,
            expected=len(self._nodes),
            proof_s=GREET_S,
            refused=self._refused,
        )
        return self._listener

    def _begin(self) -> tuple[bytes, Hear]:
        greeting = self._greeting()
        return framed(greeting.challenge()), partial(self._hear, greeting)

    def _hear(self, greeting: Greeting, said: bytes) -> Callable[[socket.socket], None] | None:
        messages = list(Splitter(GREETING_BYTES).feed(said))
        if not messages:
            return None
        if len(said) > len(framed(messages[0])):
            raise Garbled("it says more than it may")
        node, proof, codes = greeting.admit(messages[0])
        if node not in self._nodes or node in self._admitted:
            return partial(_refuse, framed(greeting.refusal(messages[0])))
        if self._once:
            self._admitted.add(node)
        return partial(self._accept, node, proof, codes)

    def _accept(self, node: int, proof: bytes, codes: Codes, connection: socket.socket) -> None:
        """Take over a node's connection; what it sends first is `proof`."""
        raise NotImplementedError


class ChildrenListener(NodeListener):
    """Accepts this node's children on an event loop, each once."""

    def __init__(
        self,
        children: Children,
        greeting: Callable[[], Greeting],
        on_child: Callable[[int, Endpoint], None],
    ) -> None:
        """Accept nobody before `open`.

        `on_child` gets a child's number and its connection, and must listen to it. It must send
        nothing before the child does, which has yet to hear that it is accepted.
        """
        super().__init__(children, greeting, once=True)
        self._on_child = on_child
        self._timer: asyncio.TimerHandle | None = None
        self._coming: set[asyncio.Task[object]] = set()

    def open(self, address: str, port: int = 0) -> int:
        """Accept connections on the running event loop; returns the port.

        Raises:
            OSError: there is no such address, or the port is taken.
        """
        listener = self._listen(address, port)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._turn)
        return listener.port

    def close(self) -> None:
        """Accept nobody any more, and close what was not accepted. Harmless when repeated."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        if self._listener is None:
            return
        self._listener.turn()
        if self._timer is None and (due_s := self._listener.due_s) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(due_s - clock.monotonic(), self._turn_late)

    def _turn_late(self) -> None:
        self._timer = None
        self._turn()

    def _accept(self, node: int, proof: bytes, codes: Codes, connection: socket.socket) -> None:
        # Before `on_child` listens nothing can come: it does so as soon as there is a connection.
        child = Endpoint(_ignore, _ignore, partial(self._greet, node, proof, codes))
        loop = asyncio.get_running_loop()
        coming = loop.create_task(loop.connect_accepted_socket(lambda: child, connection))
        self._coming.add(coming)
        coming.add_done_callback(self._coming.discard)

    def _greet(self, node: int, proof: bytes, codes: Codes, child: Endpoint) -> None:
        if self._listener is None:  # closed meanwhile
            child.close()
            return
        child.say(proof)
        child.trust(codes)
        self._on_child(node, child)


def _refuse(refusal: bytes, connection: socket.socket) -> None:
    with connection:
        connection.send(refusal)


def _ignore(_: Endpoint, what: object) -> None:
    del what


async def meet_parent(address: str, port: int, greeting: Greeting, node: int) -> Endpoint:
    """Connect to this node's parent; both prove that they know the secret.

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


async def join_parent(
    address: str, port: int, greeting: Callable[[], Greeting], node: int, within_s: float
) -> Endpoint:
    """As `meet_parent`, again for `within_s`: another user may have connected before this node.

    Raises:
        OSError: and ControlLost, as the last try raised them.
    """
    deadline_s = clock.monotonic() + within_s
    while True:
        try:
            return await meet_parent(address, port, greeting(), node)
        except NotAwaited:
            raise
        except (OSError, ControlLost):
            if clock.monotonic() + CONNECT_AGAIN_S > deadline_s:
                raise
        await asyncio.sleep(CONNECT_AGAIN_S)


def _message(heard: bytes | str) -> bytes:
    if isinstance(heard, str):
        raise Garbled(heard)
    return heard


def _no_more(heard: asyncio.Queue[bytes | str]) -> None:
    """Nothing came behind the greeting: not even an end, of which nobody would hear later."""
    if not heard.empty():
        _message(heard.get_nowait())
        raise Garbled("it says more than it may")
