"""When to stop: what this rank has heard, what all ranks agree on, and how long there is then.

A rank hears of a stop by a signal (`RankSignals`); rank 0 also by a request of the user and by the
scheduler's word on a warning (`Rank0Requests`), and by the clock.

Signals are blocked in every thread, and one thread waits for them: so they are heard while the main
thread is inside a long C call, and no Python code is interrupted. Requests are files; a thread of
rank 0 looks for them, because a silent slurmctld must not hold up training.
tests/unit/runtime/test_clock.py, test_signals.py, test_requests.py and
tests/engines/test_agreement.py hold the promises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

from hpctrain.cluster.scheduler.base import get_control
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_CLUSTER, HPCTRAIN_KILL_WAIT_S
from hpctrain.core.base.records import StopCause
from hpctrain.core.world import one_line
from hpctrain.errors import ClusterError, HpctrainError
from hpctrain.ledger.plan.decide import is_ending
from hpctrain.ledger.plan.interval import CLOCK_SAFETY, LEAVE_S
from hpctrain.ledger.run.fence import stop_is_asked
from hpctrain.node.agent.signals import STOP_SIGNALS as HEARD
from hpctrain.node.agent.signals import start_resource_tracker
from hpctrain.observe.profile.trace import ProfileRequest, read_request
from hpctrain.train.runtime.agreement import (
    NOTHING,
    STOP_CLOCK,
    STOP_INTERRUPT,
    STOP_TERM,
    STOP_USER,
    STOP_WARNED,
    WARNED,
    StopRequest,
    agreement_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.cluster.scheduler.base import JobControl
    from hpctrain.core.base.records import JobFacts
    from hpctrain.core.world import World
    from hpctrain.train.runtime.agreement import Agreement


log = logging.getLogger("hpctrain.runtime")

ASK_S = 2.0
"""How long the scheduler may take to say when a preemption's grace time, or the job, ends."""
GUESS_BYTES_PER_S = 200e6
"""Of one rank, before any save was measured: eight ranks of a node write 1.6 GB/s together."""
GUESS_SHARE = 1 / 8
"""A guess costs a job no more of its time: a wrong one must not keep it from training at all."""


@dataclass
class JobClock:
    """The job's end against what a save costs. Rank 0's is the one that counts.

    Attributes:
        end_time: When the scheduler ends the job, seconds since the epoch; None where nobody knows.
        margin_s: Kept free after the save, for leaving and requeueing.
        job_s: The job's time from here to its end; None where nobody knows.
        state_bytes: What this rank writes in a save; a first guess of its time comes from it.
        earlier_s: Longest of the newest saves of earlier attempts.
        save_s: Longest save measured in this attempt.
        has_stepped: Whether this attempt has done a step.
    """

    end_time: float | None
    margin_s: float
    job_s: float | None = None
    state_bytes: int = 0
    earlier_s: float | None = None
    save_s: float | None = None
    step_s: float = 0.0
    has_stepped: bool = False

    def expected_save_s(self) -> float:
        """What a save is likely to take: as measured here, else as before, else a guess."""
        if self.save_s is not None:
            return self.save_s
        if self.earlier_s is not None:
            return self.earlier_s
        guess = 1.0 + self.state_bytes / GUESS_BYTES_PER_S
        return guess if self.job_s is None else min(guess, max(0.0, GUESS_SHARE * self.job_s))

    def lead_s(self) -> float:
        """Seconds before the end at which to stop: one more step, one save, the margin."""
        return self.margin_s + CLOCK_SAFETY * self.expected_save_s() + 2 * self.step_s

    def is_late(self, now: float) -> bool:
        """Whether the step that is about to begin may be the last one that fits, or be none."""
        return self.end_time is not None and now >= self.end_time - self.lead_s()

    def is_due(self, now: float) -> bool:
        """Whether to stop before the next step.

        Not before the first: there is nothing to save so far, and a job that always left then would
        never come to do anything.
        """
        return self.has_stepped and self.is_late(now)

    def saved(self, seconds: float) -> None:
        """Learn from a save."""
        self.save_s = max(self.save_s or 0.0, seconds)

    def stepped(self, seconds: float | None) -> None:
        """Learn from a step; None where nobody knows what it took."""
        self.has_stepped = True
        if seconds is not None:
            self.step_s += 0.3 * (seconds - self.step_s) if self.step_s else seconds

    def left_s(
        self,
        cause: StopCause,
        now: float,
        *,
        term_at: float | None = None,
        kill_wait_s: float | None = None,
        grace_end: float | None = None,
    ) -> float | None:
        """Seconds until the processes are killed; None where nobody says.

        All moments are seconds since the epoch. `term_at` is when SIGTERM came, `kill_wait_s` the
        time between SIGTERM and SIGKILL where there is no grace time (a job that reaches its limit
        hears SIGTERM then), `grace_end` when a preemption's grace time ends; None where there is
        none.
        """
        if cause is StopCause.TERM and grace_end is None:
            end = None if kill_wait_s is None else (term_at or now) + kill_wait_s - LEAVE_S
        else:
            end = self.end_time if grace_end is None else grace_end
            # As the agent of the node does, which ends late ranks: at its limit a job hears
            # SIGTERM, and is killed KillWait later; at the end of a grace time it is killed.
            spare_s = -max(LEAVE_S, self.margin_s / 2)
            if grace_end is None and kill_wait_s is not None:
                spare_s = max(spare_s, kill_wait_s - LEAVE_S)
            end = None if end is None else end + spare_s
        return None if end is None else max(0.0, end - now)


class Stops:
    """One rank's side of the agreement on stops."""

    def __init__(
        self,
        world: World,
        signals: RankSignals,
        requests: Rank0Requests | None,
        clock: JobClock,
        agreement: Agreement | None = None,
    ) -> None:
        """Prepare; `requests` is rank 0's alone, and `agreement` is None for what `world` has."""
        self._world = world
        self._signals = signals
        self._requests = requests
        self._clock = clock
        self._agreement = agreement or agreement_of(world)
        self._said_late = self._has_renewed_end = False
        # In the middle of a long step, lest the step after it begin before anybody has heard.
        signals.on_heard = self._say_at_once
        if requests is not None:
            requests.on_stop = self._say_at_once

    def exchange(self, *, save: bool, tell: bool, memory: bool = False) -> StopRequest:
        """Report what this rank has heard, and return what all agreed on. Collective.

        With `save`, rank 0's clock says that a periodic save is due. With `memory`, rank 0 wants a
        copy into the nodes' memory. With `tell`, this rank wants to know what all ranks' time went
        to.
        """
        agreed = self._agreement.tick(self._request(save=save, tell=tell, memory=memory))
        if agreed.stop >= WARNED:
            # Only now: most ticks of short steps exchange nothing, and would lose it.
            self._signals.warned = False
        if agreed.stop == WARNED and self._requests is not None:
            self._requests.warn()
        return agreed

    @property
    def steps_ahead(self) -> int:
        """What is first wished at the next step is done at most so many steps after it."""
        return self._agreement.steps_ahead

    def take_profile(self) -> ProfileRequest | None:
        """The request to profile that all ranks agreed to; None on others than rank 0."""
        return self._requests.take_profile() if self._requests is not None else None

    def left_s(self, cause: StopCause) -> float | None:
        """Seconds until the processes are killed; None where nobody says.

        Rank 0's counts: it alone asks the scheduler, and all ranks do as it does.
        """
        kill_wait = os.environ.get(HPCTRAIN_KILL_WAIT_S)
        return self._clock.left_s(
            cause,
            clock.now(),
            term_at=self._signals.term_at,
            kill_wait_s=float(kill_wait) if kill_wait else None,
            grace_end=self._grace_end if cause is StopCause.TERM else None,
        )

    def near_stop_left_s(self) -> float | None:
        """Seconds between the step of a stop that this rank knows of and the end of its process.

        None where it knows of no stop, or nobody says when processes are killed. Not collective:
        other ranks may know less, or more. From the thread that trains.
        """
        stop = max(self._heard(), self._agreement.stop_ahead)
        if not stop and self._world.rank == 0 and self._clock.is_due(clock.now()):
            stop = STOP_CLOCK
        cause = StopRequest(stop).cause
        left_s = self.left_s(cause) if cause is not None else None
        if left_s is None:
            return None
        steps = 1 + self._agreement.steps_ahead
        return max(0.0, left_s - steps * self._clock.step_s)

    @cached_property
    def _grace_end(self) -> float | None:
        return self._requests.grace_end(ASK_S) if self._requests is not None else None

    def _say_at_once(self) -> None:
        with contextlib.suppress(HpctrainError, OSError):  # the next exchange meets it too
            self._agreement.wish(self._heard())

    def _heard(self) -> int:
        if self._signals.interrupted:
            return STOP_INTERRUPT
        if self._signals.term:
            return STOP_TERM
        return self._requests.stop if self._requests is not None else 0

    def _request(self, *, save: bool, tell: bool, memory: bool) -> StopRequest:
        stop = self._heard()
        if not stop and self._world.rank == 0 and self._is_due():
            stop = STOP_CLOCK
        elif not stop and self._signals.warned:
            stop = WARNED
        profile = self._requests.profile if self._requests is not None else 0
        if not (stop or save or tell or profile or memory):
            return NOTHING
        return StopRequest(stop, save, tell, profile, memory)

    def _is_due(self) -> bool:
        if self._clock.end_time is None:
            return False
        # What is said now may hold only some steps later.
        now = clock.now() + self._agreement.steps_ahead * self._clock.step_s
        if not self._clock.is_late(now):
            return False
        if not self._clock.has_stepped and not self._said_late:
            self._said_late = True
            left = (self._clock.end_time or now) - now
            log.warning(
                "the job ends in %.0f s, and a stop with a save would have to begin %.0f s before "
                "that (run.stop_margin_s, and a save of about %.0f s); one step is tried all the "
                "same: ask for more time (--time)",
                left,
                self._clock.lead_s(),
                self._clock.expected_save_s(),
            )
        if self._clock.is_due(now) and self._requests is not None and not self._has_renewed_end:
            self._requests.renew_end(ASK_S)
            self._has_renewed_end = self._clock.is_due(now)
        return self._clock.is_due(now)


# ---- signals


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
        """Set with the first signal, for threads that wait."""
        self.on_heard: Callable[[], None] | None = None
        """Called after each signal, on the thread that waits for them; must not raise."""

    def start(self, *, interrupt: bool = False) -> None:
        """Begin to listen. Call it on the main thread, before threads that could take the signals.

        With `interrupt`, the first Ctrl-C is a wish to save and leave too; the second interrupts.
        """
        RankSignals._listening = self
        for signum in HEARD:
            # For threads that are older than the mask: then Python's own handler runs.
            signal.signal(signum, lambda number, _frame: self.note(number))
        start_resource_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        if interrupt:
            signal.signal(signal.SIGINT, self._on_interrupt)
        if RankSignals._waits_in_pid != os.getpid():
            # Of two threads that wait, either would hear a signal, and the other not.
            RankSignals._waits_in_pid = os.getpid()
            threading.Thread(target=self._wait, name="hpctrain-signals", daemon=True).start()
            _also_from_older_threads()

    @property
    def is_replaced(self) -> bool:
        """Whether another one listens in the place of this."""
        return RankSignals._listening is not self

    @staticmethod
    def _wait() -> None:
        while True:
            RankSignals.take(signal.sigwait(HEARD))

    @staticmethod
    def take(signum: int) -> None:
        """Take in a signal for the one that listens, and have it told on."""
        listening = RankSignals._listening
        if listening is not None and signum in HEARD:
            listening.note(signum)
            if listening.on_heard is not None:
                listening.on_heard()

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


def _also_from_older_threads() -> None:
    """Hear a signal at once that a thread takes which is older than the mask, as OpenBLAS's are.

    Python's own handler would wait until the main thread leaves C code. An event loop that has the
    descriptor keeps it.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    theirs = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if theirs != -1:
        signal.set_wakeup_fd(theirs)
        os.close(read)
        os.close(write)
        return
    # A fork's signals would be heard here.
    os.register_at_fork(after_in_child=partial(_leave_alone, write))

    def wait() -> None:
        while taken := os.read(read, 64):
            for signum in taken:
                RankSignals.take(signum)

    threading.Thread(target=wait, name="hpctrain-wakeup", daemon=True).start()


def _leave_alone(write: int) -> None:
    theirs = signal.set_wakeup_fd(-1)
    if theirs not in (-1, write):
        signal.set_wakeup_fd(theirs)


# ---- requests, on rank 0

POLL_S = 0.5
STOOD_S = 5.0
"""Between two looks: something has let this process stand still."""


def start_requests(place: SavePlace | None, world: World, clock: JobClock) -> Rank0Requests | None:
    """Begin to watch on rank 0; None on the others, and without a run.

    The scheduler is asked about the attempt's job; `clock` learns when the job ends.
    """
    if world.rank != 0 or place is None:
        return None
    run, attempt = place.run, place.attempt
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
        self._logged_lines: set[str] = set()

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
        except Exception as error:  # noqa: BLE001 - a file server's hiccup, a foreign file
            if what not in self._logged_lines:
                self._logged_lines.add(what)
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
