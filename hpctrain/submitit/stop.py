"""When the call of a rank must stop, and how its main thread hears of it.

submitit checkpoints in the handler of SIGUSR2, on rank 0, while the other ranks go on; it bypasses
SIGTERM, and takes any signal in a job of ten minutes or less for a time limit. Here a thread
listens from before the call is unpickled. Rank 0's decides for all, by what hpctrain's own ranks go
by: the signals, the scheduler's word on what they mean, `cancel --save` and the job's end. What it
decides is a file, which the others' threads look for. Only then the main thread is interrupted.
tests/unit/submitit/test_stop.py and tests/slurm/test_submitit.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING

from hpctrain.base import clock
from hpctrain.base.files import replace_text
from hpctrain.base.records import StopCause
from hpctrain.run.fence import left_text
from hpctrain.runtime.agreement import CODES
from hpctrain.runtime.signals import RankSignals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from hpctrain.runtime.requests import Rank0Requests

log = logging.getLogger("hpctrain.submitit")

INTERRUPT = signal.SIGRTMIN + 5
"""No library takes it, and a sleeping or waiting main thread wakes up of it."""
POLL_S, IDLE_POLL_S = 0.25, 1.0
"""Between two looks for a stop: of rank 0 and of who has heard a signal; of the others."""
AGAIN_S = 3.0
"""A main thread that swallowed what it was told is told again."""
TIME_CAUSES = frozenset({StopCause.WARNING, StopCause.CLOCK})


class StopWatch:
    """Tells the main thread once that it must stop.

    Attributes:
        cause: Why, once it must.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        requests: Rank0Requests | None,
        due: Callable[[], float | None],
    ) -> None:
        """Make one; `start` begins to watch.

        Args:
            path: The file by which all ranks of the attempt hear of a stop.
            rank: This rank's number.
            requests: Rank 0's, whose word counts; None on other ranks.
            due: When to stop because of the job's end, seconds since the epoch; None for never.
        """
        self.cause: StopCause | None = None
        self._path = path
        self._rank = rank
        self._requests = requests
        self._due = due
        self._signals = RankSignals()
        self._act: Callable[[], None] | None = None
        self._acting = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Listen from now on. Call it on the main thread."""
        signal.signal(INTERRUPT, self._on_interrupt)
        self._signals.start()
        if self._requests is not None:
            self._requests.start()
        threading.Thread(target=self._watch, name="hpctrain-submitit", daemon=True).start()

    def call(self, act: Callable[[], None]) -> None:
        """What the main thread does at a stop: from now on, between two of its bytecodes.

        Args:
            act: Ends the call by raising.
        """
        self._act = act
        if self.cause is not None:  # it came while the call was being unpickled
            act()

    def stop_acting(self) -> None:
        """The call is over: a stop no longer interrupts the main thread, which looks at `cause`."""
        self._act = None

    def _on_interrupt(self, _signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._act is None or self._acting:
            return  # in a child that was forked, or told again while it saves
        self._acting = True
        try:
            self._act()
        finally:
            self._acting = False

    def _watch(self) -> None:
        while self.cause is None:
            if self._signals.is_replaced:
                return  # the call uses hpctrain.init(), whose run stops by itself
            cause = self._look()
            if cause is not None:
                self.cause = cause
                break
            lively = self._rank == 0 or self._signals.heard.is_set()
            clock.sleep(POLL_S if lively else IDLE_POLL_S)
        main = threading.main_thread()
        while main.is_alive():
            signal.pthread_kill(main.ident or 0, INTERRUPT)
            clock.sleep(AGAIN_S)

    def _look(self) -> StopCause | None:
        if self._requests is None:
            return read_stop(self._path)
        if self._signals.warned:
            self._signals.warned = False
            self._requests.warn()
        cause = CODES[self._requests.stop]
        if cause is None and self._signals.term:
            cause = StopCause.TERM
        due = self._due()
        if cause is None and due is not None and clock.now() >= due:
            cause = StopCause.CLOCK
        if cause is not None:
            replace_text(self._path, json.dumps({"cause": cause.value}))
        return cause


def read_stop(path: Path) -> StopCause | None:
    """What rank 0 has decided; None so far."""
    with contextlib.suppress(ValueError, OSError, KeyError):
        return StopCause(json.loads(left_text(path))["cause"])
    return None
