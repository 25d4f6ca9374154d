"""Find ranks that are slower than the others, and ranks whose collectives are out of step. Pure.

Own work: in a step all ranks take equally long, because the slow one keeps the others waiting. At a
collective that all wait for, all continue at once; a rank's own work is its time up to the next
such one. All times must be of one clock.

Slow ranks: steps are judged in windows of `WINDOW`. A rank stands out if its own work above the
median exceeds the median rank's by 5 deviations and by 2 % of a step, by the window's median or
mean. Three windows in a row name it.

Out of step: a rank that skips the collectives of a step does not hang; it pairs with the others one
step late. Counts that were equal at `EQUAL` ticks and then differ by the same numbers at `ODD`
ticks, while they grow, name it. tests/unit/hangs/test_arrivals.py, test_slow_ranks.py and
test_counts.py hold the promises.
"""

from __future__ import annotations

import operator
import statistics
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpctrain.node.hangs.verdict import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from hpctrain.node.hangs.evidence import Collective


WINDOW = 20
"""Steps."""
RUNNING = 3
"""Windows in a row that name a rank, and that clear it."""
DEVIATIONS, PER_MAD = 5.0, 1.4826
LEAST, LEAST_OF_TWO = 0.02, 0.1
"""Of a step: less is nobody's lateness. Two ranks have no deviation that tells noise from it."""
SLOPE_WINDOWS, GROWS = 20, 0.01
"""A lateness that grows by so much of a step in so many windows is one that grows."""
DATA_PART = 0.5
"""A rank that waited for data for so much of its lateness more than the others is not slow: its
data are."""
GREW, USUAL_WINDOWS = 0.3, 10
"""Steps that take so much longer than in the first windows, at three windows running."""

Kind = Literal["rank", "node", "data", "network"]


class Window(NamedTuple):
    """What so many steps say of each rank.

    Attributes:
        median: By rank, the median of its lateness, as a part of a step.
        mean: The same by the mean.
        step_s: What a step took (median).
        lost_s: By rank, how long all others waited for it in this window, in seconds.
    """

    median: tuple[float, ...]
    mean: tuple[float, ...]
    step_s: float
    lost_s: tuple[float, ...]


@dataclass(frozen=True)
class Straggling:
    """Who is slow.

    Attributes:
        kind: One rank of others on its node; all ranks of a node; ranks that wait for their data;
            or nobody, and steps take longer all the same: the network, or everybody.
        ranks: Empty for nobody.
        nodes: Theirs, by number.
        by: How much of a step they are later than the median rank; for nobody, how much longer
            steps take.
        is_growing: It has become more all along the last windows.
        is_steady: At most steps; else at some of them, and by much.
    """

    kind: Kind
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    by: float
    is_growing: bool = False
    is_steady: bool = True


@dataclass(frozen=True)
class Cleared:
    """Ranks that were named are as quick as the others again.

    Attributes:
        ranks: Which; empty where it was nobody in particular.
    """

    ranks: tuple[int, ...]


def window_of(steps: Sequence[OwnWork]) -> Window:
    """Sum up one or more steps, each with the own work of the same ranks."""
    step_s = statistics.median(step.step_s for step in steps)
    late = [_above_median(step.seconds) for step in steps]
    by_rank = list(zip(*late, strict=True))
    return Window(
        tuple(statistics.median(values) / step_s for values in by_rank),
        tuple(statistics.fmean(values) / step_s for values in by_rank),
        step_s,
        tuple(sum(max(0.0, value) for value in values) for values in by_rank),
    )


def stands_out(lateness: Sequence[float]) -> set[int]:
    """The ranks whose lateness, in parts of a step, is that of no other."""
    if len(lateness) < 2:  # noqa: PLR2004
        return set()
    above = _above_median(lateness)
    if len(lateness) == 2:  # noqa: PLR2004
        return {rank for rank, value in enumerate(above) if value > LEAST_OF_TWO}
    mad = statistics.median(map(abs, above))
    limit = max(DEVIATIONS * PER_MAD * mad, LEAST)
    return {rank for rank, value in enumerate(above) if value > limit}


def slope_of(values: Sequence[float]) -> float:
    """By how much values grow from one to the next (Theil-Sen): outliers change nothing."""
    pairs = [
        (later - earlier) / (j - i)
        for i, earlier in enumerate(values)
        for j, later in enumerate(values[i + 1 :], i + 1)
    ]
    return statistics.median(pairs) if pairs else 0.0


class StragglerJudge:
    """Judges windows, one after the other.

    Attributes:
        named: Ranks that have been named and not cleared.
        lost_s: By rank, how long the others have waited for it since it stood out.
    """

    def __init__(self, nodes: Mapping[int, Sequence[int]]) -> None:
        """Start without windows; `nodes` has the ranks of each node by its number."""
        self._nodes = nodes
        self._node_of = {rank: node for node, ranks in nodes.items() for rank in ranks}
        self._out: dict[int, int] = {}
        self._quiet: dict[int, int] = {}
        self._windows: deque[Window] = deque(maxlen=SLOPE_WINDOWS)
        self._usual: list[float] = []
        self._grown = self._shrunk = 0
        self._is_grown = False
        self.named: set[int] = set()
        self.lost_s: dict[int, float] = {}

    def hear(
        self, window: Window, data_share: Mapping[int, float] | None = None
    ) -> list[Straggling | Cleared]:
        """Return what a window newly says; `data_share`: part of the time spent on data."""
        self._windows.append(window)
        steady, out = self._stand_out(window.median), self._stand_out(window.mean)
        out |= steady
        self._count(window, out)
        new = {rank for rank in out if self._out[rank] >= RUNNING} - self.named
        cleared = {rank for rank in self.named if self._quiet[rank] >= RUNNING}
        self.named = (self.named | new) - cleared
        said: list[Straggling | Cleared] = []
        if cleared:
            said.append(Cleared(tuple(sorted(cleared))))
        said += self._named(window, new, steady, data_share or {})
        return said + self._whether_grown(window, out)

    def _stand_out(self, lateness: Sequence[float]) -> set[int]:
        """Ranks of all, and all ranks of a node whose median is that of no other node.

        Of two nodes the slow one has half of all ranks, and those are no outliers.
        """
        out = stands_out(lateness)
        if max(map(len, self._nodes.values())) > 1:
            nodes = [*self._nodes.values()]
            medians = [statistics.median(lateness[rank] for rank in ranks) for ranks in nodes]
            out |= {rank for node in stands_out(medians) for rank in nodes[node]}
        return out

    def _count(self, window: Window, out: set[int]) -> None:
        for rank, lost_s in enumerate(window.lost_s):
            is_out = rank in out
            self._out[rank] = self._out.get(rank, 0) + 1 if is_out else 0
            self._quiet[rank] = 0 if is_out else self._quiet.get(rank, 0) + 1
            if is_out:
                self.lost_s[rank] = self.lost_s.get(rank, 0.0) + lost_s
            elif self._quiet[rank] >= RUNNING:
                self.lost_s.pop(rank, None)

    def _named(
        self, window: Window, new: set[int], steady: set[int], data_share: Mapping[int, float]
    ) -> list[Straggling | Cleared]:
        """Of each node that has new ones: the whole of it, or its ranks."""
        said: list[Straggling | Cleared] = []
        usual = statistics.median(data_share.values()) if data_share else 0.0
        for node in sorted({self._node_of[rank] for rank in new}):
            ranks = tuple(sorted(rank for rank in new if self._node_of[rank] == node))
            all_named = set(self._nodes[node]) <= self.named
            if all_named:
                ranks = tuple(self._nodes[node])
            late = [max(window.median[rank], window.mean[rank]) for rank in ranks]
            waited = [data_share.get(rank, 0.0) - usual for rank in ranks]
            kind: Kind = "rank"
            if all(more > DATA_PART * by for more, by in zip(waited, late, strict=True)):
                kind = "data"
            elif all_named and len(ranks) > 1 and len(self._nodes) > 1:
                kind = "node"
            grows = any(self._is_growing(rank) for rank in ranks)
            is_steady = bool(steady.intersection(ranks))
            said.append(Straggling(kind, ranks, (node,), max(late), grows, is_steady))
        return said

    def _is_growing(self, rank: int) -> bool:
        if len(self._windows) < SLOPE_WINDOWS:
            return False
        slope = slope_of([window.median[rank] for window in self._windows])
        return slope * SLOPE_WINDOWS > GROWS

    def _whether_grown(self, window: Window, out: set[int]) -> list[Straggling | Cleared]:
        """Whether steps take longer without anybody who is slow."""
        if len(self._usual) < USUAL_WINDOWS:
            self._usual.append(window.step_s)
            return []
        more = window.step_s / statistics.median(self._usual) - 1
        self._grown = self._grown + 1 if more > GREW and not out else 0
        self._shrunk = self._shrunk + 1 if more <= GREW else 0
        if self._is_grown and self._shrunk >= RUNNING:
            self._is_grown = False
            return [Cleared(())]
        if not self._is_grown and self._grown >= RUNNING:
            self._is_grown = True
            return [Straggling("network", (), (), more)]
        return []


def straggling_in_words(straggling: Straggling, nodes: Sequence[str]) -> str:
    """Say in one line who is slow."""
    by, where = f"{straggling.by:.0%}", " and ".join(nodes)
    if straggling.kind == "network":
        why = "the network, the storage, or all of them"
        return f"steps take {by} longer than at first, and no rank is slower than the others: {why}"
    who = f"{ranks_in_words(straggling.ranks)} on {where}"
    if straggling.kind == "node":
        who = f"{where} (all of {ranks_in_words(straggling.ranks)})"
    verb = "is" if straggling.kind == "node" or len(straggling.ranks) == 1 else "are"
    late = f"{verb} later than the others by {by} of a step"
    often = "" if straggling.is_steady else ", at some steps only"
    more = ", and it grows" if straggling.is_growing else ""
    why = ": waiting for data, not computing" if straggling.kind == "data" else ""
    return f"{who} {late}{often}{more}{why}"


def _above_median(values: Sequence[float]) -> list[float]:
    usual = statistics.median_low(values)  # of two: the quicker one
    return [value - usual for value in values]


EQUAL, ODD = 8, 3
KEPT = 24
"""Of each level so many ticks are kept: all, and multiples of powers of two for short ticks."""
LEVELS = (0, 6, 10, 14)


class CountsByTick:
    """What all ranks of one node had called at which tick, newest ticks first forgotten last."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._counts: dict[int, tuple[int, ...]] = {}

    def look(self, ranks: Sequence[Mapping[int, int]]) -> None:
        """Take in each rank's counts by tick; one that does not count shows none."""
        common = set.intersection(*(set(counts) for counts in ranks)) if ranks else set()
        for tick in common:
            self._counts[tick] = tuple(counts[tick] for counts in ranks)
        kept: set[int] = set()
        for level in LEVELS:
            kept |= set(sorted(tick for tick in self._counts if not tick % (1 << level))[-KEPT:])
        self._counts = {tick: self._counts[tick] for tick in sorted(kept)}

    def plain(self) -> list[list[int]]:
        """For JSON: of each tick its number, and one count where all ranks have the same."""
        return [
            [tick, *(counts[:1] if len(set(counts)) == 1 else counts)]
            for tick, counts in self._counts.items()
        ]


class OutOfStep(NamedTuple):
    """Ranks that are out of step.

    Attributes:
        ranks: The fewer ones; of two equal halves either may be wrong.
    """

    ranks: tuple[int, ...]
    summary: str


class JobCounts:
    """Judges the counts of all ranks, tick after tick."""

    def __init__(self) -> None:
        """Nothing was heard."""
        self._last = -1
        self._equal, self._odd = 0, 0
        self._highest = -1
        self._offsets: tuple[int, ...] = ()

    def hear(self, nodes: Sequence[tuple[int, Iterable[Sequence[int]]]]) -> OutOfStep | None:
        """Return, once, who is out of step; `nodes`: number of ranks and `CountsByTick.plain`."""
        by_tick = [
            {tick: tuple(counts) * (ranks if len(counts) == 1 else 1) for tick, *counts in said}
            for ranks, said in nodes
        ]
        common = set.intersection(*(set(ticks) for ticks in by_tick)) if by_tick else set()
        for tick in sorted(tick for tick in common if tick > self._last):
            self._last = tick
            if self._judge([count for ticks in by_tick for count in ticks[tick]]):
                return self._out_of_step([count for ticks in by_tick for count in ticks[tick]])
        return None

    def _judge(self, counts: Sequence[int]) -> bool:
        usual = _usual(counts)
        if usual <= self._highest:  # nothing was called, or a new group counts anew
            self._highest = min(self._highest, usual)
            return False
        self._highest = usual
        offsets = tuple(count - usual for count in counts)
        if not any(offsets):
            self._equal, self._odd = self._equal + 1, 0
            return False
        if self._equal < EQUAL or (self._odd and offsets != self._offsets):
            self._equal = self._odd = 0
            return False
        self._offsets, self._odd = offsets, self._odd + 1
        return self._odd == ODD

    def _out_of_step(self, counts: Sequence[int]) -> OutOfStep:
        usual = _usual(counts)
        odd = tuple(rank for rank, count in enumerate(counts) if count != usual)
        differences = [counts[rank] - usual for rank in odd]
        more = "more" if min(differences) > 0 else "fewer"
        how_many = "" if len(set(differences)) > 1 else f"{abs(differences[0])} "
        verb = "has" if len(odd) == 1 else "have"
        summary = (
            f"{ranks_in_words(odd)} {verb} called {how_many}{more} collectives of all ranks than "
            "the others: they are out of step, and what they exchange is of different steps"
        )
        return OutOfStep(odd, summary)


def _usual(counts: Sequence[int]) -> int:
    """The count of most ranks; of two equal halves rank 0's."""
    return Counter(counts).most_common(1)[0][0]


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
        step_s: What the step took, with what was waited.
    """

    seconds: tuple[float, ...]
    step_s: float


def calls_of(calls: Sequence[Collective], groups: Collection[str]) -> list[Collective]:
    """Return a rank's last calls without a gap, in that of `groups` in which most was called.

    That group is the same on all ranks. `calls` has all groups, in the order of their calls.
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
    """Return after how many collectives, those of a step, `signatures` repeat; 0 for never."""
    count = len(signatures)
    for period in range(1, min(MOST_PERIOD, count // 2) + 1):
        same = sum(map(operator.eq, signatures, signatures[period:]))
        if same >= PERIODIC * (count - period):
            return period
    return 0


def own_work(arrivals: Sequence[Sequence[float]], period: int) -> list[OwnWork]:
    """Return each step's own work, as far as ranks waited for each other in it.

    `arrivals`: by rank, at the same collectives, in seconds of one clock. `period` of them make a
    step.
    """
    columns = list(zip(*arrivals, strict=False))
    last = [max(column) for column in columns]
    # Nobody continues before the last one has come.
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
    since = [[moment - last[before] for moment in columns[here]] for before, here in spans]
    own = map(sum, zip(*since, strict=True))
    return OwnWork(tuple(own), sum(last[here] - last[before] for before, here in spans))
