"""The nodes come together over TCP: each tells what it has, the first decides, all hear it.

Not through the shared directory, which may be what is broken, and not through torch, whose version
may be. Nobody but the job's own nodes is heard (`connection.py`). Every call is bounded in time: a
node that says nothing is left out from then on and named.
tests/unit/test_preflight_meeting.py holds the promises.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from hpctrain.preflight.acceptor import HELLO_S, Acceptor
from hpctrain.preflight.connection import Connection, Stranger, listen

if TYPE_CHECKING:
    from collections.abc import Callable

    Decide = Callable[[dict[int, Any]], Any]

RETRY_S = 0.05
PINGS = 5
BACKLOG = 1024
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


class Host:
    """The first node's end.

    Attributes:
        missing: Ranks that never came, or were not heard in time, to why.
    """

    def __init__(
        self, size: int, port: int, key: str, timeout_s: float, *, address: str = ""
    ) -> None:
        """Wait until every other node is there, at most so long.

        Args:
            size: Number of nodes.
            port: Where they meet.
            key: The job's secret, which every node proves to know.
            timeout_s: So long.
            address: Of this node, as the others reach it.

        Raises:
            OSError: the port is taken.
        """
        self.missing: dict[int, str] = {}
        with listen(address, port, BACKLOG) as server:
            self._members = Acceptor(server, size, key).admit(time.monotonic() + timeout_s)
        for rank in range(1, size):
            if rank not in self._members:
                self.missing[rank] = f"did not connect in {timeout_s:g} s"

    def __enter__(self) -> Self:
        """Nothing more: the others are there."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let all go."""
        self.close()

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
        return Skew(round(answer - (began + took / 2), 6), round(took / 2, 6))

    @staticmethod
    def _asked(line: Connection, what: str) -> float:
        line.tell({"ask": what})
        return float(line.hear(HELLO_S))

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
            heard = self._with(rank, partial(_value, line, deadline - time.monotonic()))
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
        except (OSError, ValueError, TypeError) as error:
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
            found = _meet(rank, address, port, key)
            if isinstance(found, Connection):
                self._line = found
                return
            if time.monotonic() > deadline:
                raise Alone(f"{address} port {port} {found}")
            time.sleep(RETRY_S)

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
                if isinstance(heard, dict) and "answer" in heard:
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


def _value(line: Connection, timeout_s: float) -> dict[str, Any]:
    """What a node says for its value.

    Raises:
        OSError: nothing came in time, or nothing that a node says.
    """
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
            strange = isinstance(error, Stranger)
            said = f"is answered by another: {error}" if strange else f"cannot be reached: {error}"
            why = said if strange or not why else why
        else:
            return line
    return why
