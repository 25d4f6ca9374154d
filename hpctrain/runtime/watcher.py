"""Rank 0's side thread: looks for `cancel --save`, and asks the scheduler what a warning means.

A thread, because a silent slurmctld must not hold up training; only rank 0, because the answer
must be one.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

from hpctrain.errors import ClusterError
from hpctrain.runtime.agreement import STOP_USER, STOP_WARNED

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.records import JobControl
    from hpctrain.runtime.clock import JobClock

POLL_S = 0.5


class Watcher:
    """Sets `stop` to a code of `agreement.py` when a stop is needed."""

    def __init__(
        self, *, request: Path, job_id: str, clock: JobClock, control: JobControl | None
    ) -> None:
        self.stop = 0
        self._request = request
        self._job_id = job_id
        self._clock = clock
        self._control = control
        self._warned = threading.Event()

    def start(self) -> None:
        """Begin to watch, for the life of this process."""
        threading.Thread(target=self._watch, name="hpctrain-watcher", daemon=True).start()

    def warn(self) -> None:
        """Somebody got SIGUSR2: find out whether the job is preempted or only near its time limit."""
        self._warned.set()

    def _watch(self) -> None:
        while not self.stop:
            if self._warned.wait(POLL_S):
                self._warned.clear()
                self.stop = self._meaning_of_warning()
            if not self.stop and self._is_requested():
                self.stop = STOP_USER

    def _is_requested(self) -> bool:
        try:
            request = json.loads(self._request.read_text())
        except (
            FileNotFoundError,
            ValueError,
        ):  # not there, or seen while NFS still shows half of it
            return False
        return str(request.get("job_id")) == self._job_id

    def _meaning_of_warning(self) -> int:
        """Stop now, or 0 where the job's clock will say when (as late as is safe)."""
        if self._control is None:
            return STOP_WARNED
        try:
            facts = self._control.facts()
        except ClusterError:
            return STOP_WARNED  # nobody can tell that it is not a preemption
        if facts.end_time is not None:
            self._clock.end_time = facts.end_time
        preempted = facts.preempt_time is not None or facts.state != "RUNNING"
        return STOP_WARNED if preempted or self._clock.end_time is None else 0
