"""What time it is, and how to wait: the only module of hpctrain that asks the system.

Code calls `clock.now()`, `clock.monotonic()`, `clock.sleep(2.0)` and `clock.wait(event, 2.0)`. A
test gives another clock with `clock.use(...)`; `tests/support/clocks.py` has one that a test moves.
`time.perf_counter` and `time.process_time` only measure, so they stay. Event loops have the time of
their loop. docs/development/contributing.md says how to write code that takes a clock.

The clock of the system holds no lock and no state, so signal handlers and forked children may use
it. Importing this module costs nothing but `time`.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Waitable(Protocol):
    """What can be waited for with a limit: an event or a condition of `threading`."""

    def wait(self, timeout: float, /) -> bool:
        """Return True once it happened, False when the time was over."""


class SystemClock:
    """The clock of the machine; a test's own has the same functions."""

    now = staticmethod(time.time)
    now_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def boottime() -> float:
        """Return seconds on a clock that never jumps and continues while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @staticmethod
    def wait(event: Waitable, timeout_s: float) -> bool:
        """Wait for an event; return whether it happened before the time was over."""
        return event.wait(timeout_s)


_current = SystemClock()


@contextlib.contextmanager
def use(other: SystemClock) -> Iterator[None]:
    """Give the whole process another clock, for tests.

    All threads have it. A child that is forked meanwhile has a copy of it, which nobody moves.
    """
    global _current  # noqa: PLW0603 - it is the process's clock
    before, _current = _current, other
    try:
        yield
    finally:
        _current = before


def now() -> float:
    """Return seconds since the epoch. The value may jump."""
    return _current.now()


def now_ns() -> int:
    """Return nanoseconds since the epoch. The value may jump."""
    return _current.now_ns()


def monotonic() -> float:
    """Return seconds on a clock that never jumps."""
    return _current.monotonic()


def monotonic_ns() -> int:
    """Return nanoseconds on a clock that never jumps."""
    return _current.monotonic_ns()


def boottime() -> float:
    """Return seconds on a clock that never jumps and continues while the machine sleeps."""
    return _current.boottime()


def sleep(seconds: float) -> None:
    """Return after so many seconds."""
    _current.sleep(seconds)


def wait(event: Waitable, timeout_s: float) -> bool:
    """Wait for an event; return whether it happened before the time was over."""
    return _current.wait(event, timeout_s)
