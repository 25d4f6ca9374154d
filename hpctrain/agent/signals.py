"""Signals that an agent has received, noted from before the first heavy import on.

Standard library only, for that reason. SLURM's step signals reach every process of the step, and
the default action of SIGUSR2 and SIGTERM kills (submitit#1760, pytorch#154849). So the batch body
starts the task with both ignored, and `install` turns that into "note it" within the first
milliseconds of Python. A handler only notes; the agent's loop acts.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
SHIELDED = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Arrival:
    """One signal that arrived."""

    signum: int
    at_monotonic_s: float


_arrivals: list[Arrival] = []


def _note(signum: int, _frame: FrameType | None) -> None:
    _arrivals.append(Arrival(signum, time.monotonic()))


def install() -> None:
    """Note stop signals from now on, and survive the others.

    Main thread only; harmless when repeated.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, _note)
    for signum in set(SHIELDED) - set(STOP_SIGNALS):
        signal.signal(signum, signal.SIG_IGN)


def arrivals() -> tuple[Arrival, ...]:
    """All signals noted so far, oldest first."""
    return tuple(_arrivals)


def ignore_all() -> None:
    """Ignore every stop signal, in this process and in all that it starts.

    A rank begins like this: a script that knows nothing of hpctrain lives through SLURM's storm,
    and so do its DataLoader workers; one that installs its own handlers gets the signals.
    """
    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)


def start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker, if there is none, out of the storm's reach.

    As it starts it unblocks SIGTERM in the thread that asked for it (CPython 3.11). Left to the
    first spawned DataLoader worker, that worker would be born without the mask, and die of the
    storm before the save.
    """
    from multiprocessing import resource_tracker

    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
