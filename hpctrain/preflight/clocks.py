"""How far the clocks of a job's nodes are apart: the first node asks, a few at a time.

One after the other, each silent node would keep all that come after it waiting. All at once, their
answers would wait for each other at the first node, and every exchange would seem slow.
tests/unit/preflight/test_rendezvous.py holds the promises.
"""

from __future__ import annotations

import selectors
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from hpctrain.base import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PINGS = 5
ASKED_AT_ONCE = 16
ANSWER_S = 5.0


class SignedLine(Protocol):
    """What is needed of a connection; see `rendezvous.Connection`."""

    def fileno(self) -> int:
        """For a selector."""
        ...

    def tell(self, value: Any) -> None:
        """Say something."""
        ...

    def hear(self, timeout_s: float) -> Any:
        """What the other end says next."""
        ...


@dataclass(frozen=True)
class Skew:
    """How far a node's clock is from the first node's.

    Attributes:
        offset_s: Positive where it is ahead.
        bound_s: By so much the offset may be wrong: half of the exchange's time.
    """

    offset_s: float
    bound_s: float


@dataclass(frozen=True)
class _Ping:
    """A question that is not answered yet.

    Attributes:
        began: By the clock that is compared.
        mark: The same moment on the monotonic clock.
        left: How many questions follow this one.
    """

    began: float
    mark: float
    left: int


def ask_clocks(
    peers: Mapping[int, SignedLine],
    clock: Callable[[], float],
    leave_out: Callable[[int, Exception], None],
) -> dict[int, Skew]:
    """Each node's clock against this one's, by the midpoint of the quickest of its exchanges.

    Args:
        peers: Rank to connection.
        clock: This node's, in seconds.
        leave_out: Told of a node that has gone or gives no answer, with the error; closes it.
    """
    with _Asking(peers, clock, leave_out) as asking:
        return asking.all()


class _Asking:
    """Who is asked now, and what the others have said."""

    def __init__(
        self,
        peers: Mapping[int, SignedLine],
        clock: Callable[[], float],
        leave_out: Callable[[int, Exception], None],
    ) -> None:
        self._peers = peers
        self._clock = clock
        self._leave_out = leave_out
        self._selector = selectors.DefaultSelector()
        self._asked: dict[int, _Ping] = {}
        self._skews: dict[int, Skew] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def all(self) -> dict[int, Skew]:
        waiting = list(self._peers)[::-1]
        while waiting or self._asked:
            while waiting and len(self._asked) < ASKED_AT_ONCE:
                rank = waiting.pop()
                self._selector.register(self._peers[rank], selectors.EVENT_READ, rank)
                self._ask(rank, PINGS - 1)
            oldest = min((ping.mark for ping in self._asked.values()), default=0.0)
            for key, _ in self._selector.select(max(oldest + ANSWER_S - clock.monotonic(), 0.0)):
                self._hear(key.data)
            self._give_up()
        return self._skews

    def _ask(self, rank: int, left: int) -> None:
        self._asked[rank] = _Ping(self._clock(), clock.monotonic(), left)
        try:
            self._peers[rank].tell({"ask": "clock"})
        except OSError as error:
            self._finish(rank, error)

    def _hear(self, rank: int) -> None:
        ping = self._asked[rank]
        try:
            answer = float(self._peers[rank].hear(ANSWER_S))
        except (OSError, ValueError, TypeError) as error:
            self._finish(rank, error)
            return
        half = (clock.monotonic() - ping.mark) / 2
        skew = Skew(round(answer - (ping.began + half), 6), round(half, 6))
        self._skews[rank] = min(self._skews.get(rank, skew), skew, key=lambda one: one.bound_s)
        if ping.left:
            self._ask(rank, ping.left - 1)
        else:
            self._finish(rank)

    def _give_up(self) -> None:
        now = clock.monotonic()
        for rank in [rank for rank, ping in self._asked.items() if now >= ping.mark + ANSWER_S]:
            self._finish(rank, TimeoutError())

    def _finish(self, rank: int, error: Exception | None = None) -> None:
        self._selector.unregister(self._peers[rank])
        del self._asked[rank]
        if error is not None:
            self._leave_out(rank, error)
