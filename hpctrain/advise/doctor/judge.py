"""The judgement: of all that speaks of faults the first in time that explains the others. Pure.

A fault that ends a process explains the time-outs of those that waited for it, the connections that
broke, and the signals by which a launcher cleans up; none of these explains a fault. Where two
faults have no order in time, or the sign itself is weak, the diagnosis is not called certain.
tests/unit/doctor/test_judge.py and test_corpus.py hold the promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpctrain.advise.doctor.faults import KNOWLEDGE, Certainty, FaultKind, groups_of
from hpctrain.advise.doctor.sighting import Sighting, precedes
from hpctrain.advise.doctor.signature import Role
from hpctrain.advise.doctor.waits import judge_waits
from hpctrain.advise.doctor.words import advice, headline
from hpctrain.core.base.text import count, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.advise.doctor.sighting import LogFacts

SURVIVED = 5
"""So many losses behind an error: training went on, and did not die of it."""
MESSAGE_LINES = 6
"""Lines of an error's message in which something finer is looked for."""
EVIDENCE = 4
"""Lines that are shown."""

_FAMILIES = groups_of("families")
_EXPLAINS = groups_of("explains")
_BRIDGE = re.compile(r"\b(?:docker\d+|br-[\da-f]{12}|virbr\d+|veth\w+|cni\d+)\b")
_SUDDEN = frozenset({FaultKind.HOST_OOM, FaultKind.NATIVE, FaultKind.SHARED_MEMORY})
_ABORTS = frozenset({"killed-sigabrt", "aborted", "aborted-code", "aborted-by-glog"})
_SRUN, _LEFT = "srun: error: ", "srun-task-exited"
_CRASHES = frozenset({FaultKind.GPU_ASSERT, FaultKind.FP16_OVERFLOW})
"""Ends to which numbers that are none lead."""


@dataclass(frozen=True)
class RuledOut:
    """What it was not.

    Attributes:
        what: In a word.
        why: What says so.
    """

    what: str
    why: str


@dataclass(frozen=True)
class FollowOn:
    """Failures that follow from the cause.

    Attributes:
        what: What was seen.
        times: How often.
        ranks: Whose they were, as far as lines say.
        example: The first line.
    """

    what: str
    times: int
    ranks: tuple[int, ...]
    example: Sighting


@dataclass(frozen=True)
class Diagnosis:
    """What ended a job, with how sure that is.

    Attributes:
        kind: The fault.
        certainty: How sure.
        headline: One line: what, where, with its numbers.
        why: Why this and nothing else; "" where there is nothing to say.
        evidence: Lines and events that say so, the first one first.
        follow_ons: What follows from it.
        ruled_out: What it was not.
        do: What to do next.
        rivals: Other faults that nothing puts in order with this one.
        lines: How many lines were read.
        logs: Of how many logs.
    """

    kind: FaultKind
    certainty: Certainty
    headline: str
    why: str = ""
    evidence: tuple[Sighting, ...] = ()
    follow_ons: tuple[FollowOn, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    do: tuple[str, ...] = ()
    rivals: tuple[Sighting, ...] = ()
    lines: int = 0
    logs: int = 0

    @property
    def code(self) -> str:
        """HT8xx: its row in docs/doctor.md."""
        return KNOWLEDGE[self.kind].code


@dataclass
class _Case:
    """All that was read, sorted by what it can explain."""

    logs: Sequence[LogFacts]
    sightings: list[Sighting]
    by_role: dict[Role, list[Sighting]] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        return sum(log.lines for log in self.logs)


def judge(logs: Sequence[LogFacts], world_size: int | None = None) -> Diagnosis:
    """What ended the job whose logs these are.

    Args:
        logs: What was read of each.
        world_size: How many ranks there are; None where nobody told.
    """
    case = _Case(logs, [sighting for log in logs for sighting in log.sightings])
    for sighting in case.sightings:
        if not sighting.is_handled and not _survived(sighting, logs):
            case.by_role.setdefault(sighting.role, []).append(sighting)
    deaths = case.by_role.get(Role.DEATH, [])
    left = [death for death in deaths if not _ended_for_another(death, deaths)]
    case.by_role[Role.DEATH] = left
    waits = case.by_role.get(Role.WAIT, [])
    return (
        _of_causes(case, case.by_role.get(Role.CAUSE, []), waits)
        or _of_death(case, waits)
        or (_of_waits(case, waits, world_size) if waits else None)
        or _of_the_rest(case)
    )


def _of_causes(
    case: _Case, causes: Sequence[Sighting], waits: Sequence[Sighting]
) -> Diagnosis | None:
    """By a fault that ends a process by itself; None where it follows from waiting in vain."""
    if not causes:
        return None
    first, rivals = _first(causes)
    hint = _numbers_before(first, case)
    if hint is not None:
        return _told(case, hint, (), Certainty.LIKELY)
    return (
        None if _waited_before(first, waits) else _told(case, first, rivals, _sure(first, rivals))
    )


def _of_the_rest(case: _Case) -> Diagnosis:
    """By what is weaker: connections that broke, numbers, deaths that nobody explains."""
    for role in (Role.LINK, Role.HINT, Role.DEATH):
        left = case.by_role.get(role, [])
        if left:
            first = _strongest(left)
            bridge = _bridge(case) if role is Role.LINK else ""
            if bridge:
                return _of_bridge(case, first, bridge)
            return _told(case, first, (), first.certainty)
    return _nothing(case)


def _of_death(case: _Case, waits: Sequence[Sighting]) -> Diagnosis | None:
    """A process that died by itself or was killed, and did not wait for others: it explains them.

    One that aborted or was asked to end has most often waited, or was cleaned up.
    """
    waiting = {wait.rank for wait in waits}
    for death in case.by_role.get(Role.DEATH, []):
        by_itself = death.kind in _SUDDEN and death.sign not in _ABORTS
        if by_itself and not (waits and (death.rank is None or death.rank in waiting)):
            return _told(case, death, (), death.certainty)
    return None


def _ended_for_another(death: Sighting, deaths: Iterable[Sighting]) -> bool:
    """Whether srun ended a task or the step because another task had left with an error."""
    is_srun = death.text.startswith(_SRUN) and death.sign != _LEFT
    return (is_srun or "*** STEP" in death.text) and any(
        other.sign == _LEFT and other.source == death.source and other.offset < death.offset
        for other in deaths
    )


def _survived(sighting: Sighting, logs: Iterable[LogFacts]) -> bool:
    """Whether training went on behind it."""
    if sighting.role is Role.HINT or sighting.is_late:
        return False
    for log in logs:
        if log.source == sighting.source:
            return sum(offset > sighting.offset for offset in log.progress) >= SURVIVED
    return False


def _first(causes: Sequence[Sighting]) -> tuple[Sighting, tuple[Sighting, ...]]:
    """The first in time, and others of another kind that nothing puts behind it."""
    open_ends = [
        cause
        for cause in causes
        if not any(
            precedes(other, cause) and not _is_weak(other) for other in causes if other is not cause
        )
    ]
    candidates = open_ends or list(causes)
    first = min(candidates, key=_strength)
    first = _continued(first, causes)
    explained = _EXPLAINS.get(first.kind, frozenset())
    rivals = {
        (other.kind, other.sign): other
        for other in causes
        if other is not first
        and not _alike(first, other)
        and other.kind not in explained
        and precedes(first, other) is not True
        and not (other.kind is FaultKind.CODE and _continued(other, causes) is first)
    }
    return first, tuple(rivals.values())


def _continued(first: Sighting, causes: Sequence[Sighting]) -> Sighting:
    """An error's message may have several lines, of which a later one says what is wrong."""
    if first.kind is not FaultKind.CODE:
        return first
    return next(
        (
            other
            for other in causes
            if other.kind is not FaultKind.CODE
            and (other.source, other.rank) == (first.source, first.rank)
            and 0 < other.line - first.line <= MESSAGE_LINES
        ),
        first,
    )


def _alike(first: Sighting, other: Sighting) -> bool:
    return first.kind is other.kind and (
        first.kind is not FaultKind.CODE or first.sign == other.sign
    )


def _is_weak(sighting: Sighting) -> bool:
    """An error's name without a traceback, as many programs print and go on, or a mere wrapper."""
    is_bare = sighting.kind is FaultKind.CODE and not sighting.place
    return is_bare or sighting.certainty is Certainty.POSSIBLE


def _strength(sighting: Sighting) -> tuple[int, int, int, float]:
    """Orders faults that have no order in time: what explains most comes first."""
    general = sighting.kind in {FaultKind.CODE, FaultKind.DATA_WORKER, FaultKind.RENDEZVOUS}
    explains = not _EXPLAINS.get(sighting.kind)
    at = sighting.clock.at if sighting.clock is not None else 0.0
    return (general + _is_weak(sighting), sighting.certainty.rank, explains, at)


def _sure(first: Sighting, rivals: Sequence[Sighting]) -> Certainty:
    if not rivals or first.certainty is not Certainty.CERTAIN:
        return first.certainty
    return Certainty.LIKELY


def _strongest(sightings: Sequence[Sighting]) -> Sighting:
    return min(sightings, key=lambda sighting: sighting.certainty.rank)


def _numbers_before(first: Sighting, case: _Case) -> Sighting | None:
    """A loss that was no number before the kind of end to which that leads."""
    hints = case.by_role.get(Role.HINT, [])
    if first.kind not in _CRASHES:
        return None
    sure = (h for h in hints if h.kind is FaultKind.NAN and h.certainty is not Certainty.POSSIBLE)
    return next((h for h in sure if precedes(h, first) is True), None)


def _waited_before(first: Sighting, waits: Sequence[Sighting]) -> bool:
    """Whether ranks had waited in vain before the fault, and it follows from that."""
    waiting = {wait.rank for wait in waits}
    before = any(precedes(wait, first) is True for wait in waits)
    return before and (first.rank is None or first.rank in waiting)


def _of_waits(case: _Case, waits: Sequence[Sighting], world_size: int | None) -> Diagnosis:
    verdict = judge_waits(waits, world_size)
    first = waits[0]
    diagnosis = _told(case, first, (), verdict.certainty, kind=verdict.kind)
    network = _network(case)
    why = f"no error of another rank stands before it{network}"
    return replace(diagnosis, headline=f"{_title(verdict.kind)}: {verdict.summary}", why=why)


def _bridge(case: _Case) -> str:
    """An interface of containers or virtual machines among those that NCCL uses."""
    used = " ".join(log.networks.get("Socket", "") for log in case.logs)
    match = _BRIDGE.search(used)
    return match[0] if match is not None else ""


def _of_bridge(case: _Case, first: Sighting, bridge: str) -> Diagnosis:
    kind = FaultKind.INTERFACE
    diagnosis = _told(case, first, (), Certainty.LIKELY, kind=kind)
    why = f"NCCL uses {bridge} too, which joins containers of one node and no nodes"
    return replace(diagnosis, headline=f"{_title(kind)}: {bridge}", why=why)


def _network(case: _Case) -> str:
    shown = {name: what for log in case.logs for name, what in log.networks.items()}
    return "".join(f"; NCCL used {name}: {what}" for name, what in sorted(shown.items()))


def _title(kind: FaultKind) -> str:
    return KNOWLEDGE[kind].title


def _told(
    case: _Case,
    first: Sighting,
    rivals: tuple[Sighting, ...],
    certainty: Certainty,
    *,
    kind: FaultKind | None = None,
) -> Diagnosis:
    """The diagnosis that rests on one sighting."""
    chosen = kind or first.kind
    same = [s for s in case.sightings if s.kind is first.kind and s is not first]
    evidence = (first, *same[: EVIDENCE - 1])
    return Diagnosis(
        chosen,
        certainty,
        headline(first, chosen, case.sightings),
        _why(first, rivals, case),
        evidence,
        _follow_ons(case, first, rivals),
        _ruled_out(case, chosen, rivals),
        advice(first, chosen, case.sightings),
        rivals,
        case.lines,
        len(case.logs),
    )


def _why(first: Sighting, rivals: Sequence[Sighting], case: _Case) -> str:
    if rivals:
        kinds = sorted({_title(rival.kind) for rival in rivals})
        return f"nothing tells whether it came before: {'; '.join(kinds)}"
    others = [s for s in case.sightings if s is not first and s.kind is not first.kind]
    if first.role is Role.CAUSE and others:
        return "it is the first fault in time, and explains what came after it"
    if first.role is Role.DEATH:
        return "a process is said to have died so; no line says why"
    if first.role is Role.LINK:
        return "connections broke, and no line says that a process at the other end died first"
    return ""


def _follow_ons(case: _Case, first: Sighting, rivals: Sequence[Sighting]) -> tuple[FollowOn, ...]:
    """The other failures, by signature, with how often."""
    left_out = {rival.sign for rival in rivals}
    groups: dict[str, list[Sighting]] = {}
    for sighting in case.sightings:
        if sighting.kind is first.kind and sighting.role is first.role:
            continue
        if sighting.sign not in left_out and sighting.role is not Role.HINT:
            groups.setdefault(sighting.sign, []).append(sighting)
    out = []
    for sign, sightings in groups.items():
        times = sum(log.counts[sign] for log in case.logs) or len(sightings)
        ranks = tuple(sorted({s.rank for s in sightings if s.rank is not None}))
        what = _title(sightings[0].kind)
        out.append(FollowOn(what, times, ranks, sightings[0]))
    return tuple(sorted(out, key=lambda follow: (follow.example.source, follow.example.offset)))


def _ruled_out(case: _Case, kind: FaultKind, rivals: Sequence[Sighting]) -> tuple[RuledOut, ...]:
    rival_kinds = {rival.kind for rival in rivals}
    out = []
    for family, kinds in _FAMILIES.items():
        if kind in kinds or kinds & rival_kinds:
            continue
        seen = [s for s in case.sightings if s.kind in kinds and s.role is not Role.HINT]
        if not seen:
            why = f"no sign of it in {count(case.lines, 'line')}"
            if family == "the network":
                why += _network(case)
        else:
            where = f"line {seen[0].line}" if seen[0].line else "the ledger"
            ranks = sorted({s.rank for s in seen if s.rank is not None})
            who = f" ({fold_ranks(ranks)})" if ranks else ""
            why = f"{where}{who} follows from it"
        out.append(RuledOut(family, why))
    return tuple(out)


def _nothing(case: _Case) -> Diagnosis:
    read = f"{count(case.lines, 'line')} of {count(len(case.logs), 'log')}"
    return Diagnosis(
        FaultKind.UNKNOWN,
        Certainty.NOT_KNOWN,
        f"nothing in {read} says why",
        do=KNOWLEDGE[FaultKind.UNKNOWN].do,
        lines=case.lines,
        logs=len(case.logs),
    )
