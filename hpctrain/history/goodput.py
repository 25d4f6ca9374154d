"""Where the time went: every second since the first submission belongs to one of a few classes.

Pure: events, and what the scheduler's accounting knows of the job's starts where there is any.
docs/ledger.md says how each class is measured. tests/unit/test_goodput.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpctrain.history.allocations import stays
from hpctrain.history.cut import cut, kept_steps, waited
from hpctrain.history.spent import ALLOCATED, Slice, Spent
from hpctrain.history.timeline import past_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.base.records import JobStart
    from hpctrain.history.timeline import Past
    from hpctrain.run.events import Event

__all__ = ["Goodput", "Slice", "Spent", "goodput", "window"]


@dataclass(frozen=True)
class Goodput:
    """Where a run's time went.

    Attributes:
        slices: In order of time; they do not overlap, and leave out only the idle time between an
            end for good and the next submission.
        seconds: Wall time of each class; all classes are there.
        node_seconds: The same weighted by allocated nodes; all classes but QUEUE.
        allocated_s: Node-seconds that were allocated: the sum of `node_seconds`.
        submitted_s: Wall time since the first submission, without idle time: the sum of `seconds`.
        tells_steps: Whether the program tells hpctrain of its steps; without that there is no rate.
    """

    slices: Sequence[Slice] = ()
    seconds: dict[Spent, float] = field(default_factory=lambda: dict.fromkeys(Spent, 0.0))
    node_seconds: dict[Spent, float] = field(default_factory=lambda: dict.fromkeys(ALLOCATED, 0.0))
    allocated_s: float = 0.0
    submitted_s: float = 0.0
    tells_steps: bool = False

    @property
    def useful_of_allocated(self) -> float | None:
        """Share of the allocated node-seconds that went to steps that count.

        None where the program tells no steps at all, or nothing was allocated.
        """
        if not self.tells_steps or self.allocated_s <= 0:
            return None
        return self.node_seconds[Spent.STEP] / self.allocated_s

    @property
    def useful_since_submit(self) -> float | None:
        """Share of the wall time since the first submission that went to steps that count.

        None where the program tells no steps at all, or no time went by.
        """
        if not self.tells_steps or self.submitted_s <= 0:
            return None
        return self.seconds[Spent.STEP] / self.submitted_s


def goodput(
    events: Iterable[Event],
    *,
    starts: Sequence[JobStart] = (),
    now: float,
    past: Past | None = None,
) -> Goodput:
    """Where the run's time went.

    Args:
        events: The run's ledger; of rows of step marks the last ones are enough.
        starts: What accounting knows of every start of the run's jobs; none is fine.
        now: Seconds since the epoch: how far an attempt that still runs is counted.
        past: `past_of(events)`, where it is at hand.
    """
    past = past_of(events) if past is None else past
    kept = kept_steps(past.attempts)
    tells = any(one.tells for one in past.attempts)
    slices: list[Slice] = []
    for stay in stays(past, starts, now=now):
        slices += waited(stay)
        if stay.started:
            until = max(stay.begin, now) if stay.end is None else stay.end
            slices += cut(stay, until, kept, tells=tells)
    return _summed(slices, tells_steps=tells)


def window(g: Goodput, since: float) -> Goodput:
    """The same for the time after `since` only, e.g. the last 24 hours."""
    clipped = [replace(s, start=max(s.start, since)) for s in g.slices if s.end > since]
    return _summed(clipped, tells_steps=g.tells_steps)


def _summed(slices: Sequence[Slice], *, tells_steps: bool) -> Goodput:
    seconds: dict[Spent, float] = dict.fromkeys(Spent, 0.0)
    node_seconds: dict[Spent, float] = dict.fromkeys(ALLOCATED, 0.0)
    for one in slices:
        seconds[one.kind] += one.seconds
        if one.kind is not Spent.QUEUE:
            node_seconds[one.kind] += one.seconds * one.nodes
    return Goodput(
        slices=tuple(slices),
        seconds=seconds,
        node_seconds=node_seconds,
        allocated_s=sum(node_seconds.values()),
        submitted_s=sum(seconds.values()),
        tells_steps=tells_steps,
    )
