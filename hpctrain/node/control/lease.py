"""How far ranks may go, and what they do at which tick: the protocol, without a word of I/O. Pure.

What is to hold for all ranks is put at the first tick that nobody was granted so far: no rank can
be past it, and the lease that lets a rank begin that tick holds the decision.
docs/development/architecture.md has a picture; tests/unit/control/test_model.py explores all that
can happen.

Reports and leases are states, not events: what is lost is said again by the next, what comes twice
or late changes nothing. No clocks of two machines are compared: times are sent as seconds since
then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable


Kind: TypeAlias = Literal["stop", "warned", "save", "tell", "profile", "memory"]
KINDS: tuple[Kind, ...] = get_args(Kind)

AHEAD = 50
"""So many ticks at most are granted ahead of the fastest rank: so many a stop has to wait for where
ticks get longer all at once."""
LEAD_S = 0.3
"""So long before the fastest rank gets there a tick is granted, until a round trip was measured."""
LEAST_LEAD_S, MOST_LEAD_S = 0.05, 0.5
TRIPS = 3
"""A lead is so many round trips: one to ask and be answered, the rest for what varies."""
MOST_DECISIONS = 64
"""So many a lease holds at most. Where a slow rank has so many before it, all but a stop waits."""
MOST = 2**62
MOST_S = 1e9
_SHORTEST_STEP_S = 1e-6
_UNANSWERED = 4096


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a rank asks for, or all ranks of a subtree. Each number only grows within an attempt.

    Attributes:
        stop: A code of `runtime.agreement`; 0 for none. The largest wins, once.
        warned: How many warnings were heard; those of several ranks add up.
        save: The how-manieth save is asked for.
        tell: The how-manieth time all ranks are asked what their time went to.
        profile: The number of a request to profile.
        memory: The how-manieth copy into the nodes' memory is asked for.
    """

    stop: int = 0
    warned: int = 0
    save: int = 0
    tell: int = 0
    profile: int = 0
    memory: int = 0

    def joined(self, other: Wishes) -> Wishes:
        """Those of both."""
        most = {kind: max(getattr(self, kind), getattr(other, kind)) for kind in KINDS}
        return Wishes(**most | {"warned": min(MOST, self.warned + other.warned)})


@dataclass(frozen=True, slots=True)
class Report:
    """Where the ranks of a node or a subtree are, and what they wish.

    Attributes:
        version: Grows with each report of a sender; the newest counts.
        arrived: The highest tick at which a rank has arrived; -1 before the first.
        behind: The lowest tick at which a rank has arrived, of those that were heard.
        began_ago_s: How long ago the first rank arrived at `arrived`, by the clock of its node.
        step_s: Seconds from tick to tick, as that rank has measured; 0 for unknown.
        wishes: Of all of them.
        ranks: How many have arrived at a tick at all.
        lease: The number of the oldest lease on a board of the subtree.
        lease_ago_s: How long that lease has been there: the rest of the time since the root made it
            is one trip down and one up.
    """

    version: int
    arrived: int
    behind: int
    began_ago_s: float
    step_s: float
    wishes: Wishes
    ranks: int
    lease: int = MOST
    lease_ago_s: float = 0.0

    def aged(self, seconds: float) -> Report:
        """The same, said so much later by the same clock."""
        return replace(
            self,
            began_ago_s=min(MOST_S, self.began_ago_s + max(0.0, seconds)),
            lease_ago_s=min(MOST_S, self.lease_ago_s + max(0.0, seconds)),
        )

    def to_plain(self) -> list[int | float]:
        """Numbers alone, for JSON."""
        wishes = self.wishes
        return [
            *(self.version, self.arrived, self.behind, self.began_ago_s, self.step_s, self.ranks),
            *(self.lease, self.lease_ago_s),
            *(getattr(wishes, kind) for kind in KINDS),
        ]

    @classmethod
    def of_plain(cls, plain: object) -> Report:
        """What `to_plain` gave.

        Raises:
            ValueError: it is anything else.
        """
        version, arrived, behind, began, step, *rest = _items(plain, 8 + len(KINDS))
        ranks, lease, lease_ago, *wishes = rest
        return cls(
            _count(version, least=-1),
            _count(arrived, least=-1),
            _count(behind, least=-1),
            _seconds(began),
            _seconds(step),
            Wishes(*(_count(wish) for wish in wishes)),
            _count(ranks),
            _count(lease),
            _seconds(lease_ago),
        )


NOTHING = Report(-1, -1, MOST, 0.0, 0.0, Wishes(), 0)
"""The report of no rank at all: merged with another it changes nothing."""


def merge(reports: Iterable[Report]) -> Report:
    """All of them as one, in whatever order and however grouped.

    The pace (`arrived`, `began_ago_s`, `step_s`) is the fastest rank's. Seconds must be those of
    the moment: see `Report.aged`.
    """
    merged = NOTHING
    for report in reports:
        pace = max(
            (merged.arrived, merged.began_ago_s, merged.step_s),
            (report.arrived, report.began_ago_s, report.step_s),
        )
        oldest = min((merged.lease, merged.lease_ago_s), (report.lease, report.lease_ago_s))
        merged = Report(
            max(merged.version, report.version),
            pace[0],
            min(merged.behind, report.behind),
            pace[1],
            pace[2],
            merged.wishes.joined(report.wishes),
            min(MOST, merged.ranks + report.ranks),
            *oldest,
        )
    return merged


class Subtree:
    """What a node has heard of its own board and of each child, newest first come or last."""

    def __init__(self) -> None:
        self._heard: dict[object, tuple[Report, float]] = {}
        self._version = 0

    def hear(self, sender: object, report: Report, now_s: float) -> bool:
        """Take in a sender's report, at this node's time; False if a newer one was heard before.

        `sender` is the same for all reports whose versions count on.
        """
        held = self._heard.get(sender)
        if held is not None and held[0].version >= report.version:
            return False
        self._heard[sender] = (report, now_s)
        return True

    def merged(self, now_s: float) -> Report:
        """All that was heard, as this node's next report. A sender that is gone stays in it."""
        self._version += 1
        reports = [report.aged(now_s - heard_s) for report, heard_s in self._heard.values()]
        return replace(merge(reports), version=self._version)


@dataclass(frozen=True, slots=True, order=True)
class Decision:
    """What all ranks do at a tick.

    Attributes:
        value: The code of a stop; else up to which number wishes of this kind are fulfilled by it.
    """

    tick: int
    kind: Kind
    value: int


@dataclass(frozen=True, slots=True)
class Lease:
    """What ranks may do.

    Attributes:
        number: Grows with each lease; the newest counts.
        horizon: The last tick that a rank may begin; -1 for none.
        decisions: In order of ticks: all that some rank may not have passed yet. With the horizon
            at or above a tick, nothing will ever be added at that tick.
    """

    number: int
    horizon: int
    decisions: tuple[Decision, ...] = ()

    def covers(self, tick: int) -> bool:
        """Whether a rank may begin a tick, or has nothing to wait for: it is behind a stop."""
        return tick <= self.horizon or self.stops

    def at(self, tick: int) -> tuple[Decision, ...]:
        """What is to be done at a tick that it covers; behind a stop, that stop."""
        if tick > self.horizon:
            return tuple(decision for decision in self.decisions if decision.kind == "stop")
        return tuple(decision for decision in self.decisions if decision.tick == tick)

    @property
    def stops(self) -> bool:
        """Whether the horizon is the last tick of all."""
        return any(decision.kind == "stop" for decision in self.decisions)

    def to_plain(self) -> list[object]:
        """Plain data, for JSON."""
        decisions = [[one.tick, one.kind, one.value] for one in self.decisions]
        return [self.number, self.horizon, decisions]

    @classmethod
    def of_plain(cls, plain: object) -> Lease:
        """What `to_plain` gave.

        Raises:
            ValueError: it is anything else.
        """
        number, horizon, listed = _items(plain, 3)
        if not isinstance(listed, list) or len(listed) > MOST_DECISIONS:
            raise ValueError(f"not a list of at most {MOST_DECISIONS} decisions")
        lease = cls(_count(number), _count(horizon, least=-1), tuple(map(_decision, listed)))
        if any(decision.tick > lease.horizon for decision in lease.decisions):
            raise ValueError("a decision behind the horizon")
        return lease


def most_ahead(step_s: float, lead_s: float = MOST_LEAD_S) -> int:
    """Ticks that a rank in the middle of a step may be granted, however long that step takes.

    Otherwise one long step would have the root grant many, and a stop would wait for them all.
    """
    return min(AHEAD, 1 + math.floor(lead_s / max(step_s, _SHORTEST_STEP_S)))


class Root:
    """Grants ticks and decides. There is one, on node 0, for each round of ranks."""

    def __init__(self, ranks: int) -> None:
        """Grant nothing yet; a rank that was never heard stands before its first tick."""
        self._ranks = ranks
        self._report = NOTHING
        self._heard_s = 0.0
        self._decided = Wishes()
        self._lease = Lease(0, -1)
        self._trip_s = LEAD_S / TRIPS
        self._made_s: dict[int, float] = {}

    @property
    def lead_s(self) -> float:
        """How long before the fastest rank gets there a tick is granted."""
        return min(MOST_LEAD_S, max(LEAST_LEAD_S, TRIPS * self._trip_s))

    def hear(self, report: Report, now_s: float) -> None:
        """Take in the merged report of all ranks; one older than the last changes nothing."""
        if report.version <= self._report.version:
            return
        # A rank waits at the first tick that it was not granted: a higher one is a broken row.
        arrived = min(report.arrived, self._lease.horizon + 1)
        self._report = replace(report, arrived=arrived)
        self._heard_s = now_s
        self._measure_trip(report, now_s)

    def lease(self, now_s: float) -> Lease:
        """The newest lease; with a new number where something changed."""
        last = self._lease
        if last.stops:
            return last
        wanted = self._wanted(now_s)
        stop = self._report.wishes.stop
        if stop or wanted > last.horizon:
            first = last.horizon + 1
            horizon = first if stop else wanted  # a stop is granted at once, and nothing behind it
            decisions = (*self._open_decisions(), *self._new_decisions(first))
            self._lease = Lease(last.number + 1, horizon, decisions)
            self._note_made(now_s)
        return self._lease

    def due_s(self) -> float | None:
        """When `lease` will have something new though no report comes; None for never."""
        report, step_s = self._report, max(self._report.step_s, _SHORTEST_STEP_S)
        further = self._lease.horizon - report.arrived + 1
        if self._lease.stops or report.step_s == 0 or further > most_ahead(step_s, self.lead_s):
            return None
        return self._heard_s + further * step_s - self.lead_s - report.began_ago_s + 1e-6

    def _wanted(self, now_s: float) -> int:
        """The horizon by the rule; the last one where that lies before it."""
        report, ahead = self._report, 0
        if report.arrived < 0:
            return self._lease.horizon
        if report.step_s > 0:
            step_s = max(report.step_s, _SHORTEST_STEP_S)
            elapsed_s = report.began_ago_s + max(0.0, now_s - self._heard_s)
            ahead = math.floor((elapsed_s + self.lead_s) / step_s)
            ahead = min(ahead, most_ahead(step_s, self.lead_s))
        return max(self._lease.horizon, report.arrived + ahead)

    def _open_decisions(self) -> tuple[Decision, ...]:
        """Those that some rank may not have read: one that was never heard will need all."""
        report = self._report
        behind = report.behind if report.ranks >= self._ranks else -1
        return tuple(decision for decision in self._lease.decisions if decision.tick >= behind)

    def _new_decisions(self, tick: int) -> tuple[Decision, ...]:
        """What was wished and not yet decided, at a tick that nobody was granted so far."""
        has_room = len(self._open_decisions()) + len(KINDS) <= MOST_DECISIONS
        new: list[Decision] = []
        for kind in KINDS:
            value = getattr(self._report.wishes, kind)
            if value > getattr(self._decided, kind) and (has_room or kind == "stop"):
                new.append(Decision(tick, kind, value))
                self._decided = replace(self._decided, **{kind: value})
        return tuple(new)

    def _note_made(self, now_s: float) -> None:
        self._made_s[self._lease.number] = now_s
        if len(self._made_s) > _UNANSWERED:
            del self._made_s[next(iter(self._made_s))]

    def _measure_trip(self, report: Report, now_s: float) -> None:
        made_s = self._made_s.get(report.lease)
        if made_s is None:
            return
        trip_s = max(0.0, now_s - made_s - report.lease_ago_s)
        # Longer at once, shorter slowly: what comes too late is waited for by all ranks.
        self._trip_s = max(trip_s, self._trip_s + 0.1 * (trip_s - self._trip_s))
        for number in [number for number in self._made_s if number < report.lease]:
            del self._made_s[number]


def _items(given: object, length: int) -> list[object]:
    if not isinstance(given, list) or len(given) != length:
        raise ValueError(f"not a list of {length}")
    return given


def _count(given: object, least: int = 0) -> int:
    if type(given) is not int or not least <= given <= MOST:
        raise ValueError("not a number of this protocol")
    return given


def _seconds(given: object) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= MOST_S:
        raise ValueError("not a number of seconds")
    return float(given)


def _decision(given: object) -> Decision:
    tick, name, value = _items(given, 3)
    kind = next((kind for kind in KINDS if kind == name), None)
    if kind is None:
        raise ValueError("not a kind of decision")
    return Decision(_count(tick), kind, _count(value, least=1))
