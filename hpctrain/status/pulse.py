"""What the newest attempt's heartbeat says over what its ledger says. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.status.status import RunStatus


def with_heartbeat(status: RunStatus, t: float, step: int) -> RunStatus:
    """The status with what its newest attempt's heartbeat knows better: step and sign of life.

    Step marks are far apart, so that a long run's ledger stays small; the heartbeat is seconds old.

    Args:
        status: Of a run; given back as it is where the end of its newest attempt is known.
        t: When the heartbeat was written, seconds since the epoch.
        step: The last step that was done then.
    """
    newest = status.attempts[-1] if status.attempts else None
    if newest is None or newest.ended is not None:
        return status
    far = status.progress
    seen = max(t, far.seen or 0.0)
    done = max(step, newest.last_step or 0)
    attempts = [*status.attempts[:-1], replace(newest, last_step=done)]
    return replace(status, progress=replace(far, seen=seen, step=done), attempts=attempts)
