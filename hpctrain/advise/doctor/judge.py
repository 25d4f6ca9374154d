"""Judge: find the first fault in time that explains the others. Pure.

A fault that ends a process explains others' time-outs, broken connections, and the signals by which
a launcher cleans up. If two faults have no order in time, or the sign is weak, the diagnosis is not
certain. tests/unit/doctor/test_judge.py and test_corpus.py hold the promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.advise.doctor.faults import (
    FAULTS,
    TABLE,
    Certainty,
    Diagnosis,
    FollowOn,
    Role,
    Sighting,
    ranks_of,
)
from hpctrain.advise.doctor.words import advice, headline
from hpctrain.core.base.text import count, duration, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.advise.doctor.faults import LogFacts

_LIMITS: dict[str, int] = TABLE["limits"]
_FAMILIES: dict[str, list[str]] = TABLE["families"]
_EXPLAINS: dict[str, list[str]] = TABLE["explains"]
_SUDDEN = frozenset({"host_oom", "shared_memory"})
_GENERAL = frozenset({"code", "data_worker", "rendezvous"})
_SRUN, _LEFT = "srun: error: ", "srun-task-exited"


class _Case:
    """All that was read, and what of it may be the reason, by what it can explain."""

    def __init__(self, logs: Sequence[LogFacts]) -> None:
        self.logs = logs
        self.lines = sum(log.lines for log in logs)
        self.sightings = [sighting for log in logs for sighting in log.sightings]
        self.by_role: dict[Role, list[Sighting]] = {role: [] for role in Role}
        self.last_resort: list[Sighting] = []
        for log in logs:
            for sighting in log.sightings:
                losses = sum(offset > sighting.offset for offset in log.progress)
                is_one_of_numbers = sighting.kind in _FAMILIES["numbers"]
                if (
                    losses >= _LIMITS["losses_survived"]
                    and not sighting.is_late
                    and not is_one_of_numbers
                ):
                    continue  # training continued after it
                is_hint = sighting.role is Role.HINT and sighting.kind in {"code", "interface"}
                weak = sighting.is_handled or is_hint
                (self.last_resort if weak else self.by_role[sighting.role]).append(sighting)
        # srun ends a task or the step because another task has left with an error
        left = [one for one in self.by_role[Role.DEATH] if one.sign == _LEFT]
        self.by_role[Role.DEATH] = [
            one
            for one in self.by_role[Role.DEATH]
            if one.sign == _LEFT
            or not (one.text.startswith(_SRUN) or "*** STEP" in one.text)
            or not any(other.source == one.source and other.offset < one.offset for other in left)
        ]

    @property
    def network(self) -> str:
        """What NCCL's lines say of the network that it used."""
        used = {name: what for log in self.logs for name, what in log.networks.items()}
        return "".join(f"; NCCL used {name}: {what}" for name, what in sorted(used.items()))


def judge(logs: Sequence[LogFacts], world_size: int | None = None) -> Diagnosis:
    """Return what ended the job whose logs these are.

    Args:
        logs: What was read of each.
        world_size: How many ranks there are; None where not known.
    """
    case = _Case(logs)
    return (
        _of_causes(case)
        or _of_death(case)
        or _of_waits(case, world_size)
        or _of_the_rest(case)
        or _of_last_resort(case)
    )


def _of_causes(case: _Case) -> Diagnosis | None:
    """By a fault that ends a process by itself; None where it follows from waiting in vain."""
    causes, waits = case.by_role[Role.CAUSE], case.by_role[Role.WAIT]
    if not causes:
        return None
    first, rivals = _first(causes)
    if first.kind in _EXPLAINS["nan"]:  # was a loss no number before the end to which that leads?
        for hint in case.by_role[Role.HINT]:
            if hint.kind == "nan" and not _is_weak(hint) and hint.precedes(first):
                return _diagnosis(case, hint, Certainty.LIKELY)
    waited_before = any(wait.precedes(first) for wait in waits)
    if waited_before and (first.rank is None or first.rank in {wait.rank for wait in waits}):
        return None
    is_sure = not rivals or first.certainty is not Certainty.CERTAIN
    return _diagnosis(case, first, first.certainty if is_sure else Certainty.LIKELY, rivals)


def _of_death(case: _Case) -> Diagnosis | None:
    """By a process that died by itself, not after waiting nor because it was cleaned up."""
    waiting = {wait.rank for wait in case.by_role[Role.WAIT]}
    for death in case.by_role[Role.DEATH]:
        crashed = death.kind == "native" and death.certainty is Certainty.LIKELY
        by_itself = death.kind in _SUDDEN or crashed
        if by_itself and not (waiting and (death.rank is None or death.rank in waiting)):
            return _diagnosis(case, death, death.certainty)
    return None


def _of_waits(case: _Case, world_size: int | None) -> Diagnosis | None:
    """By ranks that waited in collectives until their time was up."""
    waits = case.by_role[Role.WAIT]
    if not waits:
        return None
    kind, summary = _who_waited(waits, world_size)
    why = f"no error of another rank stands before it{case.network}"
    diagnosis = _diagnosis(case, waits[0], Certainty.LIKELY, kind=kind, summary=summary)
    return replace(diagnosis, why=why)


def _of_the_rest(case: _Case) -> Diagnosis | None:
    """By what is weaker: connections that broke, numbers, deaths that nobody explains."""
    role = next((r for r in (Role.LINK, Role.HINT, Role.DEATH) if case.by_role[r]), None)
    if role is None:
        return None
    signs = case.by_role[role]
    if role is Role.LINK:  # one that broke says less than the interface over which it went
        signs = [*signs, *(one for one in case.last_resort if one.kind == "interface")]
    first = min(signs, key=lambda sign: sign.certainty.rank)
    return _diagnosis(case, first, first.certainty)


def _of_last_resort(case: _Case) -> Diagnosis:
    """By an error that was handled or only reported, or whose end the log does not have."""
    if errors := [one for one in case.last_resort if one.kind == "code"]:
        first = max(errors[::-1], key=lambda one: (one.role is not Role.HINT, bool(one.details)))
        return _diagnosis(case, first, Certainty.POSSIBLE)
    words = f"nothing in {count(case.lines, 'line')} of {count(len(case.logs), 'log')} says why"
    do, logs = FAULTS["unknown"].do, len(case.logs)
    return Diagnosis("unknown", Certainty.NOT_KNOWN, words, do=do, lines=case.lines, logs=logs)


def _first(causes: Sequence[Sighting]) -> tuple[Sighting, tuple[Sighting, ...]]:
    """The first in time, and others of another kind that nothing puts behind it."""
    strong = [cause for cause in causes if not _is_weak(cause)]
    open_ends = [
        one
        for one in causes
        if not any(
            other.precedes(one) and other.kind not in _EXPLAINS.get(one.kind, ())
            for other in strong
        )
    ]
    first = _continued(min(open_ends or causes, key=_strength), causes)
    explained = _EXPLAINS.get(first.kind, ())
    rivals = {
        (other.kind, other.sign): other
        for other in causes
        if other is not first
        and not (other.kind == first.kind and (first.kind != "code" or first.sign == other.sign))
        and other.kind not in explained
        and first.precedes(other) is not True
        and not (other.kind == "code" and _continued(other, causes) is first)
    }
    return first, tuple(rivals.values())


def _continued(first: Sighting, causes: Sequence[Sighting]) -> Sighting:
    """An error's message may have several lines, of which a later one says what is wrong."""
    finer = (
        other
        for other in causes
        if first.kind == "code"
        and other.kind != "code"
        and (other.source, other.rank) == (first.source, first.rank)
        and 0 < other.line - first.line <= _LIMITS["message_lines"]
    )
    return next(finer, first)


def _is_weak(sighting: Sighting) -> bool:
    """An error's name without a traceback, as programs print and continue, or a mere wrapper."""
    is_bare = sighting.kind == "code" and not sighting.place
    return is_bare or sighting.certainty is Certainty.POSSIBLE


def _strength(sighting: Sighting) -> tuple[int, int, int, float]:
    """Orders faults that have no order in time: what explains most comes first."""
    general = (sighting.kind in _GENERAL) + _is_weak(sighting)
    at = sighting.clock.at if sighting.clock is not None else 0.0
    return (general, sighting.certainty.rank, sighting.kind not in _EXPLAINS, at)


def _who_waited(waits: Sequence[Sighting], world_size: int | None) -> tuple[str, str]:
    """Return the kind of fault, and one line: who waited in what, and who did not report."""
    ranks, calls = ranks_of(waits), dict[int, tuple[str, int]]()
    for wait in waits:
        if wait.rank is not None and wait.details.keys() >= {"operation", "number"}:
            call = (wait.details["operation"], int(wait.details["number"]))
            calls.setdefault(wait.rank, call)
    by_call: dict[tuple[str, int], list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(rank)
    limits = (int(wait.details["limit"]) for wait in waits if "limit" in wait.details)
    limit = next((f" for {duration(one / 1000)}" for one in limits), "")
    if not by_call:
        return "hang", f"{fold_ranks(ranks) if ranks else 'ranks'} waited for the others{limit}"
    if len(by_call) == 1:
        ((name, place),) = by_call
        text = f"{fold_ranks(ranks)} waited in {name} #{place}{limit}"
        missing = sorted({*range(world_size or ranks[-1] + 1)}.difference(ranks))
        if 0 < len(missing) < len(ranks):
            text += f"; {fold_ranks(missing)} did not report: look there first"
        return "hang", text
    parts = [f"{fold_ranks(who)} in {name} #{number}" for (name, number), who in by_call.items()]
    shown = ", ".join(parts[: _LIMITS["calls_shown"]])
    text = f"ranks waited in different collectives{limit}: {shown}"
    numbers = [number for _, number in by_call]
    if max(numbers) - min(numbers) <= _LIMITS["near_calls"]:
        return "desync", text
    return "hang", f"{text} (they may be of different groups)"


def _diagnosis(
    case: _Case,
    first: Sighting,
    certainty: Certainty,
    rivals: tuple[Sighting, ...] = (),
    *,
    kind: str = "",
    summary: str = "",
) -> Diagnosis:
    """Return the diagnosis that rests on one sighting, of its kind or of a finer one."""
    kind = kind or first.kind
    is_alone = all(other.kind == first.kind for other in case.sightings)
    why = "" if first.role is Role.CAUSE and is_alone else TABLE["whys"].get(first.role, "")
    if rivals:
        titles = sorted({FAULTS[rival.kind].title for rival in rivals})
        why = f"nothing tells whether it came before: {'; '.join(titles)}"
    same = [s for s in case.sightings if s.kind == first.kind and s is not first]
    return Diagnosis(
        kind,
        certainty,
        f"{FAULTS[kind].title}: {summary}" if summary else headline(first, kind, case.sightings),
        why,
        (first, *same[: _LIMITS["evidence"] - 1]),
        _follow_ons(case, first, rivals),
        _ruled_out(case, kind, rivals),
        advice(first, kind, case.sightings),
        rivals,
        case.lines,
        len(case.logs),
    )


def _follow_ons(case: _Case, first: Sighting, rivals: Sequence[Sighting]) -> tuple[FollowOn, ...]:
    """The other failures, by signature, with how often; in the order of their first lines."""
    left_out = {rival.sign for rival in rivals}
    groups: dict[str, list[Sighting]] = {}
    for sighting in sorted(case.sightings, key=lambda one: (one.source, one.offset)):
        is_same = sighting.kind == first.kind and sighting.role is first.role
        if not is_same and sighting.sign not in left_out and sighting.role is not Role.HINT:
            groups.setdefault(sighting.sign, []).append(sighting)
    return tuple(
        FollowOn(
            FAULTS[some[0].kind].title,
            sum(log.counts[sign] for log in case.logs) or len(some),
            ranks_of(some),
            some[0],
        )
        for sign, some in groups.items()
    )


def _ruled_out(case: _Case, kind: str, rivals: Sequence[Sighting]) -> dict[str, str]:
    out = {}
    for family, kinds in _FAMILIES.items():
        if kind in kinds or any(rival.kind in kinds for rival in rivals):
            continue
        seen = [s for s in case.sightings if s.kind in kinds and s.role is not Role.HINT]
        if seen:
            where = f"line {seen[0].line}" if seen[0].line else "the ledger"
            ranks = ranks_of(seen)
            who = f" ({fold_ranks(ranks)})" if ranks else ""
            out[family] = f"{where}{who} follows from it"
        else:
            network = case.network if family == "the network" else ""
            out[family] = f"no sign of it in {count(case.lines, 'line')}{network}"
    return out
