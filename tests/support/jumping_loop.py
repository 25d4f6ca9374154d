"""An event loop whose time is a `ManualClock`, and which jumps when everything in it waits.

What a coroutine sleeps, a timer's moment and `clock.monotonic()` are of one clock. Once no callback
is ready and no socket has anything to read, the loop moves that clock to its next timer. Work on
other threads (`run_in_executor`) is waited for in real time, and so is what has no time limit.

looptime (of PyPI) has a clock of its own for the loop alone, and code that compares the loop's
timers with `clock.monotonic()` would see two times; so this is our own.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.core.base import clock
from tests.support.clocks import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

IN_FLIGHT_S = 0.0005
"""Real seconds: what was sent to a socket of this machine arrives within a few of these."""


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the clock where another one would wait."""

    def __init__(self, hands: ManualClock) -> None:
        super().__init__()
        self.elsewhere = 0
        self._hands = hands

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(IN_FLIGHT_S)
        if not ready and not self.elsewhere:
            self._hands.advance_to_next(timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self, hands: ManualClock) -> None:
        """Make a loop whose time is that of a clock.

        Args:
            hands: Nobody else should wait by it: the loop moves it.
        """
        self._hands = hands
        self._jumping = _JumpingSelector(hands)
        super().__init__(self._jumping)
        self._clock_resolution = 1e-6  # of numbers near 1e9: else a timer that is due never is

    def time(self) -> float:
        return self._hands.monotonic()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        self._jumping.elsewhere += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._is_back)
        return future

    def _is_back(self, _: object) -> None:
        self._jumping.elsewhere -= 1


def run_jumping(main: Coroutine[Any, Any, T], hands: ManualClock | None = None) -> T:
    """As `asyncio.run`, in time that jumps; the process's clock is the loop's meanwhile."""
    hands = hands or ManualClock()
    with (
        clock.use(hands),
        asyncio.Runner(loop_factory=lambda: JumpingLoop(hands)) as runner,
    ):
        return runner.run(main)
