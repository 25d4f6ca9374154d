"""A diagnosis as text for people and as JSON for programs. Pure.

tests/unit/cli/test_doctor.py holds the promises.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.text import count, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.advise.doctor.judge import Diagnosis, FollowOn
    from hpctrain.advise.doctor.sighting import Sighting

FORMAT = 1
"""Of the JSON; raised where a field changes its meaning."""
MOST_SHOWN = 8
_LABEL = 14
_LONGEST = 240
SHORT_LINES = 8
"""Of a diagnosis without --why, with the line that names --why."""
_CUT = " ..."


def in_short(diagnosis: Diagnosis, notes: Sequence[str] = (), *, width: int = 80) -> str:
    """The verdict, the first evidence and what to do first: at most SHORT_LINES lines."""
    sure = f"{diagnosis.certainty} ({diagnosis.code}, {diagnosis.kind})"
    lines = [*_cut("Verdict", diagnosis.headline, width), *_field("", sure, width)]
    for sighting in diagnosis.evidence[:1]:
        place, text = _quoted("Evidence", sighting)
        lines += [place, text[: max(width, 3 * _LABEL)]]
    first = "" if len(diagnosis.do) == 1 else "1. "
    do = _cut("Do", f"{first}{diagnosis.do[0]}", width) if diagnosis.do else []
    for at, step in enumerate(diagnosis.do[1:], 2):
        more = _field("", f"{at}. {step}", width)
        if len(lines) + len(do) + len(more) >= SHORT_LINES:
            break
        do += more
    lines += do
    if notes and len(lines) < SHORT_LINES - 1:
        lines += _cut("Note", notes[0], width)[:1]
    return "\n".join(lines)


def as_text(diagnosis: Diagnosis, notes: Sequence[str] = (), *, width: int = 80) -> str:
    """The verdict first, then what it rests on, what it was not, and what to do."""
    lines = _field("Verdict", f"{diagnosis.headline}", width)
    lines += _field("", f"{diagnosis.certainty} ({diagnosis.code}, {diagnosis.kind})", width)
    if diagnosis.why:
        lines += _field("Why", diagnosis.why, width)
    for at, sighting in enumerate(diagnosis.evidence):
        lines += _quoted("Evidence" if at == 0 else "", sighting)
    for at, rival in enumerate(diagnosis.rivals[:MOST_SHOWN]):
        lines += _quoted("Or" if at == 0 else "", rival)
    for at, follow in enumerate(diagnosis.follow_ons[:MOST_SHOWN]):
        lines += _field("Follows" if at == 0 else "", _follow(follow), width)
    if (more := len(diagnosis.follow_ons) - MOST_SHOWN) > 0:
        lines += _field("", f"and {count(more, 'other kind')} (--json has all)", width)
    for at, ruled in enumerate(diagnosis.ruled_out):
        lines += _field("Not the cause" if at == 0 else "", f"{ruled.what}: {ruled.why}", width)
    for at, step in enumerate(diagnosis.do):
        lines += _field("Do" if at == 0 else "", f"{at + 1}. {step}", width)
    for note in notes[:MOST_SHOWN]:
        lines += _field("Note", note, width)
    return "\n".join(lines)


def _cut(label: str, text: str, width: int) -> list[str]:
    """A field of two lines at most."""
    room = 2 * (max(width, 3 * _LABEL) - _LABEL) - len(_CUT)
    return _field(label, textwrap.shorten(text, room, placeholder=_CUT), width)[:2]


def _field(label: str, text: str, width: int) -> list[str]:
    indent = " " * _LABEL
    return textwrap.wrap(
        text,
        max(width, 3 * _LABEL),
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [label]


def _quoted(label: str, sighting: Sighting) -> list[str]:
    """Where it stands, and the line itself, never broken: it is searched for."""
    indent = " " * _LABEL
    return [f"{label:<{_LABEL}}{where(sighting)}", f"{indent}  {sighting.text[:_LONGEST]}"]


def where(sighting: Sighting) -> str:
    """File and line, rank and node, as far as they are known."""
    place = f"{sighting.source}:{sighting.line}" if sighting.line else sighting.source
    who = [f"rank {sighting.rank}"] if sighting.rank is not None else []
    who += [f"node {sighting.node}"] if sighting.node else []
    return f"{place} ({', '.join(who)})" if who else place


def _follow(follow: FollowOn) -> str:
    ranks = f" on {fold_ranks(follow.ranks)}" if follow.ranks else ""
    times = f", {follow.times} times" if follow.times > 1 else ""
    return f"{follow.what}{ranks}{times}, first at {where(follow.example)}"


def as_json(diagnosis: Diagnosis, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "format": FORMAT,
        "code": diagnosis.code,
        "kind": diagnosis.kind.value,
        "certainty": diagnosis.certainty.value,
        "headline": diagnosis.headline,
        "why": diagnosis.why,
        "evidence": [_sighting(sighting) for sighting in diagnosis.evidence],
        "rivals": [_sighting(sighting) for sighting in diagnosis.rivals],
        "follow_ons": [
            {
                "what": follow.what,
                "kind": follow.example.kind.value,
                "times": follow.times,
                "ranks": list(follow.ranks),
                "first": _sighting(follow.example),
            }
            for follow in diagnosis.follow_ons
        ],
        "ruled_out": [{"what": r.what, "why": r.why} for r in diagnosis.ruled_out],
        "do": list(diagnosis.do),
        "lines": diagnosis.lines,
        "logs": diagnosis.logs,
        "notes": list(notes),
    }


def _sighting(sighting: Sighting) -> dict[str, Any]:
    or_none = {name: getattr(sighting, name) or None for name in ("line", "node", "place")}
    plain = {name: getattr(sighting, name) for name in ("sign", "source", "rank", "text")}
    return {**plain, **or_none, "kind": sighting.kind.value, "details": dict(sighting.details)}
