"""A program raised: is that its user's error, or may the next start go well? Pure.

An error of the user's comes at every start, and the nodes are not to be held for it. A program that
was seen to run has shown that it can; what it raises after hours (a disk's or a GPU's error, a lost
worker) is a crash. A script that knows nothing of hpctrain tells of no steps: then time tells.
docs/preemption.md has the rule; tests/unit/test_user_error.py holds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.plan.budget import since_resume
from hpctrain.run.values import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.run.events import Event

LONG_S = 300.0
"""A program that raises later than this after its start has come to its work."""


@dataclass
class _Life:
    """What is known of an attempt."""

    began: float = math.inf
    ended: float = -math.inf
    stepped: bool = False
    error: str = ""

    def ran(self) -> bool:
        """Whether it came to its work."""
        return self.stepped or self.ended - self.began >= LONG_S


def is_users(events: Sequence[Event], attempt: int, error: str, now: float) -> bool:
    """Whether what an attempt raised would come at every start.

    It is not where the attempt came to its work, or an earlier one did since somebody last
    submitted or resumed the run; but the same error at two starts in a row is.

    Args:
        events: The run's ledger.
        attempt: The one that raised.
        error: What it raised, in a line.
        now: When, seconds since the epoch.
    """
    lives = _lives(since_resume(events))
    own = lives.setdefault(attempt, _Life())
    own.ended = now
    if own.ran():
        return False
    earlier = [life for key, life in sorted(lives.items()) if key < attempt]
    if earlier and earlier[-1].error == error and not earlier[-1].ran():
        return True
    return not any(life.ran() for life in earlier)


def _lives(events: Sequence[Event]) -> dict[int, _Life]:
    lives: dict[int, _Life] = {}
    for event in events:
        if event.attempt is None:
            continue
        life = lives.setdefault(event.attempt, _Life())
        if event.kind == "attempt_started":
            life.began = event.t
        elif event.kind == "attempt_ended":
            # Its successor may write that hours later.
            late = event.data.get("by") == "successor"
            told = number(event.data.get("ended_at")) or number(event.data.get("heard"))
            life.ended = event.t if not late else told or -math.inf
        elif event.kind == "failure":
            life.error = str(event.data.get("summary", ""))
        life.stepped = life.stepped or _is_of_a_step(event)
    return lives


def _is_of_a_step(event: Event) -> bool:
    """Whether a step was done; the first step mark comes up to a minute after it."""
    first = event.kind == "phase" and event.data.get("name") == "first_step"
    return first or event.kind in {"steps", "saved"}
