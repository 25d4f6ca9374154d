"""The nodes come together over TCP: each tells what it has, the first decides, all hear it.

Not through the shared directory, which may be what is broken, and not through torch, whose version
may be. Lines of JSON, so that nothing that is received is run. Every call is bounded in time: a
node that says nothing is left out from then on and named.
tests/unit/test_preflight_meeting.py holds the promises.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import BufferedReader

    Decide = Callable[[dict[int, Any]], Any]

HELLO_S = 5.0
"""A stranger who connects and says nothing is sent away after so long."""
HELLO_BYTES = 4096
RETRY_S = 0.05
PINGS = 5
BACKLOG = 1024
TELL_S = 10.0
MARGIN_S = 5.0
"""How much longer than the first node the others wait for its word."""


class Alone(Exception):
    """The first node cannot be reached, or has gone."""


@dataclass(frozen=True)
class Skew:
    """How far a node's clock is from the first node's.

    Attributes:
        offset_s: Positive where it is ahead.
        bound_s: By so much the offset may be wrong: half of the exchange's time.
    """

    offset_s: float
    bound_s: float


class _Line:
    """One connection that speaks in lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader: BufferedReader = connection.makefile("rb")

    def tell(self, value: Any) -> None:
        self._connection.settimeout(TELL_S)
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def hear(self, timeout_s: float, limit: int = -1) -> Any:
        """The next line.

        Raises:
            OSError: none came in time, or the other end has gone; the line is of no use any more.
        """
        self._connection.settimeout(max(timeout_s, 0.001))
        line = self._reader.readline(limit)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other end has gone")
        try:
            return json.loads(line)
        except ValueError:
            raise ConnectionError("the other end does not speak JSON") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._reader.close()
            self._connection.close()


class Host:
    """The first node's end.

    Attributes:
        missing: Ranks that never came, or were not heard in time, to why.
    """

    def __init__(self, size: int, port: int, key: str, timeout_s: float) -> None:
        """Wait until every other node is there, at most so long.

        Raises:
            OSError: the port is taken.
        """
        self.missing: dict[int, str] = {}
        self._members: dict[int, _Line] = {}
        with socket.create_server(("", port), backlog=BACKLOG) as server:
            self._admit(server, size, key, time.monotonic() + timeout_s)
        for rank in range(1, size):
            if rank not in self._members:
                self.missing[rank] = f"did not connect in {timeout_s:g} s"

    def __enter__(self) -> Self:
        """Nothing more: the others are there."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let all go."""
        self.close()

    def _admit(self, server: socket.socket, size: int, key: str, deadline: float) -> None:
        while len(self._members) < size - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                line = _Line(server.accept()[0])
            except TimeoutError:
                return
            try:
                hello = line.hear(min(HELLO_S, max(left, 0.1)), HELLO_BYTES)
                rank = _rank(hello, key, size)
            except (OSError, ValueError, TypeError, KeyError):
                line.close()  # a port scanner, or another job's node
                continue
            self._members[rank] = line

    def skews(self, clock: Callable[[], float] = time.time) -> dict[int, Skew]:
        """Each other node's clock against this one's, by the midpoint of the quickest exchange."""
        found = {}
        for rank in list(self._members):
            samples = [self._ping(rank, clock) for _ in range(PINGS)]
            known = [sample for sample in samples if sample is not None]
            if known:
                found[rank] = min(known, key=lambda skew: skew.bound_s)
        return found

    def _ping(self, rank: int, clock: Callable[[], float]) -> Skew | None:
        line = self._members.get(rank)
        if line is None:
            return None
        began, mark = clock(), time.monotonic()
        answer = self._with(rank, lambda: self._asked(line, "clock"))
        if answer is None:
            return None
        took = time.monotonic() - mark
        return Skew(round(float(answer) - (began + took / 2), 6), round(took / 2, 6))

    @staticmethod
    def _asked(line: _Line, what: str) -> Any:
        line.tell({"ask": what})
        return line.hear(HELLO_S)

    def agree(self, mine: Any, decide: Decide, timeout_s: float) -> Any:
        """What `decide` makes of all nodes' values, which every node gets.

        Args:
            mine: This node's value.
            decide: Rank to value, without those who were silent, to the answer.
            timeout_s: How long the others have for theirs.
        """
        deadline = time.monotonic() + timeout_s
        values = {0: mine}
        for rank, line in list(self._members.items()):
            heard = self._with(rank, partial(line.hear, deadline - time.monotonic()))
            if heard is not None:
                values[rank] = heard["value"]
        answer = decide(values)
        for rank, line in list(self._members.items()):
            self._with(rank, partial(line.tell, {"answer": answer}))
        return answer

    def _with(self, rank: int, act: Callable[[], Any]) -> Any:
        """What `act` returns; a node with which it fails is left out from here on."""
        try:
            return act()
        except (OSError, ValueError) as error:
            self._members.pop(rank).close()
            silent = isinstance(error, TimeoutError)
            self.missing[rank] = "gave no answer in time" if silent else f"has gone: {error}"
            return None

    def close(self) -> None:
        """Let all go."""
        for line in self._members.values():
            line.close()


class Member:
    """Any other node's end."""

    def __init__(self, rank: int, address: str, port: int, key: str, timeout_s: float) -> None:
        """Connect to the first node, which may start later.

        Raises:
            Alone: it could not be reached in time; the text says why.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection = socket.create_connection((address, port), timeout=HELLO_S)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise Alone(f"{address} port {port} cannot be reached: {error}") from None
            time.sleep(RETRY_S)
        self._line = _Line(connection)
        self._line.tell({"key": key, "rank": rank})

    def __enter__(self) -> Self:
        """Nothing more: the first node is there."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self.close()

    def agree(self, mine: Any, decide: Decide, timeout_s: float) -> Any:
        """The first node's answer to everybody's values; see `Host.agree`.

        Raises:
            Alone: the first node has gone, or has done without this one.
        """
        del decide
        try:
            self._line.tell({"value": mine})
            while True:
                heard = self._line.hear(timeout_s + MARGIN_S)
                if "answer" in heard:
                    return heard["answer"]
        except OSError as error:
            raise Alone(f"the first node is not heard any more: {error}") from None

    def tell_time(self, clock: Callable[[], float] = time.time, *, count: int = PINGS) -> None:
        """Answer the first node's questions for the time.

        Raises:
            Alone: the first node has gone.
        """
        try:
            for _ in range(count):
                self._line.hear(HELLO_S * BACKLOG)  # it asks one node after the other
                self._line.tell(clock())
        except OSError as error:
            raise Alone(f"the first node is not heard any more: {error}") from None

    def close(self) -> None:
        """Leave."""
        self._line.close()


def _rank(hello: dict[str, Any], key: str, size: int) -> int:
    """Who it is.

    Raises:
        ValueError: none of ours.
    """
    rank = int(hello["rank"])
    if not hmac.compare_digest(str(hello["key"]), key) or not 0 < rank < size:
        raise ValueError("none of ours")
    return rank
