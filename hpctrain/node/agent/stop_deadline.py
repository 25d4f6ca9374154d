"""The deadline of a stop: when the ranks must be gone, by the signals and the scheduler's word.

Ranks stop by themselves (`runtime/run.py`, `runtime/agreement.py`); this watches that they are gone
before the scheduler kills the job, so that there is time left to requeue.
tests/unit/agent/test_stop_deadline.py holds the promises.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from typing import TYPE_CHECKING, TypeVar

from hpctrain.core.base import clock
from hpctrain.core.base.records import StopCause
from hpctrain.errors import OF_A_DISK, ClusterError
from hpctrain.ledger.plan.decide import is_cancelled, is_ending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.core.base.records import JobContext, JobFacts
    from hpctrain.node.agent.signals import Arrival

log = logging.getLogger("hpctrain.agent")

Result = TypeVar("Result")

LEAVE_S = 3.0
"""Kept free between the ranks' end and the scheduler's SIGKILL: enough to ask and to requeue."""
ASK_AGAIN_S = 2.0
POLL_S = 0.1
STOOD_S = 5.0
"""Between two looks, which come four times a second: somebody has let this process stand still."""
DISK_LOOK_S = 1.0


class StopDeadline:
    """Follows the signals of one agent."""

    def __init__(
        self,
        context: JobContext,
        *,
        arrivals: Callable[[], Sequence[Arrival]],
        ask: Callable[[], JobFacts] | None,
        stop_margin_s: float = 10.0,
        on_suspended: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Watch the signals of this process; the job's end time is the first deadline.

        `ask` queries the scheduler; it is None on all nodes but the first, which reports to them.
        `stop_margin_s` is kept free at the job's end. `on_suspended` gets the length of a
        suspension.
        """
        self.cause: StopCause | None = None
        self.facts: JobFacts | None = None
        self.end_time = context.end_time
        self._context = context
        self._arrivals = arrivals
        self._ask = ask
        self._started = clock.now()
        self._margin_s = max(LEAVE_S, stop_margin_s / 2)
        self._seen = 0
        self._term_at: float | None = None
        self._asked_at = float("-inf")
        self._looked_at = float("inf")
        self._on_suspended = on_suspended

    def look(self) -> str:
        """Take in signals, query the scheduler where it helps.

        Return why the ranks must be killed now, or "".
        """
        self._after_suspension()
        self._take_in()
        if self.cause is not None and self._ask is not None:
            self._ask_scheduler()
            if self.facts is not None and is_cancelled(self.facts, self._context.restarts):
                return "cancelled"
        left = self.seconds_left()
        if left is not None and left <= 0:
            return "the ranks did not leave in time"
        return ""

    def wait(self, seconds: float) -> None:
        """Let time go by, but none once a stop has been asked for."""
        until = clock.monotonic() + seconds
        while clock.monotonic() < until:
            self._take_in()
            if self.cause is not None:
                return
            clock.sleep(min(POLL_S, max(0.0, until - clock.monotonic())))

    def patiently(self, act: Callable[[], Result], patience_s: float) -> Result:
        """Retry `act` while a full disk refuses it, for `patience_s` or until a stop is asked for.

        Raises:
            OSError: the disk has refused it to the end.
        """
        until, has_warned = clock.monotonic() + patience_s, False
        while True:
            try:
                return act()
            except OSError as error:
                self._take_in()
                is_over = clock.monotonic() >= until or self.cause is not None
                if error.errno not in OF_A_DISK or is_over:
                    raise
                if not has_warned:
                    why = error.strerror or error
                    log.warning("waits up to %g s for the run's disk: %s", patience_s, why)
                has_warned = True
            self.wait(DISK_LOOK_S)

    def is_stop_requested(self) -> bool:
        """Whether a program that now returns may have done so because it was asked to stop.

        With a short limit SLURM warns in its first round. Taking that for a stop would requeue a
        program that is simply done, for ever: each new start would be warned at once as well.
        """
        self._take_in()  # ranks that leave at once may be gone before the next look
        if self.cause is not StopCause.WARNING or self.end_time is None:
            return self.cause is not None
        if self.facts is not None and self.facts.preempt_time is not None:
            return True
        now = clock.now()
        return now - self._started > (self.end_time - self._started) / 2

    def seconds_left(self) -> float | None:
        """Seconds until the ranks must be gone; None while no end is known."""
        after_term_s = self._context.kill_wait_s - LEAVE_S
        if self._term_at is not None and not self._in_grace():
            return after_term_s - (clock.monotonic() - self._term_at)
        if self.end_time is None:
            return None
        # At its limit a job hears SIGTERM and is killed KillWait later; at the end of a grace time
        # it is killed. A save that has just begun, as the limit was moved, must not be cut off.
        spare_s = -self._margin_s if self._in_grace() else max(-self._margin_s, after_term_s)
        return self.end_time - clock.now() + spare_s

    def _after_suspension(self) -> None:
        """If this process stood still: hear whether the job was suspended, and when it ends."""
        stood_s = clock.monotonic() - self._looked_at
        if stood_s >= STOOD_S and self._ask is not None:
            since = clock.now() - stood_s
            with contextlib.suppress(ClusterError):  # then nobody knows whose doing it was
                facts = self._ask()
                if facts.end_time is not None and not is_ending(facts):
                    self.end_time = facts.end_time
                if facts.resumed_at is not None and facts.resumed_at > since - STOOD_S:
                    self._on_suspended(stood_s)
        self._looked_at = clock.monotonic()

    def _take_in(self) -> None:
        arrivals = self._arrivals()
        for arrival in arrivals[self._seen :]:
            if arrival.signum == signal.SIGTERM:
                self._term_at = self._term_at or arrival.at_monotonic_s
                self.cause = StopCause.TERM
            elif self.cause is None:
                self.cause = StopCause.WARNING
            self._asked_at = float("-inf")
        self._seen = len(arrivals)

    def _ask_scheduler(self) -> None:
        now = clock.monotonic()
        if now - self._asked_at < ASK_AGAIN_S or self._ask is None:
            return
        self._asked_at = now
        try:
            self.facts = self._ask()
        except ClusterError:
            return  # asked again in a moment; until then the time limits known so far hold
        if self.facts.end_time is not None and not is_ending(self.facts):
            self.end_time = self.facts.end_time

    def _in_grace(self) -> bool:
        """Preempted with a grace time: the kill comes at the job's moved end, not after KillWait.

        A job without a time limit has no end that could be moved; then KillWait is what is known.
        """
        facts = self.facts
        if facts is None or facts.preempt_time is None or facts.end_time is None:
            return False
        return not is_ending(facts)
