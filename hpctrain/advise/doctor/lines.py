"""Take a log's line apart: who wrote it, when, and its words (lines.toml has the forms). Pure.

tests/unit/doctor/test_lines.py holds the promises.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

LONGEST_LINE = 8192
"""Characters of a line that are looked at."""
_FRAME = ("│", "┃", "|")
_MOST_PREFIXES = 8
LINES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("lines.toml").read_text("utf-8"))
_BEGINS = "|".join(LINES["begins"])
_PREFIXES = [re.compile(prefix.replace("{begins}", _BEGINS)) for prefix in LINES["prefixes"]]
FORMS = {name: re.compile(form) for name, form in LINES["forms"].items()}
_CLOCKS = {name: re.compile(form) for name, form in LINES["clocks"].items()}
_NEAR = 120
"""Characters in which the time is looked for: it stands at the beginning."""


class Stamp(NamedTuple):
    """When a line was written, by its own words; those of other forms may be of another zone."""

    form: str
    at: float  # seconds since the year's begin, or so: months have 31 days here


class PlainLine(NamedTuple):
    """A line without what its launchers put before it, and who wrote it, as far as it says."""

    text: str
    rank: int | None = None
    node: str = ""
    stream: str = ""  # what writes one line after the other: lines of several mix


def plain(raw: str) -> PlainLine:
    """Return the line's words, and who wrote it."""
    text = FORMS["escape"].sub("", raw) if "\x1b" in raw else raw
    text, rank, node, stream = text.rstrip(), None, "", ""
    for _ in range(_MOST_PREFIXES):
        match = next(filter(None, (prefix.match(text) for prefix in _PREFIXES)), None)
        if match is None:
            break
        named = match.groupdict()
        # The innermost is the rank's own; an outer one may be a node's, or one of the node's ranks.
        rank = int(named["rank"]) if named.get("rank") else rank
        node = named.get("node") or node
        if named:
            stream += match[0].strip()
        text = text[match.end() :]
    if text.startswith(_FRAME) and text[1:2].isspace():
        text = text[2:]
        text = (text[:-1] if text.endswith(_FRAME) else text).rstrip()
    if rank is None and "ank" in text.lower():
        inside = FORMS["rank_inside"].search(text, 0, _NEAR)
        rank = int(inside["rank"] or inside["rank2"]) if inside is not None else None
    nccl = FORMS["node_of_nccl"].match(text)
    return PlainLine(text, rank, nccl["node"] if nccl else node, stream)


def clock(text: str) -> Stamp | None:
    """Return when a line says that it was written; None where it does not."""
    for form, pattern in _CLOCKS.items():
        if (match := pattern.search(text, 0, _NEAR)) is not None:
            at = 0.0
            for part, size in (("month", 0), ("day", 31), ("hour", 24), ("minute", 60)):
                at = at * size + int(match[part])
            return Stamp(form, at * 60 + float(match["second"].replace(",", ".")))
    return None


def rank_of_file(name: str) -> int | None:
    """Return the rank in a log's name (rank-00003.log, log_3.err); None for none."""
    match = FORMS["rank_of_file"].search(name)
    return int(match[1]) if match else None
