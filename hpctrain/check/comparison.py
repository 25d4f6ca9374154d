"""Two runs of one program, by their ledgers: what each came to, and where their losses part. Pure.

tests/unit/check/test_comparison.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.run import event_types as facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpctrain.base.records import EndReason
    from hpctrain.run.events import Event

ROUNDING = 1e-3
"""Relative difference of losses that another order of sums may make within a few steps."""


@dataclass
class RehearsedAttempt:
    """One attempt.

    Attributes:
        losses: Each step that was told, with its loss, None where it told none.
        restored: The step that it went on from; None before that was told.
        saved: Steps of committed checkpoints.
        reason: Why it ended; None before its end.
        failure: What a rank failed with, "" where none did.
    """

    losses: dict[int, float | None] = field(default_factory=dict)
    restored: int | None = None
    saved: list[int] = field(default_factory=list)
    reason: EndReason | None = None
    failure: str = ""

    @property
    def last(self) -> int:
        """The last step that was told, 0 for none."""
        return max(self.losses, default=0)


def rehearsed(events: Iterable[Event]) -> list[RehearsedAttempt]:
    """The attempts of a run, in order."""
    attempts: dict[int, RehearsedAttempt] = {}
    for event in events:
        if event.attempt is None:
            continue
        attempt = attempts.setdefault(event.attempt, RehearsedAttempt())
        fact = event.fact
        if isinstance(fact, facts.StepsDone) and fact.last is not None:
            attempt.losses[fact.last] = fact.loss
        elif isinstance(fact, facts.CheckpointRestored):
            attempt.restored = fact.step
        elif isinstance(fact, facts.CheckpointSaved):
            attempt.saved.append(fact.step)
        elif isinstance(fact, facts.AttemptEnded):
            attempt.reason = fact.reason
        elif isinstance(fact, facts.RankFailed):
            attempt.failure = fact.summary or f"rank {fact.rank} failed ({fact.kind_of})"
    return [attempts[number] for number in sorted(attempts)]


@dataclass(frozen=True)
class LossComparison:
    """Losses of the same steps in two runs.

    Attributes:
        steps: Those that both told a loss of, in order.
        parts_at: The first whose losses differ; None where none do.
        worst: The largest relative difference.
    """

    steps: tuple[int, ...]
    parts_at: int | None = None
    worst: float = 0.0


def compared(
    first: Mapping[int, float | None], second: Mapping[int, float | None]
) -> LossComparison:
    """Hold the losses of two runs against each other, bit by bit."""
    pairs = {
        step: (first[step], second[step])
        for step in sorted(first.keys() & second.keys())
        if first[step] is not None and second[step] is not None
    }
    differences = {step: _difference(*pair) for step, pair in pairs.items()}
    parts_at = next((step for step, by in differences.items() if by), None)
    return LossComparison(tuple(pairs), parts_at, max(differences.values(), default=0.0))


def _difference(first: float | None, second: float | None) -> float:
    """Relative; 0 where both are the same bits or both are no numbers."""
    if first is None or second is None or first == second:
        return 0.0
    if not math.isfinite(first) or not math.isfinite(second):
        return 0.0 if math.isnan(first) and math.isnan(second) else math.inf
    return abs(first - second) / max(abs(first), abs(second))
