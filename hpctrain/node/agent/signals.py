"""Signals of an agent, noted from before the first heavy import on, and the end of orphans.

Standard library only, for that reason. The batch body starts the task with SIGUSR2 and SIGTERM
ignored, and `install` turns that into "note it" within the first milliseconds of Python. A handler
only notes; the agent's loop acts. tests/slurm/test_early_signals.py holds the promises.

What ranks leave behind ends with their attempt (`Orphans`). Where SLURM has no cgroups it follows
parents (proctrack/linuxproc) and so loses the children of a rank that has ended; and between two
attempts inside one job nobody would look for them at all. tests/unit/agent/test_orphans.py holds
the promises.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.process import below, processes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
SHIELDED = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 2.0
"""A process in the kernel's hands (a hung file system) does not die; the requeue must not wait."""
POLL_S = 0.01


@dataclass(frozen=True)
class Arrival:
    """One signal that arrived."""

    signum: int
    at_monotonic_s: float


_arrivals: list[Arrival] = []


def _note(signum: int, _frame: FrameType | None) -> None:
    _arrivals.append(Arrival(signum, clock.monotonic()))


def install() -> None:
    """Note stop signals from now on, and survive the others.

    Main thread only; harmless when repeated. They are unblocked, since the parent may have had them
    blocked, as `hpctrain.init()` has: a stop would never be noticed then.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, _note)
    for signum in set(SHIELDED) - set(STOP_SIGNALS):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is called meanwhile, these signals stay as they are, and wait until it is over.

    torch takes SIGTERM, SIGINT and SIGHUP for itself as it starts ranks (from 2.9 on it can be set
    not to), and ends the agent at the first: before any rank has saved. Processes that start
    meanwhile are born with the signals blocked, and unblock them when they are out of danger.
    """
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    handlers = {signum: signal.getsignal(signum) for signum in (*SHIELDED, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)


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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)


def note_term() -> None:
    """Note SIGTERM, and nothing that an agent noted before it forked this process."""
    _arrivals.clear()
    signal.signal(signal.SIGTERM, _note)


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


class Orphans:
    """The processes below this one that ranks have started, also when their parents are gone."""

    def __init__(self) -> None:
        """Adopt from now on; what runs below this process by now is its own and stays."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._ours = _descendants()

    def end(self, spare: Collection[int] = ()) -> None:
        """Kill all and wait until they are gone, after the ranks; keep `spare` and those below."""
        deadline = clock.monotonic() + PATIENCE_S
        while left := _descendants(spare) - self._ours:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if clock.monotonic() > deadline:
                return
            clock.sleep(POLL_S)


def _descendants(spare: Collection[int] = ()) -> set[int]:
    """All live processes below this one; not zombies, nor those to spare with what is below."""
    live = {pid: int(stat[1]) for pid, stat in processes().items() if stat[0] not in "ZX"}
    return below(os.getpid(), live, spare)
