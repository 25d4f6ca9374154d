"""When to stop: what this rank has heard, what all ranks agree on, and how long there is then.

A rank hears of a stop by a signal; rank 0 also by a request of the user, by the scheduler's word on
a warning, and by the clock. The loop asks once before each step. tests/unit/runtime/test_clock.py
and tests/engines/test_agreement.py hold the promises.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_KILL_WAIT_S
from hpctrain.core.base.records import StopCause
from hpctrain.errors import HpctrainError
from hpctrain.train.runtime.agreement import (
    STOP_CLOCK,
    STOP_INTERRUPT,
    STOP_TERM,
    WARNED,
    StopRequest,
    agreement_of,
)

if TYPE_CHECKING:
    from hpctrain.core.world import World
    from hpctrain.observe.profile.files import ProfileRequest
    from hpctrain.train.runtime.agreement import Agreement
    from hpctrain.train.runtime.requests import Rank0Requests
    from hpctrain.train.runtime.save_policy import JobClock
    from hpctrain.train.runtime.signals import RankSignals

log = logging.getLogger("hpctrain.runtime")

ASK_S = 2.0
"""How long the scheduler may take to say when a preemption's grace time, or the job, ends."""


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
        request = self._request(save=save, tell=tell)
        agreed = self._agreement.tick(replace(request, memory=memory) if memory else request)
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

        For who waits for something before it gets to that step. Not collective: other ranks may
        know less, or more. From the thread that trains.

        Returns:
            None where it knows of no stop, or nobody says when processes are killed.
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

    def _request(self, *, save: bool, tell: bool) -> StopRequest:
        stop = self._heard()
        if not stop and self._world.rank == 0 and self._is_due():
            stop = STOP_CLOCK
        elif not stop and self._signals.warned:
            stop = WARNED
        profile = self._requests.profile if self._requests is not None else 0
        return StopRequest(stop, save, tell, profile)

    def _is_due(self) -> bool:
        # What is said now may hold only some steps later.
        now = clock.now() + self._agreement.steps_ahead * self._clock.step_s
        late = self._clock.is_late(now)
        if late and not self._clock.has_stepped and not self._said_late:
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
