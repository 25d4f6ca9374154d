"""The first node lets the others in; whoever else connects keeps nobody waiting.

All who have connected are listened to at once. tests/unit/test_preflight_meeting.py holds the
promises.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.preflight.connection import HELLO_BYTES, Connection, Stranger, challenge, welcome

if TYPE_CHECKING:
    import socket

HELLO_S = 5.0
"""Who connects and says nothing is sent away after so long."""
STRANGERS = 256
"""So many may be silent at once; then whoever came first has to go. A node answers at once."""


@dataclass
class _Guest:
    """Somebody who has connected, and may be one of ours."""

    connection: socket.socket
    challenge: str
    until: float
    said: bytes = b""


class Acceptor:
    """Admits each node of a job once."""

    def __init__(self, server: socket.socket, size: int, key: str) -> None:
        """Wait at a listening socket.

        Args:
            server: The socket; the caller closes it.
            size: Number of nodes, this one included.
            key: The job's secret.
        """
        self._server = server
        self._size = size
        self._key = key
        self._selector = selectors.DefaultSelector()
        self._guests: dict[socket.socket, _Guest] = {}
        self._members: dict[int, Connection] = {}

    def admit(self, deadline: float) -> dict[int, Connection]:
        """Rank to connection of those who have come before the deadline, of the monotonic clock."""
        self._server.settimeout(0)
        self._selector.register(self._server, selectors.EVENT_READ)
        try:
            while len(self._members) < self._size - 1:
                until = min([deadline, *(guest.until for guest in self._guests.values())])
                ready = self._selector.select(max(until - time.monotonic(), 0.0))
                if time.monotonic() >= deadline:
                    break
                self._serve([key.fileobj for key, _ in ready])
        finally:
            for connection in list(self._guests):
                self._send_away(connection)
            self._selector.close()
        return self._members

    def _serve(self, ready: list[object]) -> None:
        for connection, guest in list(self._guests.items()):
            if connection in ready:
                self._listen_to(guest)
            elif time.monotonic() >= guest.until:
                self._send_away(connection)
        if self._server in ready:
            self._greet()

    def _greet(self) -> None:
        if len(self._guests) >= STRANGERS + self._size:
            self._send_away(next(iter(self._guests)))
        try:
            connection = self._server.accept()[0]
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or it has gone again
            if self._guests:
                self._send_away(next(iter(self._guests)))
            return
        guest = _Guest(connection, challenge(), time.monotonic() + HELLO_S)
        self._guests[connection] = guest
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.settimeout(0)
            connection.send(json.dumps({"challenge": guest.challenge}).encode() + b"\n")
        except OSError:
            self._send_away(connection)

    def _listen_to(self, guest: _Guest) -> None:
        try:
            more = guest.connection.recv(HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        guest.said += more
        line, newline, rest = guest.said.partition(b"\n")
        if newline and not rest:
            self._let_in(guest, line)
        elif not more or newline or len(guest.said) >= HELLO_BYTES:
            self._send_away(guest.connection)

    def _let_in(self, guest: _Guest, line: bytes) -> None:
        """The first who proves to be a rank is it."""
        try:
            rank, member = welcome(guest.connection, self._key, guest.challenge, line, self._size)
        except (Stranger, OSError):
            self._send_away(guest.connection)
            return
        self._forget(guest.connection)
        if rank in self._members:
            member.close()
        else:
            self._members[rank] = member

    def _forget(self, connection: socket.socket) -> None:
        del self._guests[connection]
        self._selector.unregister(connection)

    def _send_away(self, connection: socket.socket) -> None:
        self._forget(connection)
        with contextlib.suppress(OSError):
            connection.close()
