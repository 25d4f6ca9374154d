"""Put a diagnosis into words: headline and advice, text for people, JSON for programs. Pure.

tests/unit/doctor/test_words.py and tests/unit/cli/test_doctor.py hold the promises.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

from hpctrain.advise.doctor.faults import FAULTS, TABLE, Role, ranks_of
from hpctrain.core.base.text import count, fold_ranks, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpctrain.advise.doctor.faults import Diagnosis, Sighting

FORMAT = 1
"""Of the JSON; raised where a field changes its meaning."""
MOST_SHOWN = 8
SHORT_LINES = 8
"""Of a diagnosis without --why, with the line that names --why."""
_LABEL = 14
_LONGEST_QUOTE = 240
_LONGEST_MESSAGE = 200
_CUT = " ..."
_PART = re.compile(r"\{(\w+)\}")

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "bytes": 1}
_SIZE = r"(?<![\d.])(\d{1,15}(?:\.\d{1,15})?) ([KMGT]iB|bytes)"
_SIZES = {name: re.compile(text.replace("{size}", _SIZE)) for name, text in TABLE["sizes"].items()}
"""What torch's allocator prints when a GPU's memory is out."""
_MEMORY: dict[str, Any] = TABLE["gpu_memory"]


def headline(first: Sighting, kind: str, sightings: Sequence[Sighting]) -> str:
    """Return one line: what, on which rank, with its numbers."""
    ranks = ranks_of(s for s in sightings if s.kind == first.kind)
    who = f" on {fold_ranks(ranks)}" if ranks else ""
    node = f" (node {first.node})" if first.node else ""
    if first.role is Role.DEATH and kind == "host_oom":
        how = "died at once" if "SYSTEM_ERROR" in first.text else "was killed by SIGKILL"
        return f"a process {how}{who}{node}: most often a node's memory is out"
    parts = {key: value.strip() for key, value in first.details.items()}
    parts["peer"] = parts.get("peer", "").strip("[]()").rstrip(".")
    is_long = len(first.text) > _LONGEST_MESSAGE
    parts["message"] = f"{first.text[: _LONGEST_MESSAGE - 3]}..." if is_long else first.text
    parts["place"] = first.place
    parts["memory"] = gpu_memory(first.text)[0] if kind == "gpu_oom" else ""
    parts["meaning"] = TABLE["xids"].get(parts.get("xid", ""), "see NVIDIA's list of Xid errors")
    some, all_of = _filled(FAULTS[kind].first_of, parts), _filled(FAULTS[kind].all_of, parts)
    detail = ", ".join(all_of) or (some[0] if some else parts["message"])
    return f"{FAULTS[kind].title}{who}{node}{': ' if detail else ''}{detail}"


def _filled(templates: Iterable[str], parts: Mapping[str, str]) -> list[str]:
    """Return the texts whose parts are all known, with these filled in."""
    filled = (each for each in templates if all(parts.get(name) for name in _PART.findall(each)))
    return [_PART.sub(lambda match: parts[match[1]], each) for each in filled]


def advice(first: Sighting, kind: str, sightings: Iterable[Sighting]) -> Sequence[str]:
    """Return what to do, what fits this case best first."""
    do = first.advice or FAULTS[kind].do
    if kind == "gpu_oom":
        memories = (gpu_memory(sighting.text) for sighting in sightings)
        return (*next((do for words, do in memories if words), ()), *do)
    if kind == "checkpoint" and first.details.get("was") and first.details.get("now"):
        return do[:1]
    return do


def gpu_memory(text: str) -> tuple[str, tuple[str, ...]]:
    """Return what torch's allocator prints, in words, and what its numbers call for first.

    Both are empty where the text has no sizes.
    """
    sizes, others = {}, list[int]()
    for name, pattern in _SIZES.items():
        matched = (filter(None, match.groups()) for match in pattern.finditer(text))
        each = [int(float(number) * _UNITS[unit]) for number, unit in matched]
        sizes[name] = next(iter(each), 0)
        others = each if name == "others" else others
    asked, capacity, used = sizes["asked"], sizes["capacity"], sizes["allocated"]
    if not asked or not capacity:
        return "", ()
    idle = sizes["unallocated"] or max(0, sizes["reserved"] - used)
    # In a container torch takes itself for another process.
    own = min((one for one in others if one >= used + idle), default=0)
    sizes["others"] = sum(others) - own * (used + sum(others) > capacity)
    words = f"asked for {size(asked)} of {size(capacity)}"
    amounts = (used, idle, sizes["others"])
    for amount, what in zip(amounts, _MEMORY["words"], strict=True):
        words += f", {size(amount)} {what}" if amount else ""
    if idle >= asked and idle > _MEMORY["worth_a_setting"] * capacity:
        return f"{words}: fragmentation, not capacity", (_MEMORY["fragmented"],)
    large = (name for name in ("others", "asked") if sizes[name] > _MEMORY["much"] * capacity)
    return words, tuple(_MEMORY[name] for name in large)[:1]


def in_short(diagnosis: Diagnosis, notes: Sequence[str] = (), *, width: int = 80) -> str:
    """Return the verdict, the first evidence and what to do first: at most SHORT_LINES lines."""
    lines = [*_cut("Verdict", diagnosis.headline, width), *_certainty(diagnosis, width)]
    for sighting in diagnosis.evidence[:1]:
        place, text = _quoted("Evidence", sighting)
        lines += [place, text[: max(width, 3 * _LABEL)]]
    first = "" if len(diagnosis.do) == 1 else "1. "
    lines += _cut("Do", f"{first}{diagnosis.do[0]}", width) if diagnosis.do else []
    for at, step in enumerate(diagnosis.do[1:], 2):
        more = _field("", f"{at}. {step}", width)
        if len(lines) + len(more) >= SHORT_LINES:
            break
        lines += more
    if notes and len(lines) < SHORT_LINES - 1:
        lines += _cut("Note", notes[0], width)[:1]
    return "\n".join(lines)


def as_text(diagnosis: Diagnosis, notes: Sequence[str] = (), *, width: int = 80) -> str:
    """Return the verdict, then what it rests on, what it was not, and what to do."""
    lines = [*_field("Verdict", diagnosis.headline, width), *_certainty(diagnosis, width)]
    if diagnosis.why:
        lines += _field("Why", diagnosis.why, width)
    for label, sightings in (("Evidence", diagnosis.evidence), ("Or", diagnosis.rivals)):
        for at, sighting in enumerate(sightings[:MOST_SHOWN]):
            lines += _quoted("" if at else label, sighting)
    follows = []
    for follow in diagnosis.follow_ons[:MOST_SHOWN]:
        ranks = f" on {fold_ranks(follow.ranks)}" if follow.ranks else ""
        times = f", {follow.times} times" if follow.times > 1 else ""
        follows.append(f"{follow.what}{ranks}{times}, first at {_where(follow.example)}")
    if (more := len(diagnosis.follow_ons) - MOST_SHOWN) > 0:
        follows.append(f"and {count(more, 'other kind')} (--json has all)")
    ruled_out = [f"{what}: {why}" for what, why in diagnosis.ruled_out.items()]
    do = [f"{at}. {step}" for at, step in enumerate(diagnosis.do, 1)]
    for label, texts in (("Follows", follows), ("Not the cause", ruled_out), ("Do", do)):
        for at, text in enumerate(texts):
            lines += _field("" if at else label, text, width)
    for note in notes[:MOST_SHOWN]:
        lines += _field("Note", note, width)
    return "\n".join(lines)


def _certainty(diagnosis: Diagnosis, width: int) -> list[str]:
    return _field("", f"{diagnosis.certainty} ({diagnosis.code}, {diagnosis.kind})", width)


def _cut(label: str, text: str, width: int) -> list[str]:
    """Return a field of two lines at most."""
    room = 2 * (max(width, 3 * _LABEL) - _LABEL) - len(_CUT)
    return _field(label, textwrap.shorten(text, room, placeholder=_CUT), width)[:2]


def _field(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 3 * _LABEL),
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [label]


def _quoted(label: str, sighting: Sighting) -> list[str]:
    """Return where it stands, and the line itself, never broken: it is searched for."""
    quote = sighting.text[:_LONGEST_QUOTE]
    return [f"{label:<{_LABEL}}{_where(sighting)}", f"{' ' * _LABEL}  {quote}"]


def _where(sighting: Sighting) -> str:
    """Return file and line, rank and node, as far as they are known."""
    place = f"{sighting.source}:{sighting.line}" if sighting.line else sighting.source
    who = [f"rank {sighting.rank}"] if sighting.rank is not None else []
    who += [f"node {sighting.node}"] if sighting.node else []
    return f"{place} ({', '.join(who)})" if who else place


def as_json(diagnosis: Diagnosis, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return everything, for programs."""
    plain = ("code", "kind", "certainty", "headline", "why", "do", "lines", "logs")
    return {
        "format": FORMAT,
        **{name: getattr(diagnosis, name) for name in plain},
        **{name: [*map(_sighting, getattr(diagnosis, name))] for name in ("evidence", "rivals")},
        "follow_ons": [
            {
                **{name: getattr(follow, name) for name in ("what", "times", "ranks")},
                "kind": follow.example.kind,
                "first": _sighting(follow.example),
            }
            for follow in diagnosis.follow_ons
        ],
        "ruled_out": [{"what": what, "why": why} for what, why in diagnosis.ruled_out.items()],
        "notes": list(notes),
    }


def _sighting(sighting: Sighting) -> dict[str, Any]:
    always = ("sign", "source", "rank", "text", "kind", "details")
    return {
        **{name: getattr(sighting, name) for name in always},
        **{name: getattr(sighting, name) or None for name in ("line", "node", "place")},
    }
