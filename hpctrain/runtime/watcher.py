"""Rank 0's side thread: looks for requests, and asks the scheduler what a warning means.

Requests are files: of `cancel --save`, and of `profile --now`.

A thread, because a silent slurmctld must not hold up training; only rank 0, because the answer
must be one.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING

from hpctrain.errors import ClusterError
from hpctrain.plan.decide import is_ending
from hpctrain.profile.names import Request, read_request
from hpctrain.runtime.agreement import STOP_TERM, STOP_USER, STOP_WARNED

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.records import JobControl, JobFacts
    from hpctrain.runtime.clock import JobClock

POLL_S = 0.5


class Watcher:
    """Sets `stop` to a code of `agreement.py` when a stop is needed.

    Attributes:
        stop: That code, or 0.
        profile: The number of a request to profile that waits to be taken, or 0.
    """

    def __init__(
        self,
        *,
        request: Path,
        profile_request: Path,
        job_id: str,
        clock: JobClock,
        control: JobControl | None,
    ) -> None:
        self.stop = 0
        self.profile = 0
        self._request = request
        self._profile_request = profile_request
        self._to_profile: Request | None = None
        self._profiled: list[str] = []
        self._job_id = job_id
        self._clock = clock
        self._control = control
        self._warned = threading.Event()

    def start(self) -> None:
        """Begin to watch, for the life of this process."""
        threading.Thread(target=self._watch, name="hpctrain-watcher", daemon=True).start()

    def warn(self) -> None:
        """Somebody got SIGUSR2: find out whether the job is preempted or near its time limit."""
        self._warned.set()

    def take_profile(self) -> Request | None:
        """The request to profile, which is answered by this; None where it was taken already."""
        request, self._to_profile = self._to_profile, None
        self.profile = 0
        if request is not None:
            with contextlib.suppress(OSError):  # then its token says that it was taken
                self._profile_request.unlink(missing_ok=True)
        return request

    def _look_for_profile(self) -> None:
        request = read_request(self._profile_request, self._job_id)
        if request is None or request.token in self._profiled:
            return
        self._profiled.append(request.token)
        self._to_profile = request
        self.profile = len(self._profiled)

    def _watch(self) -> None:
        self.stop = self._missed_stop()
        while not self.stop:
            if self._warned.wait(POLL_S):
                self._warned.clear()
                self.stop = self._meaning_of_warning()
            if not self.stop and self._is_requested():
                self.stop = STOP_USER
            self._look_for_profile()

    def _is_requested(self) -> bool:
        try:
            request = json.loads(self._request.read_text())
        except (
            FileNotFoundError,
            ValueError,
        ):  # not there, or seen while NFS still shows half of it
            return False
        return str(request.get("job_id")) == self._job_id

    def _missed_stop(self) -> int:
        """A preemption announced before the listener stood; SLURM does not say it twice."""
        try:
            facts = self._ask()
        except ClusterError:  # then the agent ends the ranks in time, if it has heard of one
            return 0
        return STOP_TERM if facts is not None and _is_ending(facts) else 0

    def _meaning_of_warning(self) -> int:
        """Stop now, or 0 where the job's clock will say when (as late as is safe)."""
        try:
            facts = self._ask()
        except ClusterError:
            return STOP_WARNED  # nobody can tell that it is not a preemption
        if facts is None or _is_ending(facts) or self._clock.end_time is None:
            return STOP_WARNED
        return 0

    def _ask(self) -> JobFacts | None:
        """What the scheduler says of our job, with its end set on the clock; None without one."""
        if self._control is None:
            return None
        facts = self._control.facts()
        if facts.end_time is not None:
            self._clock.end_time = facts.end_time
        return facts


def _is_ending(facts: JobFacts) -> bool:
    """Whether the job is preempted, or on its way out for another reason."""
    return facts.preempt_time is not None or is_ending(facts)
