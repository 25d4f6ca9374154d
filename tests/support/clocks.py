"""A clock that a test moves, for `hpctrain.core.base.clock.use`.

    with jumping() as hands: ...   # whoever sleeps moves the time

With `jumps=0` a thread that sleeps or waits is held until the test calls `advance`; the test waits
with `until_waiting` until it is. With `jumps=N` there are N threads that sleep or wait by this
clock; as soon as all of them do, the time jumps to the first moment at which something is due. So
one thread alone (`jumps=1`) never waits. `after` makes something happen at a moment.

Threads that ran before the clock was made have no part in it: what an earlier test of the process
has left running sleeps by the machine's clock, and moves nobody's time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpctrain.core.base.clock import Waitable

WALL_S = 1_800_000_000
"""What a new clock shows: a moment in 2027."""
MONOTONIC_S = 1_000
SLEPT_S = 500.0
"""So long the machine has slept: who compares boottime with monotonic sees that they differ."""
LOOK_S = 0.002
"""A waiter looks so often whether its event was set: by the real clock, for nobody tells us."""
PATIENCE_S = 60.0
"""A thread that a test expects to wait does so within this, on any machine."""
NS = 1_000_000_000
THE_MACHINES = clock.SystemClock()


class NothingIsDueError(AssertionError):
    """All threads wait without end: nothing could ever happen again."""


@dataclass(eq=False)
class _Waiter:
    """A thread that sleeps, or waits for an event."""

    until_ns: float
    event: Waitable | None

    def is_called(self) -> bool:
        """Return whether its event is set. A condition is never seen set."""
        is_set = getattr(self.event, "is_set", None)
        return is_set is not None and is_set()


class ManualClock:
    """Time that stands still until somebody moves it.

    Attributes:
        slept: Each sleep, and each wait's time limit, in their order.
        on_sleep: Called as each of them begins: what happens meanwhile.
    """

    def __init__(self, *, wall_s: float = WALL_S, jumps: int = 0) -> None:
        """Make a clock that stands.

        Args:
            wall_s: Seconds since the epoch that it shows.
            jumps: The number of threads that take part in jumps; 0: only `advance` moves the time.
        """
        self.slept: list[float] = []
        self.on_sleep: Callable[[float], object] = lambda _seconds: None
        self._wall_ns = round(wall_s * NS)
        self._passed_ns = 0
        self._jumps = jumps
        self._changed = threading.Condition()
        self._waiting: list[_Waiter] = []
        self._plans: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._is_other = other_threads()

    # ---- as code sees it; no locks: signal handlers and plans may ask

    def now(self) -> float:
        return self.now_ns() / NS

    def now_ns(self) -> int:
        return self._wall_ns + self._passed_ns

    def monotonic(self) -> float:
        return self.monotonic_ns() / NS

    def monotonic_ns(self) -> int:
        return MONOTONIC_S * NS + self._passed_ns

    def boottime(self) -> float:
        return self.monotonic() + SLEPT_S

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")  # as the system's
        if self._is_other():
            THE_MACHINES.sleep(seconds)
            return
        self._block(seconds, None)

    def wait(self, event: Waitable, timeout_s: float) -> bool:
        if self._is_other():
            return THE_MACHINES.wait(event, timeout_s)
        return self._block(timeout_s, event)

    # ---- as a test sees it

    @property
    def passed_s(self) -> float:
        """Seconds since the clock was made."""
        return self._passed_ns / NS

    def advance(self, seconds: float) -> None:
        """Move the time; who sleeps to a moment before it goes on, and plans are carried out."""
        with self._changed:
            self._move_to(self._passed_ns + _ns(seconds))

    def advance_to_next(self, most_s: float) -> None:
        """Move the time to the next plan, and no further than so many seconds."""
        with self._changed:
            moment_ns = self._passed_ns + _ns(most_s)
            if self._plans:
                moment_ns = min(moment_ns, self._plans[0][0])
            self._move_to(moment_ns)

    def move_to(self, wall_s: float) -> None:
        """Move the time until the wall clock shows so much."""
        self.advance(wall_s - self.now())

    def set_wall(self, wall_s: float) -> None:
        """Set the wall clock, as an administrator does; the monotonic one goes on."""
        self._wall_ns = round(wall_s * NS) - self._passed_ns

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call something in so many seconds, on the thread that moves the time."""
        with self._changed:
            due = self._passed_ns + _ns(seconds)
            heapq.heappush(self._plans, (int(due), next(self._numbers), call))

    def until_waiting(self, threads: int = 1) -> None:
        """Return when so many threads sleep or wait for what has yet to come."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held() >= threads, PATIENCE_S)

    # ---- inside

    def _block(self, seconds: float, event: Waitable | None) -> bool:
        self.slept.append(seconds)
        self.on_sleep(seconds)
        if event is not None and event.wait(0):
            return True
        with self._changed:
            waiter = _Waiter(self._passed_ns + _ns(seconds), event)
            self._waiting.append(waiter)
            self._changed.notify_all()
        try:
            return self._await(waiter)
        finally:
            with self._changed:
                self._waiting.remove(waiter)

    def _await(self, waiter: _Waiter) -> bool:
        """Return whether its event happened before its moment."""
        while True:
            with self._changed:
                if waiter.is_called():
                    return True
                if self._passed_ns >= waiter.until_ns:
                    return False
                if self._may_jump():
                    carried_out = self._move_to(self._next_ns())
                    # A condition that a plan notified: nobody was in its wait to hear it.
                    if carried_out and waiter.event and not hasattr(waiter.event, "is_set"):
                        return True
                    continue
                if waiter.event is None:
                    self._changed.wait()
                    continue
            if waiter.event.wait(LOOK_S):
                return True

    def _may_jump(self) -> bool:
        if not self._jumps or len(self._waiting) < self._jumps:
            return False
        return self._held() == len(self._waiting)

    def _held(self) -> int:
        """Return how many wait for a moment or an event that has yet to come."""
        return sum(
            waiter.until_ns > self._passed_ns and not waiter.is_called() for waiter in self._waiting
        )

    def _next_ns(self) -> float:
        moments = [waiter.until_ns for waiter in self._waiting]
        if self._plans:
            moments.append(self._plans[0][0])
        return min(moments)

    def _move_to(self, moment_ns: float) -> bool:
        """Move the time, carry out what is due by then; return whether anything was."""
        if math.isinf(moment_ns):
            raise NothingIsDueError
        carried_out = False
        while self._plans and self._plans[0][0] <= moment_ns:
            due, _, call = heapq.heappop(self._plans)
            self._passed_ns = max(self._passed_ns, due)
            call()
            carried_out = True
        self._passed_ns = max(self._passed_ns, int(moment_ns))
        self._changed.notify_all()
        return carried_out


def other_threads() -> Callable[[], bool]:
    """Return a function that says whether its caller is a thread that ran before, another one."""
    others = set(threading.enumerate()) - {threading.current_thread()}
    return lambda: threading.current_thread() in others


@contextmanager
def jumping(threads: int = 1, *, wall_s: float = WALL_S) -> Iterator[ManualClock]:
    """Give the process a clock that jumps when so many threads wait by it."""
    hands = ManualClock(wall_s=wall_s, jumps=threads)
    with clock.use(hands):
        yield hands


def _ns(seconds: float) -> float:
    """Nanoseconds, at least one of any pause: else a loop to a deadline could stand still."""
    return math.ceil(seconds * NS) if math.isfinite(seconds) else seconds
