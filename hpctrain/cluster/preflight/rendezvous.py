"""The meeting of a job's nodes over TCP: each tells what it has, the first decides, all hear it.

Not through the shared directory, which may be what is broken, and not through torch, whose version
may be. Every call is bounded in time: a node that says nothing is left out from then on and named.
The first node listens to all who have connected at once, so a foreign connection keeps nobody
waiting. It asks for clocks a few nodes at a time: one by one, silent nodes would add up their
time-outs; all at once, answers would queue at the first node and look slow.

Nobody but the job's own nodes is heard (`Connection`). Both ends prove that they know the job's
secret, without sending it, and each line carries a code of that secret, of the connection, and of
its place in it. So a user who answers on the port, listens in between or repeats a line cannot
say anything. Nothing that is received is run.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.listener import Listener, listen
from hpctrain.core.base.process import raise_limit
from hpctrain.core.base.secret import Forged, code, is_code, sign, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from io import BufferedReader

    from hpctrain.core.base.listener import Hear

    Decide = Callable[[dict[int, Any]], Any]
    DecideEach = Callable[[dict[int, Any]], Mapping[int, Any]]

HELLO_BYTES = 4096
"""More than any line before both ends know each other."""
LINE_BYTES = 64 << 20
SEND_S = 10.0
COORDINATOR, PEER = "host", "member"
HELLO_S = 5.0
"""Who connects and says nothing is sent away after so long."""
RETRY_S = 0.05
LONGEST_RETRY_S = 0.5
"""Thousands that wait for a first node which is late are no storm of look-ups of its name."""
TURN_S = 600.0
"""So long may it take until the first node asks this one for the time."""
MARGIN_S = 5.0
"""How much longer than the first node the others wait for its word."""


PINGS = 5
ASKED_AT_ONCE = 16
ANSWER_S = 5.0


class UnauthenticatedPeer(ConnectionError):
    """The other end does not know the secret."""


class Alone(Exception):
    """The first node cannot be reached, or has gone."""


class Coordinator(contextlib.AbstractContextManager["Coordinator"]):
    """The first node's end.

    Attributes:
        missing: Ranks that never came, or were not heard in time, to why.
    """

    def __init__(
        self, size: int, port: int, key: str, timeout_s: float, *, address: str = ""
    ) -> None:
        """Wait until every other node is there, at most so long.

        Raises:
            OSError: the port is taken.
        """
        self.missing: dict[int, str] = {}
        raise_limit()  # each node is an open file here
        server = listen(address, port)
        self._peers = Acceptor(server, size, key).admit(clock.monotonic() + timeout_s)
        for rank in range(1, size):
            if rank not in self._peers:
                self.missing[rank] = f"did not connect in {timeout_s:g} s"

    def skews(self, clock: Callable[[], float] = clock.now) -> dict[int, Skew]:
        """Each other node's clock against this one's, by the midpoint of the quickest exchange."""
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            asked = {rank: pool.submit(_skew_of, line, clock) for rank, line in self._peers.items()}
        skews = {rank: each.result() for rank, each in asked.items()}
        for rank, skew in skews.items():
            if isinstance(skew, Exception):
                self._leave_out(rank, skew)
        return {rank: skew for rank, skew in skews.items() if isinstance(skew, Skew)}

    def agree(self, own: Any, decide: Decide, timeout_s: float) -> Any:
        """What `decide` makes of all nodes' values, which every node gets.

        `decide` gets rank to value, without those who were silent.
        """
        return self.agree_each(own, lambda all_: dict.fromkeys(all_, decide(all_)), timeout_s)

    def agree_each(self, own: Any, decide: DecideEach, timeout_s: float) -> Any:
        """The same with an answer for each node, as large as what that node needs.

        One answer with something about every node, to every node, would grow with their square.
        """
        answers = decide(self._heard(own, timeout_s))
        for rank, line in list(self._peers.items()):
            self._with(rank, partial(line.send, {"answer": answers.get(rank)}))
        return answers.get(0)

    def _heard(self, own: Any, timeout_s: float) -> dict[int, Any]:
        deadline = clock.monotonic() + timeout_s
        values = {0: own}
        for rank, line in list(self._peers.items()):
            heard = self._with(rank, partial(_value, line, deadline - clock.monotonic()))
            if heard is not None:
                values[rank] = heard["value"]
        return values

    def _with(self, rank: int, act: Callable[[], Any]) -> Any:
        """What `act` returns; a node with which it fails is left out from here on."""
        try:
            return act()
        except (OSError, ValueError, TypeError) as error:
            self._leave_out(rank, error)
            return None

    def _leave_out(self, rank: int, error: Exception) -> None:
        self._peers.pop(rank).close()
        silent = isinstance(error, TimeoutError)
        self.missing[rank] = "gave no answer in time" if silent else f"has gone: {error}"

    def __exit__(self, *_: object) -> None:
        """Let all go."""
        for line in self._peers.values():
            line.close()


class Peer(contextlib.AbstractContextManager["Peer"]):
    """Any other node's end."""

    def __init__(self, rank: int, address: str, port: int, key: str, timeout_s: float) -> None:
        """Connect to the first node, which may start later.

        Raises:
            Alone: it could not be reached in time; the text says why.
        """
        deadline, pause_s = clock.monotonic() + timeout_s, RETRY_S
        while True:
            line_or_why = _meet(rank, address, port, key)
            if isinstance(line_or_why, Connection):
                self._line = line_or_why
                return
            if clock.monotonic() > deadline:
                raise Alone(f"{address} port {port} {line_or_why}")
            clock.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_RETRY_S)

    def agree(self, own: Any, timeout_s: float) -> Any:
        """The first node's answer to everybody's values; see `Coordinator.agree`.

        Raises:
            Alone: the first node has gone, or has done without this one.
        """
        try:
            self._line.send({"value": own})
            while True:
                heard = self._line.hear(timeout_s + MARGIN_S)
                if isinstance(heard, dict) and "answer" in heard:
                    return heard["answer"]
        except OSError as error:
            raise Alone(f"the first node is not heard any more: {error}") from None

    def serve_time(self, clock: Callable[[], float] = clock.now, *, count: int = PINGS) -> None:
        """Answer the first node's questions for the time.

        Raises:
            Alone: the first node has gone.
        """
        try:
            for _ in range(count):
                self._line.hear(TURN_S)  # it asks a few at a time
                self._line.send(clock())
        except OSError as error:
            raise Alone(f"the first node is not heard any more: {error}") from None

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self._line.close()


class Connection:
    """Signed lines of JSON, in the order in which they were said."""

    def __init__(self, connection: socket.socket, session: str = "", *, side: str = "") -> None:
        """Speak through a socket, which is closed with this.

        `session` is "" until `begin`; `side` is COORDINATOR or PEER, whichever this end is.
        """
        connection.settimeout(SEND_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader: BufferedReader = connection.makefile("rb")
        self._session = session
        self._side = side
        self._said = self._heard = 0

    def begin(self, key: str, rank: int, timeout_s: float) -> None:
        """A peer's first words; the coordinator's are in `Acceptor` and `proved`.

        Raises:
            UnauthenticatedPeer: who answers does not know the secret.
            OSError: nobody answers.
        """
        hello = self._plain(timeout_s)
        theirs, own = hello.get("challenge"), challenge()
        if not isinstance(theirs, str):
            raise UnauthenticatedPeer("it does not speak as hpctrain's nodes do")
        words = (theirs, own, rank)
        proof = code(key, PEER, *words)
        self._send(json.dumps({"rank": rank, "challenge": own, "proof": proof}))
        if not is_code(self._plain(timeout_s).get("proof"), key, COORDINATOR, *words):
            raise UnauthenticatedPeer("it does not know the secret of this job")
        self._session, self._side = code(key, "session", *words), PEER

    def send(self, value: Any) -> None:
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
        about = f"{PEER if self._side == COORDINATOR else COORDINATOR} {self._heard}"
        try:
            value = json.loads(verify(self._session, about, line))
        except (Forged, ValueError, RecursionError):
            raise UnauthenticatedPeer("somebody else has spoken in its place") from None
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
        self._connection.settimeout(SEND_S)
        self._connection.sendall(text.encode() + b"\n")


def challenge() -> str:
    """What nobody can have an answer ready for."""
    return secrets.token_hex(16)


def plain(line: bytes) -> dict[str, Any]:
    """A line that anybody may have sent.

    Raises:
        UnauthenticatedPeer: it is no JSON object.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UnauthenticatedPeer("it does not speak as hpctrain's nodes do")
    return value


def proved(key: str, own: str, line: bytes, size: int) -> tuple[int, bytes, str]:
    """Of a peer's first line: its rank, what to answer, and the secret of the connection.

    Raises:
        UnauthenticatedPeer: it does not know the secret, or is no node of ours.
    """
    hello = plain(line)
    rank, theirs = hello.get("rank"), hello.get("challenge")
    if type(rank) is not int or not 0 < rank < size or not isinstance(theirs, str):
        raise UnauthenticatedPeer("it is none of our nodes")
    words = (own, theirs, rank)
    if not is_code(hello.get("proof"), key, PEER, *words):
        raise UnauthenticatedPeer("it does not know the secret of this job")
    proof = json.dumps({"proof": code(key, COORDINATOR, *words)}).encode() + b"\n"
    return rank, proof, code(key, "session", *words)


class Acceptor:
    """Admits each node of a job once."""

    def __init__(self, server: socket.socket, size: int, key: str) -> None:
        """Wait at a listening socket, which is closed with the end of `admit`."""
        self._size, self._key = size, key
        self._listener = Listener(
            server, self._begin, expected=size, proof_s=HELLO_S, most_bytes=HELLO_BYTES
        )
        self._peers: dict[int, Connection] = {}

    def admit(self, deadline: float) -> dict[int, Connection]:
        """Rank to connection of those who have come before the deadline, of the monotonic clock."""
        try:
            while len(self._peers) < self._size - 1 and clock.monotonic() < deadline:
                self._listener.turn(deadline)
        finally:
            self._listener.close()
        return self._peers

    def _begin(self) -> tuple[bytes, Hear]:
        own = challenge()
        return json.dumps({"challenge": own}).encode() + b"\n", partial(self._hear, own)

    def _hear(self, own: str, said: bytes) -> Callable[[socket.socket], None] | None:
        line, newline, rest = said.partition(b"\n")
        if rest:
            raise UnauthenticatedPeer("it says more than it is asked")
        return partial(self._let_in, *proved(self._key, own, line, self._size)) if newline else None

    def _let_in(self, rank: int, proof: bytes, session: str, connection: socket.socket) -> None:
        """The first who proves to be a rank is it."""
        peer = Connection(connection, session, side=COORDINATOR)
        connection.sendall(proof)
        if rank in self._peers:
            peer.close()
        else:
            self._peers[rank] = peer


def _value(line: Connection, timeout_s: float) -> dict[str, Any]:
    """What a node says for its value."""
    heard = line.hear(timeout_s)
    if not isinstance(heard, dict) or "value" not in heard:
        raise ConnectionError("it said nothing that a node of this version says")
    return heard


def _meet(rank: int, address: str, port: int, key: str) -> Connection | str:
    """The connection to the first node, or why there is none yet.

    Each of its addresses is tried: at one of them another may have taken the port.
    """
    why = ""
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"cannot be reached: {error}"
    for host in dict.fromkeys(str(place[0]) for *_, place in places):
        line = None
        try:
            line = Connection(socket.create_connection((host, port), timeout=HELLO_S))
            line.begin(key, rank, HELLO_S)
        except OSError as error:
            if line is not None:
                line.close()
            strange = isinstance(error, UnauthenticatedPeer)
            said = f"is answered by another: {error}" if strange else f"cannot be reached: {error}"
            why = said if strange or not why else why
        else:
            return line
    return why


@dataclass(frozen=True)
class Skew:
    """How far a node's clock is from the first node's.

    `offset_s` is positive where it is ahead, and wrong by `bound_s` at most.
    """

    offset_s: float
    bound_s: float


def _skew_of(line: Connection, time_here: Callable[[], float]) -> Skew | Exception:
    """A node's clock against this one's, by the quickest of its exchanges; or why there is none."""
    skews = []
    try:
        for _ in range(PINGS):
            began, mark = time_here(), clock.monotonic()
            line.send({"ask": "clock"})
            answer = float(line.hear(ANSWER_S))
            half = (clock.monotonic() - mark) / 2
            skews.append(Skew(round(answer - (began + half), 6), round(half, 6)))
    except (OSError, ValueError, TypeError) as error:
        return error
    return min(skews, key=lambda one: one.bound_s)
