"""Connections between replica servers for the bytes of copies: threads at both ends, all signed.

What goes over them are weights, so both ends first prove that they know the attempt's secret
(`control.wire`), and an unauthenticated peer hears nothing but a nonce.
tests/unit/memory/test_replica_peer.py holds the promises.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.errors import ControlLost
from hpctrain.node.control.endpoint import CONNECT_AGAIN_S, GREET_S, NodeListener
from hpctrain.node.control.wire import (
    GREETING_BYTES,
    MOST_BYTES,
    Codes,
    Garbled,
    Greeting,
    Splitter,
    framed,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.core.base.listener import Listener
    from hpctrain.node.control.endpoint import Children

log = logging.getLogger("hpctrain.agent")

Message = tuple[dict[str, Any], bytes]

SILENT_S = 60.0
"""A connection on which nothing moves for so long, while something is awaited, is lost."""
JOIN_S = 20.0
MOST_NOTED = 20
"""Most unauthenticated peers that are logged in a round."""
PIECE_BYTES = 1 << 20
"""Of a copy in one message: its code is made while the bytes are in the cache."""
_READ_BYTES = 1 << 20


class CopyLine:
    """One end of a connection; one thread at a time."""

    def __init__(self, peer: socket.socket) -> None:
        """Nobody has proved anything yet."""
        self._peer = peer
        self._codes: Codes | None = None
        self._splitter = Splitter(GREETING_BYTES)
        self._heard: list[bytes] = []
        peer.settimeout(GREET_S)

    def trust(self, codes: Codes) -> None:
        """The other end knows the secret."""
        self._codes = codes
        self._splitter.most_bytes = MOST_BYTES
        self._peer.settimeout(SILENT_S)
        with suppress(OSError):  # no TCP in some tests
            self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a message, which waits for the other end to take it.

        Raises:
            OSError: the connection is lost.
        """
        self.send(packed(head, body))

    def hear(self, *, wait_s: float | None = SILENT_S) -> Message:
        """Return the next message; wait `wait_s` for it, None for ever.

        Raises:
            OSError: the connection is lost.
            Garbled: the other end did not send it.
        """
        self._peer.settimeout(wait_s)
        try:
            return unpacked(self.receive())
        finally:
            with suppress(OSError):
                self._peer.settimeout(SILENT_S)

    def ask(self, head: dict[str, Any], body: bytes = b"") -> Message:
        """Send a message, and hear what is said to it; errors as of `say` and `hear`."""
        self.say(head, body)
        return self.hear()

    def send(self, message: bytes) -> None:
        """Send bytes, sealed once the other end is trusted; errors as of `say`."""
        self._peer.sendall(framed(self._codes.seal(message) if self._codes else message))

    def receive(self) -> bytes:
        """The bytes of the next message; errors as of `hear`."""
        while True:
            while not self._heard:
                piece = self._peer.recv(_READ_BYTES)
                if not piece:
                    raise ConnectionResetError("it has closed the connection")
                self._heard += self._splitter.feed(piece)
            message = self._heard.pop(0)
            opened = self._codes.opened(message) if self._codes else message
            if opened is not None:
                return opened

    def close(self) -> None:
        """End it; a thread that waits in it gets an OSError."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()


def meet(address: tuple[str, int], greeting: Callable[[], Greeting], node: int) -> CopyLine:
    """Connect to another replica server; both prove that they know the secret.

    Raises:
        ControlLost: it cannot be reached, or something else is there.
    """
    deadline_s = clock.monotonic() + JOIN_S
    while True:
        try:
            return _met(address, greeting(), node)
        except (OSError, Garbled) as error:
            if clock.monotonic() + CONNECT_AGAIN_S > deadline_s:
                where = f"{address[0]}:{address[1]}"
                raise ControlLost(
                    f"{where} is no replica server that can be met: {error}"
                ) from error
        clock.sleep(CONNECT_AGAIN_S)


def _met(address: tuple[str, int], greeting: Greeting, node: int) -> CopyLine:
    line = CopyLine(socket.create_connection(address, timeout=GREET_S))
    try:
        challenge = line.receive()
        said, awaited = greeting.answer(challenge, node)
        line.send(said)
        line.trust(greeting.trusted(challenge, node, line.receive(), awaited))
    except BaseException:
        line.close()
        raise
    return line


class CopyListener(NodeListener):
    """Accepts other nodes' replica servers alone, each with a thread of its own."""

    def __init__(
        self,
        nodes: Children,
        greeting: Callable[[], Greeting],
        serve: Callable[[int, CopyLine], None],
    ) -> None:
        """Await nobody yet; only `nodes` may come.

        `serve` is called on a thread with a node's number and its connection. The connection ends
        when it returns or raises.
        """
        super().__init__(nodes, greeting, refused=self._note)
        self._serve_node = serve
        self._lock = threading.Lock()
        self._lines: set[CopyLine] = set()
        self._noted = 0
        self._is_over = False

    def open(self, address: str) -> int:
        """Listen; returns the port.

        Raises:
            OSError: there is no such address, or no port.
        """
        listener = self._listen(address)
        name = f"copies-{listener.port}"
        threading.Thread(target=self._welcome, args=(listener,), name=name, daemon=True).start()
        return listener.port

    def close(self) -> None:
        """Let nobody in any more, and end all connections."""
        with self._lock:
            self._is_over = True
            lines = list(self._lines)
        if self._listener is not None:
            self._listener.wake()
        for line in lines:
            line.close()

    def _welcome(self, listener: Listener) -> None:
        while not self._is_over:
            listener.turn(None)
        listener.close()

    def _accept(self, node: int, proof: bytes, codes: Codes, peer: socket.socket) -> None:
        line = CopyLine(peer)
        line.send(proof)
        line.trust(codes)
        with self._lock:
            if self._is_over:
                line.close()
                return
            self._lines.add(line)
        threading.Thread(target=self._serve, args=(node, line), daemon=True).start()

    def _serve(self, node: int, line: CopyLine) -> None:
        try:
            self._serve_node(node, line)
        except (OSError, Garbled) as error:
            log.debug("the connection of node %d's replica server has ended: %s", node, error)
        finally:
            with self._lock:
                self._lines.discard(line)
            line.close()

    def _note(self, address: str, why: str) -> None:
        self._noted += 1
        if self._noted <= MOST_NOTED and not self._is_over:
            log.warning("somebody at %s was refused copies of the state: %s", address, why)
