"""Stop signals of a rank, heard whatever its main thread is doing.

The signals are blocked in every thread, and one thread waits for them: so they are heard while the
main thread is inside a long C call (submitit's handler ran 21 s late there), and no Python code is
interrupted. A blocked mask is inherited over fork and exec: DataLoader workers, forked or spawned,
and a `scontrol` child live through SLURM's step-wide storm (submitit#1760, pytorch#154849).
tests/unit/runtime/test_signals.py holds the promises.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, ClassVar

from hpctrain.core.base import clock
from hpctrain.node.agent.signals import STOP_SIGNALS as HEARD
from hpctrain.node.agent.signals import start_resource_tracker

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class RankSignals:
    """Notes SIGTERM and SIGUSR2 for the life of this process, or until another one starts."""

    _listening: ClassVar[RankSignals | None] = None
    _waits_in_pid: ClassVar[int | None] = None
    """The process whose thread waits; a fork of it has the class as it was, and no such thread."""

    def __init__(self) -> None:
        self.term = False
        self.term_at: float | None = None
        """`time.time()` of the first SIGTERM."""
        self.warned = False
        self.interrupted = False
        self.heard = threading.Event()
        """Set with the first signal, for whoever wants to wait."""
        self.on_heard: Callable[[], None] | None = None
        """Called after each signal, on the thread that waits for them; must not raise."""

    def start(self, *, interrupt: bool = False) -> None:
        """Begin to listen. Call it on the main thread, before threads that could take the signals.

        Args:
            interrupt: Also take the first Ctrl-C as a wish to save and leave; the second
            interrupts.
        """
        RankSignals._listening = self
        for signum in HEARD:
            # For threads that are older than the mask: then Python's own handler runs.
            signal.signal(signum, self._on_signal)
        start_resource_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        if interrupt:
            signal.signal(signal.SIGINT, self._on_interrupt)
        if RankSignals._waits_in_pid != os.getpid():
            # Of two threads that wait, either would hear a signal, and the other not.
            RankSignals._waits_in_pid = os.getpid()
            threading.Thread(target=self._wait, name="hpctrain-signals", daemon=True).start()

    @property
    def is_replaced(self) -> bool:
        """Whether another one listens in the place of this."""
        return RankSignals._listening is not self

    @staticmethod
    def _wait() -> None:
        while True:
            signum = signal.sigwait(HEARD)
            listening = RankSignals._listening
            if listening is not None:
                listening.note(signum)
                if listening.on_heard is not None:
                    listening.on_heard()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.note(signum)

    def note(self, signum: int) -> None:
        """Take in a signal."""
        if signum == signal.SIGTERM:
            self.term_at = self.term_at or clock.now()
            self.term = True
        else:
            self.warned = True
        self.heard.set()

    def _on_interrupt(self, _signum: int, _frame: FrameType | None) -> None:
        self.interrupted = True
        self.heard.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
