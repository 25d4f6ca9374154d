"""A DataLoader's worker that died, where torch tells of a broken connection instead.

The kernel closes the files of a process that is killed, and tells its parent after that. Where a
batch's memory is asked for in between, torch's loader finds the connection refused and the worker
alive, and raises what the connection said: as if a peer had gone away, which is nobody's cause. On
a busy machine that time is long. And the parent's word, SIGCHLD, has torch raise in the middle of
whatever runs: of the report of the failure, too, which was lost then.

tests/engines/test_worker_deaths.py holds the promises.
"""

from __future__ import annotations

import signal
from multiprocessing.connection import wait
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

DEATH_S = 2.0
"""So long after its connection broke it is waited for a worker's death to be known."""
_LOADER, _FETCH = ("torch", "utils", "data", "dataloader.py"), "_try_get_data"


def silence() -> None:
    """Have no worker's death raise an error from now on: one failure is being told."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def cause_behind(error: BaseException) -> BaseException:
    """Return a worker's death in torch's words if it broke a loader's connection, else `error`."""
    if not isinstance(error, OSError | EOFError):
        return error
    workers = _workers_of(error.__traceback__)
    _wait_for_a_death(workers)
    for worker in workers:
        if worker.exitcode:
            death = RuntimeError(_in_torchs_words(worker.pid, worker.exitcode))
            death.__cause__ = error
            return death.with_traceback(error.__traceback__)
    return error


def _workers_of(trace: TracebackType | None) -> list[Any]:
    """The processes of the loader that raised this; none where no loader did."""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == _FETCH and PurePath(code.co_filename).parts[-4:] == _LOADER:
            loader = trace.tb_frame.f_locals.get("self")
            return list(getattr(loader, "_workers", ()))  # torch does not promise the name
        trace = trace.tb_next
    return []


def _wait_for_a_death(workers: Sequence[Any]) -> None:
    """Until it is known of one of them, or for `DEATH_S`."""
    if any(worker.exitcode is not None for worker in workers):
        return
    gone = wait([worker.sentinel for worker in workers], DEATH_S) if workers else []
    for worker in workers:
        if worker.sentinel in gone:
            worker.join()  # its pipe is closed, as the rest of its files: its end follows


def _in_torchs_words(pid: int, code: int) -> str:
    if code > 0:
        return f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}"
    name = signal.strsignal(-code) or f"signal {-code}"
    return f"DataLoader worker (pid {pid}) is killed by signal: {name}."
