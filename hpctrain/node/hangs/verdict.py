"""Who is to blame where ranks stand still, and when that is a hang: by what looks found. Pure.

Who is waited for and waits for nobody is the cause; where all who are waited for wait themselves,
they wait in a circle. tests/unit/hangs/test_verdict.py, on what real ranks have left behind, and
test_suspicion.py hold the promises.

```
 rank 0 --- all_reduce 18 of all ranks ---> rank 2 (in the program, at train.py:23)
 rank 1 --- all_reduce 18 of all ranks ---^
 rank 3 --- broadcast 4 of ranks 3, 1 ----> rank 1
```
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpctrain.node.hangs.evidence import Front, RankEvidence
from hpctrain.node.hangs.standing import in_words, unmoved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.node.hangs.evidence import Collective, Frame
    from hpctrain.node.hangs.standing import Stand, Unmoved

HangKind = Literal["stopped", "returned", "behind", "mismatch", "deadlock", "network", "unknown"]

SAME_SHAPES = frozenset(
    {"all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather", "barrier"}
)
"""Collectives to which all ranks bring the same shapes; to others some bring nothing."""
STATES = {
    "T": "stopped (by a signal)",
    "t": "stopped (by a debugger)",
    "Z": "dead",
    "D": "waiting for a disk or a file server",
    "": "gone",
}
_SHOWN = 6
DOUBTFUL = 10
"""So many times the limit has to pass where a verdict is not certain."""
LOOKS = 4
"""In the time after which a suspicion becomes a hang."""
LONGEST_PAUSE_S = 300.0
COMPUTES = 0.02
"""Of a processor: less is used by threads that look now and then whether there is something, and
a process that computes gets more, also where a node has far too much to do."""
IO_BYTES = 64 * 1024
"""Between two looks: a process that reads or writes more works."""
Finding = Literal["calm", "suspected", "waiting", "cleared", "hang"]
"""Nothing is wrong; it was said first now; it still is; it is over; it is certain, said once."""


@dataclass(frozen=True)
class HangVerdict:
    """What a look has come to.

    Attributes:
        kind: "stopped": a process does not run; "returned": a rank's program has ended; "behind": a
            rank has not called what the others wait in; "mismatch": ranks have called different
            collectives; "deadlock": they wait for each other in a circle; "network": all have
            called the same, and it does not end; "unknown".
        ranks: Who is to blame; for a deadlock all of the circle; else empty.
        details: A line for each rank, or for each group of ranks that do the same.
        is_certain: Nothing else explains what was found.
    """

    kind: HangKind
    ranks: tuple[int, ...]
    summary: str
    details: tuple[str, ...] = ()
    is_certain: bool = True


class _Group(NamedTuple):
    """A process group, by what is the same on all of its ranks: its name need not be.

    Attributes:
        which: Of several groups of the same members, in the order in which they were made.
    """

    members: tuple[int, ...]
    which: int


class _Wait(NamedTuple):
    """A rank's wait in a collective.

    Attributes:
        number: The how-manieth of it.
        ranks: Those that have not called it.
    """

    group: _Group
    number: int
    ranks: frozenset[int]


class _Calls:
    """What all ranks have called, by what their groups are called everywhere.

    Attributes:
        fronts: How far each rank of a group has come; ranks that do not say are left out.
        calls: The ranks' collectives, by group, number and rank.
    """

    def __init__(self, looked_at: Sequence[RankEvidence]) -> None:
        self.evidence = {evidence.rank: evidence for evidence in looked_at}
        self.fronts: dict[_Group, dict[int, Front]] = defaultdict(dict)
        self.calls: dict[tuple[_Group, int], dict[int, Collective]] = defaultdict(dict)
        for evidence in looked_at:
            if evidence.recorded is None:
                continue
            groups = _groups_of(evidence)
            for name, group in groups.items():
                front = evidence.recorded.fronts.get(name, Front(0, 0))
                self.fronts[group][evidence.rank] = front
            for call in evidence.recorded.collectives:
                if call.group in groups:
                    self.calls[groups[call.group], call.number][evidence.rank] = call

    def name(self, rank: int, group: _Group, number: int) -> str:
        """What a rank has called, in words."""
        call = self.calls[group, number].get(rank)
        called = f"collective number {number}" if call is None else _in_words(call)
        return f"{called} of {self._members(group)}"

    def _members(self, group: _Group) -> str:
        most = max(len(other.members) for other in self.fronts)
        is_whole = len(group.members) == most and most > _SHOWN
        words = f"all {most} ranks" if is_whole else ranks_in_words(group.members)
        same = [other for other in self.fronts if other.members == group.members]
        return f"{words} (their group {group.which + 1})" if len(same) > 1 else words


def verdict(looked_at: Sequence[RankEvidence]) -> HangVerdict:
    """Return who is to blame, by what a look has found of each rank of the job."""
    stopped = [one for one in looked_at if not one.has_returned and one.process in STATES]
    if stopped:
        return _of_stopped(stopped)
    calls = _Calls(looked_at)
    mismatch = _mismatch(calls)
    if mismatch is not None:
        return mismatch
    waits = _waits(calls)
    if not waits:
        summary = "no rank waits in a collective that is known"
        return HangVerdict("unknown", (), summary, _places(calls), is_certain=False)
    awaited = {rank for waiting in waits.values() for wait in waiting for rank in wait.ranks}
    if not awaited:
        return _of_network(waits, calls)
    causes = [rank for rank in sorted(awaited) if not _is_waiting(rank, waits, calls)]
    return _of_causes(causes, waits, calls) if causes else _of_circle(waits, calls)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 0, 1 and 5", "ranks 0 to 7", "1,024 ranks (0, 2, 4, ...)"."""
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if listed[-1] - listed[0] > 1 and listed == list(range(listed[0], listed[-1] + 1)):
        return f"ranks {listed[0]} to {listed[-1]}"
    if len(listed) > _SHOWN:
        return f"{len(listed):,} ranks ({', '.join(map(str, listed[:3]))}, ...)"
    return f"ranks {', '.join(map(str, listed[:-1]))} and {listed[-1]}"


def _groups_of(evidence: RankEvidence) -> dict[str, _Group]:
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    groups = {}
    # torch names groups by numbers, in the order in which this rank has made them.
    for name in sorted(evidence.groups, key=lambda name: (len(name), name)):
        members = tuple(sorted(evidence.groups[name]))
        groups[name] = _Group(members, counts[members])
        counts[members] += 1
    return groups


def _of_stopped(stopped: Sequence[RankEvidence]) -> HangVerdict:
    """A process that does not run is a cause: no other rank's wait explains it."""
    ranks = tuple(sorted(evidence.rank for evidence in stopped))
    states = sorted({STATES[evidence.process] for evidence in stopped})
    verb = "is" if len(ranks) == 1 else "are"
    summary = f"{ranks_in_words(ranks)} {verb} {' or '.join(states)}"
    is_certain = any(evidence.process != "D" for evidence in stopped)
    return HangVerdict("stopped", ranks, summary, tuple(map(_place, stopped)), is_certain)


def _mismatch(calls: _Calls) -> HangVerdict | None:
    """Ranks that have called different collectives as the same number of a group: the first."""
    first: tuple[_Group, int, dict[tuple[object, ...], list[int]]] | None = None
    for (group, number), called in calls.calls.items():
        if first is not None and number >= first[1]:
            continue
        kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, call in sorted(called.items()):
            kinds[_signature(call)].append(rank)
        if len(kinds) > 1:
            first = (group, number, kinds)
    if first is None:
        return None
    group, number, kinds = first
    sides = sorted(kinds.values(), key=len)
    # Of two sides of one size either may be wrong.
    odd = sides[0] if len(sides[0]) < len(sides[1]) else []
    ways = "; ".join(_way(calls, side, group, number) for side in sides)
    summary = f"the ranks do not call the same: {ways}"
    return HangVerdict("mismatch", tuple(odd), summary, _places(calls), is_certain=bool(odd))


def _way(calls: _Calls, side: Sequence[int], group: _Group, number: int) -> str:
    rank = side[0]
    verb = "calls" if len(side) == 1 else "call"
    at = _at(calls.evidence[rank]) if len(side) == 1 else ""
    return f"{ranks_in_words(side)} {verb} {calls.name(rank, group, number)}{at and ' ' + at}"


def _signature(call: Collective) -> tuple[object, ...]:
    return (call.name, *((call.sizes, call.dtypes) if call.name in SAME_SHAPES else ()))


def _waits(calls: _Calls) -> dict[int, list[_Wait]]:
    waits: dict[int, list[_Wait]] = defaultdict(list)
    for group, fronts in calls.fronts.items():
        for rank, front in fronts.items():
            if front.called > front.completed:
                number = front.completed + 1
                # Of whom nothing is heard it is thought that he has not called it either.
                missing = frozenset(
                    member
                    for member in group.members
                    if fronts.get(member, Front(0, 0)).called < number
                )
                waits[rank].append(_Wait(group, number, missing))
    return waits


def _is_waiting(rank: int, waits: Mapping[int, list[_Wait]], calls: _Calls) -> bool:
    """Whether a rank that others wait for waits itself.

    A collective may be on its way in the background while the program is at something else.
    """
    if not any(wait.ranks for wait in waits.get(rank, [])):
        return False
    frames = calls.evidence[rank].frames
    return not frames or "torch" in PurePath(frames[0].path).parts


def _of_causes(
    causes: Sequence[int], waits: Mapping[int, list[_Wait]], calls: _Calls
) -> HangVerdict:
    lines = [_cause_in_words(rank, waits, calls) for rank in causes]
    many = f"{ranks_in_words(causes)} hold up the others: " if len(causes) > 1 else ""
    evidence = [calls.evidence.get(rank) for rank in causes]
    has_returned = all(seen is not None and seen.has_returned for seen in evidence)
    is_heard = all(seen is not None and seen.recorded is not None for seen in evidence)
    return HangVerdict(
        "returned" if has_returned else "behind",
        tuple(causes),
        many + lines[0],
        (*lines[1:], *_places(calls)),
        is_certain=has_returned or is_heard,
    )


def _cause_in_words(rank: int, waits: Mapping[int, list[_Wait]], calls: _Calls) -> str:
    waiting = [
        (other, wait) for other, others in waits.items() for wait in others if rank in wait.ranks
    ]
    who = "1 rank waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    other, wait = min(waiting, key=lambda pair: pair[1].number)
    what = calls.name(other, wait.group, wait.number)
    evidence = calls.evidence.get(rank)
    if evidence is not None and evidence.has_returned:
        return f"{who} for rank {rank}, whose program has returned, in {what}"
    if evidence is None or evidence.recorded is None:
        at = _at(evidence) if evidence is not None else ""
        return f"{who} for rank {rank}, which says nothing, in {what}{at and '; it is ' + at}"
    at = _at(evidence)
    return f"{who} for rank {rank}, which has not come to {what}{at and '; it is ' + at}"


def _of_circle(waits: Mapping[int, list[_Wait]], calls: _Calls) -> HangVerdict:
    circle = _circle({rank: {r for wait in own for r in wait.ranks} for rank, own in waits.items()})
    links = []
    for rank, awaited in zip(circle, (*circle[1:], circle[0]), strict=True):
        wait = next(wait for wait in waits[rank] if awaited in wait.ranks)
        what = calls.name(rank, wait.group, wait.number)
        at = _at(calls.evidence[rank])
        links.append(f"rank {rank} waits for rank {awaited} in {what}{at and ' ' + at}")
    summary = f"deadlock: {'; '.join(links)}"
    return HangVerdict("deadlock", tuple(sorted(circle)), summary, _places(calls))


def _circle(awaited: Mapping[int, set[int]]) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first."""
    path: list[int] = [min(awaited)]
    while True:
        following = min(awaited[path[-1]], key=lambda rank: (rank not in path, rank))
        if following in path:
            return path[path.index(following) :]
        path.append(following)


def _of_network(waits: Mapping[int, list[_Wait]], calls: _Calls) -> HangVerdict:
    rank = min(waits)
    wait = waits[rank][0]
    what = calls.name(rank, wait.group, wait.number)
    summary = f"all have called {what}, and it does not end: the network, or the library"
    return HangVerdict("network", (), summary, _places(calls), is_certain=False)


def _places(calls: _Calls) -> tuple[str, ...]:
    """Where each rank is; ranks at one place in one line."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank, evidence in sorted(calls.evidence.items()):
        places[_place(evidence).partition(": ")[2]].append(rank)
    return tuple(f"{ranks_in_words(ranks)}: {place}" for place, ranks in places.items())


def _place(evidence: RankEvidence) -> str:
    if evidence.has_returned:
        return f"rank {evidence.rank}: has returned"
    state = STATES.get(evidence.process, "")
    at = _at(evidence) or "where it is is not known"
    return f"rank {evidence.rank}: {state and state + ', '}{at}"


def _at(evidence: RankEvidence) -> str:
    """Where a rank is: the program's own line, and what it does there; "" for not known."""
    frame = own_frame(evidence.frames)
    place = f"at {PurePath(frame.path).name}:{frame.line} {frame.function}" if frame else ""
    step = "" if evidence.step is None else f"step {evidence.step}"
    phase = evidence.phase and f"in {evidence.phase}"
    beside = ", ".join(word for word in (step, phase) if word)
    return " ".join(word for word in (place, beside and f"({beside})") if word)


def own_frame(frames: Sequence[Frame] | None) -> Frame | None:
    """The innermost frame of the program itself: none of Python's, of a library's or of ours.

    Where there is none of the program's, that of a recipe of ours, which is the program then; else
    the innermost of all.
    """
    if not frames:
        return None
    for is_wanted in (_is_own, _is_recipe):
        if (own := next((frame for frame in frames if is_wanted(frame.path)), None)) is not None:
            return own
    return frames[0]


def _is_own(path: str) -> bool:
    parts = PurePath(path).parts
    folders = set(parts[:-1])
    is_library = bool(folders & {"site-packages", "dist-packages", "hpctrain"})
    return (
        not is_library and not any(part.startswith("python3") for part in parts) and "<" not in path
    )


def _is_recipe(path: str) -> bool:
    return ("hpctrain", "recipes") in pairwise(PurePath(path).parts[:-1])


def _in_words(call: Collective) -> str:
    shapes = " ".join(str(list(shape)) for shape in call.sizes)
    return f"{call.name} number {call.number}{shapes and ' ' + shapes}"


class Used(NamedTuple):
    """What a rank and all that it has started have used so far."""

    cpu_s: float
    io_bytes: int


@dataclass(frozen=True)
class JobLook:
    """What a look at all nodes has found.

    Attributes:
        at_s: When, on the looking node's clock.
        stands: Of the ranks whose nodes have answered.
        evidence: Of the same ranks.
        used: Of those whose process is there.
        silent: Ranks whose nodes have not answered.
    """

    at_s: float
    stands: Sequence[Stand]
    evidence: Sequence[RankEvidence]
    used: Mapping[int, Used] = field(default_factory=dict)
    silent: Sequence[int] = ()


class Suspicion:
    """What the looks at a job have come to, on node 0.

    A suspicion becomes a hang when nothing has moved for as long again as the phase may take; ten
    times as long where nothing proves that it cannot end by itself, or where the rank that
    holds up the others computes. A sign of life begins that time anew: slow work costs looks only.

    Attributes:
        verdict: Of the newest look; None while nothing is suspected.
        stands: The ranks that stand, as they were then.
        limit_s: What their phases may take.
        look_again_s: When to look again, on the same clock; infinite for not by itself.
        stood_s: For how long the ranks had stood, of the last suspicion.
    """

    def __init__(self) -> None:
        """Suspect nobody."""
        self.verdict: HangVerdict | None = None
        self.stands: Sequence[Stand] = ()
        self.limit_s = self.stood_s = 0.0
        self.look_again_s = float("inf")
        self._last: JobLook | None = None
        self._still_since_s = 0.0
        self._is_said = self._has_computed = False

    def hear(self, look: JobLook) -> Finding:
        """Judge a look."""
        returned = {one.rank for one in look.evidence if one.has_returned}
        how, stands = unmoved(look.stands, returned)
        if not how:
            return self._nothing(look, stands)
        before, was_suspected = self._last, self.verdict is not None
        self.stands, self.limit_s = stands, max(stand.limit_s for stand in stands)
        self.stood_s = max(stand.stood_s for stand in stands)
        self.verdict, self._last = judged(how, stands, look), look
        if not was_suspected or before is None or _shows_life(self.verdict, before, look):
            self._still_since_s, self._has_computed = look.at_s, False
        needed_s = self._needed_s(self.verdict, before, look)
        still_s = look.at_s - self._still_since_s
        pause_s = min(needed_s / LOOKS, LONGEST_PAUSE_S, max(needed_s - still_s, 0.1))
        self.look_again_s = look.at_s + pause_s
        if not was_suspected:
            return "suspected"
        if still_s >= needed_s and not self._is_said:
            self._is_said = True
            return "hang"
        return "waiting"

    def _nothing(self, look: JobLook, over: Sequence[Stand]) -> Finding:
        was_suspected = self.verdict is not None
        self.verdict, self._last, self._is_said = None, None, False
        limit_s = max((stand.limit_s for stand in over), default=0.0)
        self.look_again_s = look.at_s + limit_s / 2 if over else float("inf")
        return "cleared" if was_suspected else "calm"

    def _needed_s(self, ruling: HangVerdict, before: JobLook | None, look: JobLook) -> float:
        if before is not None and ruling.kind == "behind" and _computes(ruling, before, look):
            self._has_computed = True
        is_clear = ruling.is_certain and not self._has_computed
        return self.limit_s if is_clear else DOUBTFUL * self.limit_s


def judged(how: Unmoved, stands: Sequence[Stand], look: JobLook) -> HangVerdict:
    """Return the verdict on a look, in which the ranks of `stands` do not move."""
    silent = [RankEvidence(rank, "", "?") for rank in look.silent]
    ruling = verdict([*look.evidence, *silent])
    if how == "behind" and ruling.kind == "unknown":
        ranks = tuple(sorted(stand.rank for stand in stands))
        others = max(stand.step for stand in look.stands)
        where = _where(ranks[0], look)
        summary = (
            f"{ranks_in_words(ranks)} {'stands' if len(ranks) == 1 else 'stand'} at "
            f"{in_words(stands)}{where}, while others are at step {others}"
        )
        return replace(ruling, kind="behind", ranks=ranks, summary=summary)
    if ruling.kind == "unknown" and len(look.evidence) == 1:
        summary = f"the only rank stands at {in_words(stands)}{_where(stands[0].rank, look)}"
        return replace(ruling, ranks=(stands[0].rank,), summary=summary)
    return ruling


def _where(rank: int, look: JobLook) -> str:
    frames = next((one.frames for one in look.evidence if one.rank == rank), None)
    frame = own_frame(frames)
    return "" if frame is None else f" (at {frame.path.rpartition('/')[2]}:{frame.line})"


def _computes(ruling: HangVerdict, before: JobLook, look: JobLook) -> bool:
    seconds = max(look.at_s - before.at_s, 1e-3)
    for rank in ruling.ranks:
        used, used_before = look.used.get(rank), before.used.get(rank)
        if used is None or used_before is None:
            continue
        if used.cpu_s - used_before.cpu_s > COMPUTES * seconds:
            return True
    return False


def _fronts(look: JobLook) -> dict[int, object]:
    return {
        one.rank: dict(one.recorded.fronts) for one in look.evidence if one.recorded is not None
    }


def _shows_life(ruling: HangVerdict, before: JobLook, look: JobLook) -> bool:
    """Whether one of those that hold up the others has done something since the last look."""
    if _fronts(before) != _fronts(look):
        return True
    last = {one.rank: one for one in before.evidence}
    now = {one.rank: one for one in look.evidence}
    for rank in ruling.ranks or now:
        if rank in last and rank in now and last[rank].frames != now[rank].frames:
            return True
        used, used_before = look.used.get(rank), before.used.get(rank)
        if ruling.kind not in {"behind", "unknown"} or used is None or used_before is None:
            continue
        if abs(used.io_bytes - used_before.io_bytes) > IO_BYTES:
            return True
    return False
