"""Who is to blame where ranks stand still: from what a look has found of each. Pure.

A rank waits in a collective that it has called and that is not over. It waits for the members of
the group that have not called it. Who is waited for and waits for nobody is the cause; where all
who are waited for wait themselves, they wait in a circle. tests/unit/hangs/test_verdict.py holds
the promises, on what real ranks have left behind.

```
 rank 0 --- all_reduce 18 of all ranks ---> rank 2 (in the program, at train.py:23)
 rank 1 --- all_reduce 18 of all ranks ---^
 rank 3 --- broadcast 4 of ranks 3, 1 ----> rank 1
```
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpctrain.node.hangs.evidence import Front

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.node.hangs.evidence import Collective, Frame, RankEvidence

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


@dataclass(frozen=True)
class HangVerdict:
    """What a look has come to.

    Attributes:
        kind: "stopped": a process does not run; "returned": a rank's program has ended; "behind": a
            rank has not called what the others wait in; "mismatch": ranks have called different
            collectives; "deadlock": they wait for each other in a circle; "network": all have
            called the same, and it does not end; "unknown".
        ranks: Who is to blame; for a deadlock all of the circle; else empty.
        summary: In one line.
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
        members: Its ranks.
        which: Of several groups of the same members, in the order in which they were made.
    """

    members: tuple[int, ...]
    which: int


class _Wait(NamedTuple):
    """A rank's wait in a collective.

    Attributes:
        group: Of which group.
        number: The how-manieth of it.
        ranks: Those that have not called it.
    """

    group: _Group
    number: int
    ranks: frozenset[int]


class _Calls:
    """What all ranks have called, by what their groups are called everywhere.

    Attributes:
        evidence: By rank.
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
    stopped = [evidence for evidence in looked_at if _does_not_run(evidence)]
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


def _does_not_run(evidence: RankEvidence) -> bool:
    return not evidence.has_returned and evidence.process in STATES


def _of_stopped(stopped: Sequence[RankEvidence]) -> HangVerdict:
    """A process that does not run is a cause: no other rank's wait explains it.

    But for "D", in which a rank is now and then that only reads slowly.
    """
    ranks = tuple(sorted(evidence.rank for evidence in stopped))
    states = sorted({STATES[evidence.process] for evidence in stopped})
    summary = f"{ranks_in_words(ranks)} {_is(ranks)} {' or '.join(states)}"
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
    """What has to be the same on all ranks."""
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


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
