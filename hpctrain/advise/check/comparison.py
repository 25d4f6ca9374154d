"""Two runs of one program, by their ledgers: what each came to, where their losses part. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from hpctrain.ledger.run import event_types as facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpctrain.core.base.records import EndReason
    from hpctrain.ledger.run.events import Event

ROUNDING = 1e-3
"""Relative difference of losses that another order of sums may make within a few steps."""
_STEP = re.compile(
    r"\b(?:global_)?(?:step|iter(?:ation)?)s?\b['\"]?\s{0,3}[:=#]?\s{0,3}\[?\s{0,3}(\d{1,12})",
    re.IGNORECASE,
)
_LOSS = re.compile(
    r"\bloss\b['\"]?\s{0,3}[:=]?\s{0,3}([-+]?(?:\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?|nan|inf))",
    re.IGNORECASE,
)
_OTHER_LOSS = re.compile(r"\b(?:val|valid|validation|eval|test)[ _/-]?loss", re.IGNORECASE)
_EPOCH = re.compile(
    r"\bep(?:och)?s?\b['\"]?\s{0,3}[:=#]?\s{0,3}\[?\s{0,3}(\d{1,9}(?:\.\d{1,9})?)", re.IGNORECASE
)
_IN_EPOCH = re.compile(
    r"\b(?:global_)?(?:step|iter(?:ation)?|it|batch|update)s?\b['\"]?\s{0,3}[:=#]?\s{0,3}\[?\s{0,3}"
    r"(\d{1,12})",
    re.IGNORECASE,
)
_OF_ALL = re.compile(r"[\[|(]\s{0,3}(\d{1,12})\s{0,3}/\s{0,3}\d{1,12}\b")
"""`[120/500]`, and what tqdm draws: `24%|##4       | 120/500 [00:10<...`."""
_LONGEST_LINE = 1000
_NONE = -1.0


def printed_losses(text: str) -> dict[int, float | None]:
    """Each step that a log names with its loss in one line; the last word on each counts."""
    losses: dict[int, float | None] = {}
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE or _OTHER_LOSS.search(line):
            continue
        step, loss = _STEP.search(line), _LOSS.search(line)
        if step is not None and loss is not None:
            losses[int(step[1])] = float(loss[1])
    return losses


def printed_places(text: str) -> list[tuple[float, float]]:
    """Epoch and step of each line of a log that names one of them; -1 for what nobody has named.

    A line without an epoch is of the epoch that was named last.
    """
    places = []
    epoch = _NONE
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE or _OTHER_LOSS.search(line):
            continue
        named, step = _EPOCH.search(line), _IN_EPOCH.search(line) or _OF_ALL.search(line)
        epoch = float(named[1]) if named is not None else epoch
        if named is not None or step is not None:
            places.append((epoch, float(step[1]) if step is not None else _NONE))
    return places


def place_text(place: tuple[float, float]) -> str:
    """`epoch 3 step 20`."""
    words = zip(("epoch", "step"), place, strict=True)
    return " ".join(f"{word} {number:g}" for word, number in words if number != _NONE)


def began_again(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> bool | None:
    """Whether a second start began where the first one did; None where the log cannot tell.

    Args:
        before: Places of the first start.
        after: Places of the second one.
    """
    if not before or not after or before[0] == before[-1]:
        return None
    if any(second < first for first, second in pairwise(before)):
        return None  # a counter that goes back at each epoch, or for a validation
    return after[0] <= before[0]


@dataclass
class RehearsedAttempt:
    """One attempt."""

    # each step that was reported, with its loss or None
    losses: dict[int, float | None] = field(default_factory=dict)
    restored: int | None = None  # the step that it resumed from; None before it was reported
    saved: list[int] = field(default_factory=list)  # steps of committed checkpoints
    save_bytes: int | None = None  # of the last; None where that is not known
    reason: EndReason | None = None  # why it ended; None before its end
    ended: float = 0.0  # when, seconds since the epoch
    failure: str = ""  # what a rank failed with, "" where none did

    @property
    def last(self) -> int:
        """The last step that was reported, 0 for none."""
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
            attempt.save_bytes = fact.bytes
        elif isinstance(fact, facts.AttemptEnded):
            attempt.reason, attempt.ended = fact.reason, event.t
        elif isinstance(fact, facts.RankFailed):
            attempt.failure = fact.summary or f"rank {fact.rank} failed ({fact.kind_of})"
    return [attempts[number] for number in sorted(attempts)]


@dataclass(frozen=True)
class LossComparison:
    """Losses of the same steps in two runs."""

    steps: tuple[int, ...]  # those that both told a loss of, in order
    parts_at: int | None = None  # the first whose losses differ; None where none do
    worst: float = 0.0  # the largest relative difference


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
