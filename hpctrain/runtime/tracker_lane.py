"""One tracker behind a queue and a thread, so that nothing it does reaches the training loop.

tests/unit/test_trackers.py holds the promises.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.runtime.trackers import Tracker

MOST = 10_000
"""Logged steps that may wait for a tracker; what comes then is dropped, counted and told."""
EVERY_S = 1.0
"""Between two looks at the queue: woken for each step, the thread would take the GIL as often."""


class Lane:
    """Feeds one tracker.

    The tracker is made, called and closed in a thread of its own. One that raises is told once on
    stderr and gets nothing more; one that hangs fills its queue, and keeps `flush` and `close` no
    longer than they allow.
    """

    def __init__(
        self, name: str, start: Callable[[], Tracker], *, most: int = MOST, every_s: float = EVERY_S
    ) -> None:
        """Begin.

        Args:
            name: What the user calls the tracker, for messages.
            start: Makes the tracker; called in the thread, since it may wait for a network.
            most: Items that may wait.
            every_s: Longest time that an item waits for a tracker that is ready.
        """
        self.name = name
        self._start = start
        self._most = most
        self._every_s = every_s
        self._waiting: deque[tuple[int, Mapping[str, float], float]] = deque()
        self._dropped = 0
        self._condition = threading.Condition()
        self._asked = 0
        self._flushed = 0
        self._closing = False
        self._over = False
        self._thread = threading.Thread(
            target=self._work, name=f"hpctrain-tracker-{name}", daemon=True
        )
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float], t: float) -> None:
        """Hand over scalars of a step; never waits."""
        if self._over:
            return
        if len(self._waiting) >= self._most:
            if not self._dropped:
                self._tell("it is too slow or hangs; steps are left out of it")
            self._dropped += 1
            return
        self._waiting.append((step, values, t))

    def flush(self, limit_s: float) -> bool:
        """Wait until all that was put is with the tracker and flushed; whether that is so."""
        with self._condition:
            self._asked += 1
            ticket = self._asked
            self._condition.notify_all()
            return self._condition.wait_for(
                lambda: self._flushed >= ticket or self._over, timeout=limit_s
            )

    def begin_close(self) -> None:
        """Let the tracker end; `wait_closed` waits for it."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()

    def wait_closed(self, limit_s: float) -> bool:
        """Whether the tracker has ended, after this time at most."""
        with self._condition:
            over = self._condition.wait_for(lambda: self._over, timeout=limit_s)
        if not over:
            self._tell(f"it was given up: {len(self._waiting)} steps and its end were under way")
        if self._dropped:
            self._tell(f"it was too slow for {self._dropped} steps, which it lacks")
        return over

    def _work(self) -> None:
        try:
            tracker = self._start()
            while not self._round(tracker):
                pass
            tracker.close()
        except Exception as error:  # noqa: BLE001 - a tracker's bug costs its curves, not the run
            text = " ".join(str(error).split())
            self._tell(f"{type(error).__name__}: {text}; the run goes on without it")
        finally:
            with self._condition:
                self._over = True
                self._waiting.clear()
                self._condition.notify_all()

    def _round(self, tracker: Tracker) -> bool:
        """Hand over what waits; whether that was the last time."""
        with self._condition:
            if self._asked == self._flushed and not self._closing:
                self._condition.wait(self._every_s)
            ticket, last = self._asked, self._closing
        moved = False
        while self._waiting:
            tracker.log(*self._waiting.popleft())
            moved = True
        if moved or ticket > self._flushed:
            tracker.flush()
        with self._condition:
            self._flushed = ticket
            self._condition.notify_all()
        return last

    def _tell(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        print(f"hpctrain: {stamp} tracker {self.name}: {text}", file=sys.stderr, flush=True)
