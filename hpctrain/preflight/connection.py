"""One connection between two nodes of a job: who is there, and lines of JSON from nobody else.

Both ends prove that they know the job's secret, without sending it, and each line carries a code of
that secret, of the connection, and of its place in it. So whoever answers on the port, listens in
between or repeats what was said cannot say anything. Nothing that is received is run.
tests/unit/test_preflight_meeting.py holds the promises.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import socket
from typing import TYPE_CHECKING, Any

from hpctrain.base.secret import Forged, code, is_code, sign, verify

if TYPE_CHECKING:
    from io import BufferedReader

HELLO_BYTES = 4096
"""More than any line before both ends know each other."""
LINE_BYTES = 64 << 20
TELL_S = 10.0
HOST, MEMBER = "host", "member"


class Stranger(ConnectionError):
    """The other end does not know the secret."""


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """Listen on a port of this node: on the loopback alone where that is the address, else on all.

    Raises:
        OSError: the port is taken.
    """
    if is_loopback(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=backlog)
    return socket.create_server(
        ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
    )


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


class Connection:
    """Signed lines of JSON, in the order in which they were said."""

    def __init__(self, connection: socket.socket, session: str = "", *, side: str = "") -> None:
        """Speak through a socket, which is closed with this.

        Args:
            connection: The socket.
            session: The secret of this connection; "" until `begin`.
            side: HOST or MEMBER, whichever this end is.
        """
        connection.settimeout(TELL_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader: BufferedReader = connection.makefile("rb")
        self._session = session
        self._side = side
        self._said = self._heard = 0

    def begin(self, key: str, rank: int, timeout_s: float) -> None:
        """A member's first words; the host's are `challenge_of`, `rank_of` and `welcome`.

        Raises:
            Stranger: who answers does not know the secret.
            OSError: nobody answers.
        """
        hello = self._plain(timeout_s)
        theirs, mine = hello.get("challenge"), challenge()
        if not isinstance(theirs, str):
            raise Stranger("it does not speak as hpctrain's nodes do")
        words = (theirs, mine, rank)
        proof = code(key, MEMBER, *words)
        self._send(json.dumps({"rank": rank, "challenge": mine, "proof": proof}))
        if not is_code(self._plain(timeout_s).get("proof"), key, HOST, *words):
            raise Stranger("it does not know the secret of this job")
        self._session, self._side = code(key, "session", *words), MEMBER

    def tell(self, value: Any) -> None:
        """Say something that JSON holds.

        Raises:
            OSError: the other end has gone.
        """
        about = f"{self._side} {self._said}"
        self._send(sign(self._session, about, json.dumps(value)))
        self._said += 1

    def hear(self, timeout_s: float) -> Any:
        """What the other end says next.

        Raises:
            OSError: nothing came in time, the other end has gone, or somebody else said it.
        """
        line = self._line(timeout_s, LINE_BYTES)
        about = f"{MEMBER if self._side == HOST else HOST} {self._heard}"
        try:
            value = json.loads(verify(self._session, about, line))
        except (Forged, ValueError, RecursionError):
            raise Stranger("somebody else has spoken in its place") from None
        self._heard += 1
        return value

    def close(self) -> None:
        """Leave."""
        with contextlib.suppress(OSError):
            self._reader.close()
            self._connection.close()

    def _plain(self, timeout_s: float) -> dict[str, Any]:
        return plain(self._line(timeout_s, HELLO_BYTES))

    def _line(self, timeout_s: float, limit: int) -> bytes:
        self._connection.settimeout(max(timeout_s, 0.001))
        line = self._reader.readline(limit)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other end has gone")
        return line[:-1]

    def _send(self, text: str) -> None:
        self._connection.settimeout(TELL_S)
        self._connection.sendall(text.encode() + b"\n")


def challenge() -> str:
    """What nobody can have an answer ready for."""
    return secrets.token_hex(16)


def plain(line: bytes) -> dict[str, Any]:
    """A line that anybody may have sent.

    Raises:
        Stranger: it is no JSON object.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Stranger("it does not speak as hpctrain's nodes do")
    return found


def welcome(
    connection: socket.socket, key: str, mine: str, line: bytes, size: int
) -> tuple[int, Connection]:
    """A host's answer to a member's first line: its rank, and the connection from here on.

    Args:
        connection: The socket; nothing but this line was received.
        key: The job's secret.
        mine: The challenge that the member got.
        line: What it answered.
        size: Number of nodes.

    Raises:
        Stranger: it does not know the secret, or is no node of ours.
        OSError: it has gone.
    """
    hello = plain(line)
    rank, theirs = hello.get("rank"), hello.get("challenge")
    if type(rank) is not int or not 0 < rank < size or not isinstance(theirs, str):
        raise Stranger("it is none of our nodes")
    words = (mine, theirs, rank)
    if not is_code(hello.get("proof"), key, MEMBER, *words):
        raise Stranger("it does not know the secret of this job")
    connection.settimeout(TELL_S)
    connection.sendall(json.dumps({"proof": code(key, HOST, *words)}).encode() + b"\n")
    return rank, Connection(connection, code(key, "session", *words), side=HOST)
