"""What ends a test that nothing else can end, so that CI never waits for it until its own limit.

pytest-timeout raises in the test once. A test that waits in C does not see that; where its teardown
waits in vain, nobody is left to raise, since a failed test's clock is stopped. Here the kernel
sends SIGABRT: pytest prints all stacks, the worker's process ends, xdist reports the test as
crashed and goes on. By a timer of the kernel, which forked ranks do not inherit: faulthandler's is
a thread, and a rank that sets it again would wait for ever for its parent's.
tests/unit/support/test_last_resort.py holds the promises.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from pytest_timeout import _get_item_settings  # there is no other way to its settings

if TYPE_CHECKING:
    from collections.abc import Generator

NAME = "hpctrain-last-resort"
LIMITS = 2.0
"""So many of its own time limits a test may take: it may wait for CPUs while its clock stands."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Event(ctypes.Structure):
    """C's `struct sigevent`: which signal to send."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),  # 0: SIGEV_SIGNAL
        ("reserved", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """C's `struct itimerspec`: an interval and the first time, each in s and ns."""

    _fields_ = (("again", ctypes.c_long * 2), ("first", ctypes.c_long * 2))


class KernelTimer:
    """Sends this process, and none that it forks, a signal."""

    def __init__(self, signum: int) -> None:
        """Make it; it does nothing before `start`."""
        self._id = ctypes.c_void_p()
        event = _Event(signo=signum)
        made = _LIBC.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id))
        self._check(made)

    def start(self, seconds: float) -> None:
        """Send it in so many seconds, instead of what was said before; 0: never."""
        times = _Times(first=(int(seconds), int(seconds % 1 * 1e9)))
        self._check(_LIBC.timer_settime(self._id, 0, ctypes.byref(times), None))

    @staticmethod
    def _check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class LastResort:
    """The plugin, for one process that runs tests."""

    def __init__(self) -> None:
        """Make its timer."""
        self._timer = KernelTimer(signal.SIGABRT)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count from before a test's fixtures until behind them, whatever fails in between."""
        self._timer.start(LIMITS * (_get_item_settings(item).timeout or 0))
        try:
            return (yield)
        finally:
            self._timer.start(0)
