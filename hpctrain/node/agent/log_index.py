"""An index of when the ranks of this node wrote their logs, for `hpctrain logs`.

It runs in a thread of its own and makes system calls only: a file system that stalls must keep
neither the agent's watch nor a fork waiting. What cannot be written is left out.
tests/unit/agent/test_log_index.py holds the promises.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Self

from hpctrain.core.base import clock
from hpctrain.core.base.process import join_before_fork
from hpctrain.ledger.run.attempt_files import LogMark, mark_line, times_path
from hpctrain.node.agent.rounds import RoundPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

LOOK_S = 2.0
LOOKS_PER_S = 500
"""By all nodes together: each may be a question to the file system's one server of names."""
MARK_S = 60.0
"""Between two marks of a log that grows: at most 2 MB of marks a rank in 30 days."""
BURST_S, BURST_BYTES = 5.0, 1 << 16
"""A log that grows fast is marked more often; its marks are a small part of it."""
NAMED = 4
"""The last names of a log's path: run, "attempts", attempt, log. What is above may be a link."""
PATIENCE_S = 1.0
"""So long may the last look take; the next attempt does not wait for a file system that hangs."""


class LogIndexer(RoundPart):
    """Looks at the logs of one node's ranks while they run: `with LogIndexer(logs): ...`."""

    def __init__(
        self,
        logs: Sequence[Path],
        now: Callable[[], float] = clock.now,
        *,
        in_all: int = 1,
        pids: Sequence[int | None] = (),
    ) -> None:
        """Index these logs, one for each rank; the run has `in_all`, and `pids` their order."""
        self.every_s = max(LOOK_S, in_all / LOOKS_PER_S)
        ranks = [*pids, *[None] * (len(logs) - len(pids))]
        self._indexes = [_LogIndex(log, pid) for log, pid in zip(logs, ranks, strict=True)]
        self._now = now
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-index", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        join_before_fork(self._thread, PATIENCE_S)

    def look(self, *, last: bool = False) -> None:
        """Mark the logs that have grown enough; with `last` all that have grown at all."""
        for index in self._indexes:
            try:
                index.look(self._now(), last=last)
            except OSError:
                continue  # no output so far, or no room: the lines' times are then not known

    def _run(self) -> None:
        while not clock.wait(self._over, self.every_s):
            self.look()
        self.look(last=True)


class _LogIndex:
    """Marks of one log."""

    def __init__(self, log: Path, pid: int | None = None) -> None:
        self._log = log
        self._pid = pid
        self._marked = LogMark(0.0, 0)
        self._seen = LogMark(0.0, 0)

    def look(self, now: float, *, last: bool) -> None:
        """Write a mark if one is due; OSError if there is no log or the mark was not written."""
        size = _written(self._log, self._pid)
        before, self._seen = self._seen, LogMark(now, size)
        new, passed = size - self._marked.size, now - self._marked.t
        if new <= 0:
            return
        due = passed >= MARK_S or passed < 0 or (passed >= BURST_S and new >= BURST_BYTES)
        if not due and not last:
            return
        # After a silence the new lines are of now, not of some time since the last mark.
        silent = before.size == self._marked.size and before.t > self._marked.t
        self._write([before, self._seen] if silent and before.t else [self._seen])
        self._marked = self._seen

    def _write(self, marks: Sequence[LogMark]) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        # Closed each time: only then do readers on other nodes see it over NFS.
        descriptor = os.open(times_path(self._log), flags, 0o644)
        try:
            os.write(descriptor, b"".join(map(mark_line, marks)))
        finally:
            os.close(descriptor)


def _written(log: Path, pid: int | None) -> int:
    """Return how long a log is; raise OSError if it is not there, or cannot be seen."""
    if pid is not None:
        with contextlib.suppress(OSError):
            to = os.readlink(f"/proc/{pid}/fd/1")  # noqa: PTH115 - a bare system call beside forks
            if to.split("/")[-NAMED:] == str(log).split("/")[-NAMED:]:
                position = _position(pid)
                if position is not None:
                    return position
    return os.stat(log).st_size  # noqa: PTH116 - a bare system call beside forks


def _position(pid: int) -> int | None:
    descriptor = os.open(f"/proc/{pid}/fdinfo/1", os.O_RDONLY | os.O_CLOEXEC)
    try:
        name, _, value = os.read(descriptor, 64).partition(b"\n")[0].partition(b":")
    finally:
        os.close(descriptor)
    return int(value) if name == b"pos" else None
