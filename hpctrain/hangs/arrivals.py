"""From the moments at which ranks came to a group's collectives to each one's own work. Pure.

In a step all ranks take equally long: the slow one keeps the others waiting. What tells them apart
is when each came to where they wait. From a collective that they wait for all go on at once, and
what each took up to the next such one is its own work. Others (DDP's first buckets, what FSDP
fetches ahead) they pass without waiting, and who was late is late at the next one too.

Which is which shows in what changes from step to step: a rank that came later than it usually does
is later at the next collective as well where nobody waited, and not where all have waited for it.

All moments must be of one clock. tests/unit/hangs/test_arrivals.py holds the promises.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from hpctrain.hangs.evidence import Collective

PERIODIC = 0.9
"""Of all collectives so many must be as the one a period before: an evaluation breaks in."""
MOST_PERIOD = 1000
OFTEN = 0.8
"""A collective that all wait for is seen to be one so often at least: clocks and trips vary."""
WAITED = 0.8
"""What is unusual behind such a collective, as a part of how much lateness changes there."""


class OwnWork(NamedTuple):
    """What ranks took by themselves in one step.

    Attributes:
        seconds: By rank.
        step_s: What the step took, with what was waited.
    """

    seconds: tuple[float, ...]
    step_s: float


def calls_of(calls: Sequence[Collective], groups: Collection[str]) -> list[Collective]:
    """What a rank has called last in one of these groups, without a gap.

    Of several groups it is the one in which most was called: on all ranks the same.

    Args:
        calls: In all groups, in the order of their calls.
        groups: Those that may be meant.
    """
    counts = Counter(call.group for call in calls if call.group in groups)
    most = max(counts.values(), default=0)
    group = min((name for name, count in counts.items() if count == most), default="")
    unbroken: list[Collective] = []
    for call in calls:
        if call.group == group:
            if unbroken and call.number != unbroken[-1].number + 1:
                unbroken.clear()
            unbroken.append(call)
    return unbroken


def period_of(signatures: Sequence[Hashable]) -> int:
    """After how many collectives they come again as they were: those of a step; 0 for never.

    Args:
        signatures: What tells one collective from another, in the order of their calls.
    """
    count = len(signatures)
    for period in range(1, min(MOST_PERIOD, count // 2) + 1):
        same = sum(map(_equal, signatures, signatures[period:]))
        if same >= PERIODIC * (count - period):
            return period
    return 0


def own_work(arrivals: Sequence[Sequence[float]], period: int) -> list[OwnWork]:
    """Each step's own work, as far as ranks waited for each other in it.

    Args:
        arrivals: By rank, when it came to each of the same collectives, in seconds of one clock.
        period: So many collectives make a step.
    """
    columns = list(zip(*arrivals, strict=False))
    last = [max(column) for column in columns]
    # Nobody goes on before the last one has come.
    may_wait = [min(after) >= latest for latest, after in zip(last, columns[1:], strict=False)]
    waits = _waited_for(columns, may_wait, period)
    if not waits:
        return []
    steps: dict[int, list[tuple[int, int]]] = {}
    before: int | None = None
    for here, may in enumerate(may_wait):
        if here % period not in waits:
            continue
        if may and before is not None:
            steps.setdefault(here // period, []).append((before, here))
        before = here if may else None
    return [_summed(spans, columns, last) for spans in steps.values() if len(spans) == len(waits)]


def _waited_for(
    columns: Sequence[Sequence[float]], may_wait: Sequence[bool], period: int
) -> set[int]:
    """Which collectives of a step all ranks wait for, by their place in it."""
    late = [[moment - statistics.median(column) for moment in column] for column in columns]
    ratios = {}
    for place in range(period):
        here = range(place, len(may_wait), period)
        if sum(may_wait[n] for n in here) < OFTEN * max(1, len(here)):
            continue
        after = _unusual([late[n + 1] for n in here])
        change = _unusual([list(map(float.__sub__, late[n + 1], late[n])) for n in here])
        ratios[place] = after / change if change else 1.0
    least = min(ratios.values(), default=0.0)
    return {place for place, ratio in ratios.items() if ratio <= max(least, WAITED)}


def _unusual(rows: Sequence[Sequence[float]]) -> float:
    """How far values lie from what each rank's usually are, squared and summed."""
    return sum(
        sum((value - statistics.median(values)) ** 2 for value in values)
        for values in zip(*rows, strict=True)
    )


def _summed(
    spans: Sequence[tuple[int, int]], columns: Sequence[Sequence[float]], last: Sequence[float]
) -> OwnWork:
    own = (
        sum(moments)
        for moments in zip(*(_since(columns[h], last[b]) for b, h in spans), strict=True)
    )
    return OwnWork(tuple(own), sum(last[here] - last[before] for before, here in spans))


def _since(moments: Sequence[float], begun: float) -> list[float]:
    return [moment - begun for moment in moments]


def _equal(left: Hashable, right: Hashable) -> bool:
    return left == right
