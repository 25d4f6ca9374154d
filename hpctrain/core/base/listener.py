"""How every TCP listener of ours accepts connections.

Any user of a node can connect to a port, as often as he likes. So a connection gets no place beside
the node's own work before its other end has proved that it knows the run's secret:

* A turn accepts few connections. Its server does other work between two turns:
  a process that only accepts sends no heartbeats.
* Those who have not proved themselves share a fixed number of places. If all are taken, the oldest
  connection is closed, never the newest: a node of ours answers at once, and is never the one that
  stays. What the oldest may have sent meanwhile is read before it is closed.
* Nobody stays longer than `proof_s` without a proof.

`Listener` has no thread and no event loop. Its descriptor is readable when `turn` has work, so it
stands in an asyncio loop (`control.endpoint`), in a thread (`memory.copy_line`), or in a loop of
its own (`preflight.rendezvous`, `scheduler.slurm.control`). tests/unit/base/test_listener.py holds
the promises, for each listener of ours.
"""

from __future__ import annotations

import errno
import ipaddress
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Callable

    Take = Callable[[socket.socket], None]
    Hear = Callable[[bytes], Take | None]

QUEUE = 4096
"""Connections that the kernel may keep for us: the nodes of a large job come at once."""
ACCEPTS_A_TURN = 16
HEARD_A_TURN = 64
"""Connections that are read in a turn."""
PLACES = 512
"""Connections without a proof at a time. A process may hold 1,024 files, unless that is raised."""
PROOF_S = 10.0
FIRST_WORD_BYTES = 4096
"""More than any proof."""
PAUSE_S = 1.0
"""How long nothing is accepted if there is no descriptor left, and none of ours to close."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(eq=False)
class _Unproved:
    """A connection whose other end may be anybody."""

    connection: socket.socket
    address: str
    hear: Hear
    until_s: float
    said: bytes = b""


class Listener:
    """Accepts connections, and hands over those whose other end has proved who it is."""

    def __init__(
        self,
        listening: socket.socket,
        begin: Callable[[], tuple[bytes, Hear]],
        *,
        expected: int = 1,
        proof_s: float = PROOF_S,
        most_bytes: int = FIRST_WORD_BYTES,
        refused: Callable[[str, str], None] | None = None,
    ) -> None:
        """Take over a socket that listens.

        Args:
            listening: It is closed with this.
            begin: Called for each connection. Returns what to send it at once, and a function that
                gets all that it has said so far. That returns None while more must come, or who
                takes the connection over (it does not block, as a socket). OSError, ValueError and
                errors of hpctrain close the connection.
            expected: How many of ours may come at once; they have places of their own.
            proof_s: How long a connection may stay without a proof.
            most_bytes: How much it may say before its proof.
            refused: Called with the address and the reason of each that was closed for what it
                said, or left.
        """
        self._listening, self._begin, self._refused = listening, begin, refused
        self._places, self._proof_s = PLACES + expected, proof_s
        self._most_bytes = most_bytes
        self._unproved: dict[socket.socket, _Unproved] = {}
        self._paused_until_s: float | None = None
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)  # noqa: FBT003 - its own order
        self._selector.register(listening, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listening.getsockname()[1])

    @property
    def due_s(self) -> float | None:
        """When, by the monotonic clock, `turn` has work though nothing comes; None for never."""
        first = next(iter(self._unproved.values()), None)  # all may stay equally long
        moments = [self._paused_until_s, first.until_s if first is not None else None]
        return min((moment for moment in moments if moment is not None), default=None)

    def fileno(self) -> int:
        """Readable when `turn` has work; for an event loop."""
        return self._selector.fileno()

    def turn(self, until_s: float | None = 0.0) -> None:
        """Do a bounded part of the work that there is.

        It waits until `until_s` for work, by the monotonic clock; None for ever.
        """
        moments = [moment for moment in (until_s, self.due_s) if moment is not None]
        wait_s = max(min(moments) - clock.monotonic(), 0.0) if moments else None
        ready = [key.fileobj for key, _ in self._selector.select(wait_s)]
        here = [self._unproved[at] for at in ready if at in self._unproved]
        for guest in here[:HEARD_A_TURN]:  # before others are accepted, who may take their places
            self._hear(guest)
        if self._listening in ready:
            self._accept()
        now = clock.monotonic()
        while (first := next(iter(self._unproved.values()), None)) and now >= first.until_s:
            self._close(first, "it said nothing")
        if self._paused_until_s is not None and now >= self._paused_until_s:
            self._paused_until_s = None
            self._selector.register(self._listening, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the listening from any thread: a `turn` that waits returns, and nobody connects."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, and all connections that have proved nothing. Harmless when repeated."""
        for guest in list(self._unproved.values()):
            self._close(guest, "")
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it has gone again; or no descriptor is left
                if error.errno in _NO_ROOM:
                    self._find_room()
                return
            if len(self._unproved) >= self._places:
                self._close_oldest()
            self._greet(connection, str(address[0]))

    def _greet(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)  # noqa: FBT003 - its own order
        with suppress(OSError):  # else short words wait up to 40 ms; asyncio does not set it here
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        words, hear = self._begin()
        guest = _Unproved(connection, address, hear, clock.monotonic() + self._proof_s)
        self._unproved[connection] = guest
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(words)
        except OSError as error:
            self._close(guest, str(error))

    def _hear(self, guest: _Unproved) -> None:
        try:
            more = guest.connection.recv(self._most_bytes)
            guest.said += more
            if not more:
                raise ConnectionResetError("it has closed the connection")
            take = guest.hear(guest.said)
            if take is None and len(guest.said) >= self._most_bytes:
                raise ConnectionAbortedError("it says more than a proof")
        except BlockingIOError:
            return
        except (OSError, ValueError, HpctrainError) as error:
            self._close(guest, str(error))
            return
        if take is not None:
            self._forget(guest)
            try:
                take(guest.connection)
            except OSError:
                guest.connection.close()

    def _find_room(self) -> None:
        if self._unproved:
            self._close_oldest()
        else:  # else the loop would spin: a connection that cannot be accepted stays readable
            self._selector.unregister(self._listening)
            self._paused_until_s = clock.monotonic() + PAUSE_S

    def _close_oldest(self) -> None:
        oldest = next(iter(self._unproved.values()))
        self._hear(oldest)  # its proof may have come since the others were read
        if oldest.connection in self._unproved:
            self._close(oldest, "too many came behind it")

    def _forget(self, guest: _Unproved) -> None:
        del self._unproved[guest.connection]
        self._selector.unregister(guest.connection)

    def _close(self, guest: _Unproved, why: str) -> None:
        self._forget(guest)
        guest.connection.close()
        if why and self._refused is not None:
            self._refused(guest.address, why)


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Listen at one address of this node.

    Raises:
        OSError: there is no such address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=QUEUE)


def listen(address: str, port: int) -> socket.socket:
    """Listen on a port of this node: on the loopback alone where that is the address, else on all.

    Raises:
        OSError: the port is taken.
    """
    if is_loopback(address):
        return listen_at("127.0.0.1" if address == "localhost" else address, port)
    if not socket.has_dualstack_ipv6():
        return listen_at("", port)
    return socket.create_server(
        ("", port), family=socket.AF_INET6, backlog=QUEUE, dualstack_ipv6=True
    )


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
