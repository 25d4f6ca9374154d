"""Rank 0's side thread: looks for requests, and asks the scheduler what a warning means.

Requests are files: of `cancel --save`, and of `profile --now`. A thread, because a silent slurmctld
must not hold up training; only rank 0, because the answer must be one.
tests/unit/runtime/test_requests.py holds the promises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.base import get_control
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_CLUSTER
from hpctrain.core.world import one_line
from hpctrain.errors import ClusterError
from hpctrain.ledger.plan.decide import is_ending
from hpctrain.ledger.run.fence import stop_is_asked
from hpctrain.observe.profile.files import ProfileRequest, read_request
from hpctrain.train.runtime.agreement import STOP_TERM, STOP_USER, STOP_WARNED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpctrain.cluster.scheduler.base import JobControl
    from hpctrain.core.base.records import JobFacts
    from hpctrain.core.world import World
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.train.runtime.save_policy import JobClock

log = logging.getLogger("hpctrain.runtime")

POLL_S = 0.5
STOOD_S = 5.0
"""Between two looks: something has let this process stand still."""


def start_requests(
    run: RunDir | None, attempt: Attempt | None, world: World, clock: JobClock
) -> Rank0Requests | None:
    """Begin to watch on rank 0; None on the others, and without a run.

    The scheduler is asked about the attempt's job; `clock` learns when the job ends.
    """
    if world.rank != 0 or run is None or attempt is None:
        return None
    cluster = os.environ.get(HPCTRAIN_CLUSTER)
    requests = Rank0Requests(
        request=run.stop_request,
        profile_request=run.profile_request,
        job_id=attempt.job_id,
        clock=clock,
        control=get_control(cluster, attempt.job_id, attempt.restarts) if cluster else None,
    )
    requests.start()
    return requests


class Rank0Requests:
    """Sets `stop` to a code of `agreement.py` when a stop is needed.

    Attributes:
        stop: That code, or 0.
        profile: The number of a request to profile that waits to be taken, or 0.
        on_stop: Called on this thread when `stop` is set; must not raise.
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
        self.on_stop: Callable[[], None] | None = None
        self._request = request
        self._profile_request = profile_request
        self._to_profile: ProfileRequest | None = None
        self._profiled: list[str] = []
        self._job_id = job_id
        self._clock = clock
        self._control = control
        self._warned = threading.Event()
        self._told: set[str] = set()

    def start(self) -> None:
        """Begin to watch, for the life of this process."""
        threading.Thread(target=self._watch, name="hpctrain-requests", daemon=True).start()

    def warn(self) -> None:
        """Somebody got SIGUSR2: find out whether the job is preempted or near its time limit."""
        self._warned.set()

    def grace_end(self, patience_s: float) -> float | None:
        """When the grace time of a preemption ends.

        None where the job is not in one, or the scheduler takes longer than this to say so.
        """
        ends: list[float] = []

        def look() -> None:
            facts = self._ask()
            if facts is None or facts.preempt_time is None or is_ending(facts):
                return
            if facts.end_time is not None:
                ends.append(facts.end_time)

        self._within(patience_s, "the end of the grace time", look)
        return ends[0] if ends else None

    def renew_end(self, patience_s: float) -> None:
        """Query the job's end once more, before ranks exit by it: a suspension moves it.

        The scheduler may take `patience_s`; after that the known end stays.
        """
        self._within(patience_s, "the job's end", self._hear_new_end)

    def _within(self, patience_s: float, what: str, look: Callable[[], None]) -> None:
        asking = threading.Thread(target=self._try, args=(what, look), daemon=True)
        asking.start()
        asking.join(patience_s)

    def take_profile(self) -> ProfileRequest | None:
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
        self._try("the job's state", self._hear_what_was_missed)
        looked = clock.monotonic()
        while not self.stop:
            if clock.monotonic() - looked > STOOD_S:  # a suspension moves the end of the job
                self._try("the job's end", self._hear_new_end)
            looked = clock.monotonic()
            if clock.wait(self._warned, POLL_S):
                self._warned.clear()
                self.stop = self._meaning_of_warning()
            if not self.stop:
                self._try(str(self._request), self._look_for_stop)
            self._try(str(self._profile_request), self._look_for_profile)
        if self.on_stop is not None:
            self.on_stop()

    def _try(self, what: str, look: Callable[[], None]) -> None:
        """Look once; whatever comes of it, there is a next time: nobody else hears a stop."""
        try:
            look()
        except Exception as error:  # noqa: BLE001 - a file server's hiccup, a stranger's file
            if what not in self._told:
                self._told.add(what)
                log.warning("cannot look at %s (%s); looks again", what, one_line(error))

    def _look_for_stop(self) -> None:
        if stop_is_asked(self._request, self._job_id):
            self.stop = STOP_USER

    def _hear_what_was_missed(self) -> None:
        """Query a preemption announced before `RankSignals` stood; SLURM does not repeat it.

        If nobody can tell, the agent ends the ranks in time, if it knows of one.
        """
        with contextlib.suppress(ClusterError):
            facts = self._ask()
            if facts is not None and _is_ending(facts):
                self.stop = STOP_TERM

    def _hear_new_end(self) -> None:
        with contextlib.suppress(ClusterError):
            self._ask()

    def _meaning_of_warning(self) -> int:
        """Stop now, or 0 where the job's clock will say when (as late as is safe)."""
        try:
            facts = self._ask()
        except Exception:  # noqa: BLE001 - whatever the reason:
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
