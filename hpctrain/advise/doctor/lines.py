r"""What stands around the words of a log's line: who wrote it, when, and colours. Pure.

Launchers put the rank before each line in several ways, and rich draws frames around tracebacks.
tests/unit/doctor/test_lines.py holds the promises.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FRAME = ("│", "┃", "|")
_COLLECTED = re.compile(r"^\S+ \[?(?:stdout|stderr)\]? ")
TABLE_RANK = re.compile(r"^\s*rank\s*: (?P<rank>\d{1,6}) \(local_rank: \d+\)")
"""A line of torchrun's table of failures; the lines behind it are of that rank."""
_MOST_PREFIXES = 8
_BEGINS = (
    r"Traceback \(most|  +File \"|\[(?:rank|default|RANK )\d|\[\d+,\d+\]<std|\d{1,5}: |"
    r"\[?20\d\d-\d\d-|stderr: |Net : Call|\(\w+ pid=|[EWIF]\d{4} |"
    r"(?:\w{1,99}\.){0,9}\w{0,99}(?:Error|Exception)\b"
)
"""What cannot be the words behind a program's own "name: "."""
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # torchrun's own, before all that it tells: a traceback of a rank of its too
        r"^[EWIF]\d{4} [\d:.]+ +\d+ (?:\S*/)?torch/distributed/\S+\.py:\d+\] ?",
        r"^\[[-\d]+ [\d:,]+\] torch\.distributed\.\S+ \[[A-Z]+\] ?",
        r"^(?:ERROR|WARNING|INFO):torch\.distributed\.[\w.]+: ?",
        # a clock of a collector or of `ts`, alone: a logger's own stands before its level
        r"^\s*\[?20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:? ",
        r"^\s*\[rank(?P<rank>\d{1,6})\]: ?",  # torch since 2.4
        r"^\s*\[rank(?P<rank>\d{1,6})\]:?(?=\[)",
        r"^\s*\[default(?P<rank>\d{1,6})\]: ?",  # torchrun --tee
        r"^\s*\[\d+,(?P<rank>\d{1,6})\]<std(?:out|err)>: ?",  # mpirun --tag-output
        r"^\s*\[RANK (?P<rank>\d{1,6})\] ?",
        # pdsh, which DeepSpeed starts: before NCCL's lines, and before what is no text of its own
        r"^\s*(?P<node>[\w.-]+): (?=\[?\w[\w.-]{0,255}(?::\d{0,20}){0,2} ?\[)",
        rf"^\s*(?P<node>[A-Za-z][\w.-]{{0,255}}\d): (?={_BEGINS})",
        r"^\s*(?P<rank>\d{1,5}): ?(?=\S|  )",  # srun --label
        r"^\s*\((?:\w+ )*pid=\d+(?:, ip=(?P<node>[\d.]+))?\)(?:\x1b\[0m)? ?",  # Ray
        r"^stderr: ?",
    )
)
_INSIDE_RANK = re.compile(
    r"\[(?:PG [^\]]{0,80}?)?Rank (?P<rank>\d{1,6})\]|\(RANK (?P<rank2>\d{1,6})\)"
)
_GLOG = re.compile(
    r"\[?[EWIF](?P<month>1[0-2]|0?[1-9])(?P<day>[0-3]\d) "
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:\.\d+)?)"
)
_ISO = re.compile(
    r"(?P<year>20\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T_]"
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d+)?)"
)
_NODE = re.compile(r"^(?P<node>[A-Za-z][\w.-]*):\d+:\d+ \[(?P<device>\d+)\] ")
_NEAR = 120
"""Characters in which the time is looked for: it stands at the beginning."""
_FILE_RANK = re.compile(r"(?:rank|task|_|local)[-_.]?(\d{1,6})(?:\.\w+){0,8}$", re.IGNORECASE)


class Stamp(NamedTuple):
    """When a line was written, by its own words.

    Attributes:
        form: Which kind of stamp; only stamps of one kind are compared, for a container's clock may
            be in another zone than the collector's.
        at: Seconds since the year's begin, or so: months have 31 days here, which orders them.
    """

    form: str
    at: float


class PlainLine(NamedTuple):
    """A line without what its launchers put before it.

    Attributes:
        text: The words.
        rank: Who wrote it, as far as the line says.
        node: Where, the same.
        stream: Names what writes one after the other: lines of several streams mix.
    """

    text: str
    rank: int | None = None
    node: str = ""
    stream: str = ""


def plain(raw: str) -> PlainLine:
    """The line's words, and who wrote it."""
    text = _ESCAPES.sub("", raw) if "\x1b" in raw else raw
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
    inside = _INSIDE_RANK.search(text, 0, _NEAR) if rank is None and "ank" in text.lower() else None
    if inside is not None:
        rank = int(inside["rank"] or inside["rank2"])
    nccl = _NODE.match(text)
    return PlainLine(text, rank, nccl["node"] if nccl else node, stream)


def clock(text: str) -> Stamp | None:
    """When a line says that it was written; None where it does not."""
    for form, pattern in (("glog", _GLOG), ("iso", _ISO)):
        match = pattern.search(text, 0, _NEAR)
        if match is not None:
            month, day, hour, minute = (
                int(match[part]) for part in ("month", "day", "hour", "minute")
            )
            second = float(match["second"].replace(",", "."))
            return Stamp(form, (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second)
    return None


def rank_of_file(name: str) -> int | None:
    """The rank that a log's name tells: rank-00003.log, log_3.err; None for none."""
    match = _FILE_RANK.search(name)
    return int(match[1]) if match else None
