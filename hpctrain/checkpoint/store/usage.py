"""Which checkpoints may a live attempt be using? Asked before a person deletes something.

The ledger says it: an attempt that has begun and restored nothing yet is choosing, and may read any
of them; later it goes on from what it restored. A dead one may have had no time to write down its
end, and only the scheduler knows that; hence `idle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.checkpoint.store.beginning import asked_step
from hpctrain.history.run_state import OVER, RunState, live, standing
from hpctrain.run.values import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.history.run_state import Standing
    from hpctrain.run.events import Event


@dataclass(frozen=True)
class Usage:
    """The steps that must stay, and for whom."""

    reason: str
    since: int | None = None
    """This step and all newer ones; None for none of them."""
    only: int | None = None
    """This step alone."""

    def holds(self, step: int) -> bool:
        """Whether it must stay."""
        return step == self.only or (self.since is not None and step >= self.since)


def in_use(events: Sequence[Event], idle: Standing | None = None) -> Usage | None:
    """What must stay for the run as it stands; None where nothing is in use.

    Args:
        events: The run's ledger.
        idle: Where the run stood by the ledger when the scheduler knew of no live job for it. It
            counts as long as nothing has begun since then.
    """
    now = standing(events)
    if now.phase in OVER:
        return None
    if idle is not None and (now.attempt, now.token) == (idle.attempt, idle.token):
        return None
    if now.phase is RunState.RUNNING:
        return _running(events, now)
    asked = asked_step(events)
    if asked is None:
        return None
    return Usage(f"the job that is to go on from step {asked} waits to start", only=asked)


def _running(events: Sequence[Event], now: Standing) -> Usage:
    restored = [
        whole(event.data.get("step")) or 0
        for event in live(events)
        if event.kind == "restored" and event.attempt == now.attempt
    ]
    if not restored:
        return Usage(f"attempt {now.attempt} is choosing which checkpoint to load", since=0)
    reason = f"attempt {now.attempt} is running on it: it restored step {restored[-1]}"
    return Usage(reason, since=restored[-1])
