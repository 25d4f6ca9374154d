"""Parsers of what SLURM's commands print. Pure: no command is run here, no clock is read.

`scontrol show job` is read in its many-line form: there a value with spaces and '=' (a job name, a
path) ends at its line's end, while in the one-line form it could pass itself off as the job's
state.
"""

from __future__ import annotations

import logging
import re
import time
from typing import NamedTuple

from hpctrain.core.base.host_list import expand_nodes

log = logging.getLogger("hpctrain.scheduler")

_PAIR = re.compile(r"(?:^|\s)([A-Z][\w/:]*)=")
_COUNT = re.compile(r"[0-9]{1,11}")
_WHOLE_LINE = frozenset(
    {
        "AdminComment",
        "Command",
        "Comment",
        "Extra",
        "StdErr",
        "StdIn",
        "StdOut",
        "SubmitLine",
        "SystemComment",
        "WorkDir",
    }
)
NOTHING = frozenset({"", "(null)", "N/A", "None", "NONE", "Unknown", "UNLIMITED"})


def parse_records(text: str) -> list[dict[str, str]]:
    """The records that `scontrol show job`, `node` or `partition` printed, a dict each."""
    records: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith(("JobId=", "NodeName=", "PartitionName=")):
            records.append({})
        if records and line.strip():
            # What a user wrote (a comment, a reason) may hold " JobState=..." and comes after it.
            records[-1] = _fields(line.strip()) | records[-1]
    return records


def parse_jobs(text: str) -> list[dict[str, str]]:
    """The same of jobs alone."""
    return [record for record in parse_records(text) if "JobId" in record]


def _fields(line: str) -> dict[str, str]:
    """The fields of one line; one that may hold anything takes the rest of its line."""
    values = list(_PAIR.finditer(line))
    fields = {}
    for position, match in enumerate(values):
        name = match[1]
        if name == "JobName" or name in _WHOLE_LINE:
            fields[name] = line[match.end() :]
            break
        end = values[position + 1].start() if position + 1 < len(values) else len(line)
        fields[name] = line[match.end() : end].strip()
    return fields


def parse_time(value: str) -> float | None:
    """Seconds since the epoch of one of SLURM's times; None where SLURM has none.

    Both forms are read: the epoch (what `command.run` asks for) and local `2026-01-14T10:20:30`.
    """
    if value in NOTHING:
        return None
    if (epoch := parse_count(value)) is not None:
        return float(epoch)
    try:
        return time.mktime(time.strptime(value, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def parse_count(value: str) -> int | None:
    """A whole number from 0 on that a clock or a counter can hold; None for anything else."""
    return int(value) if _COUNT.fullmatch(value) else None


def parse_state(value: str) -> str:
    """The state in capitals, without what sacct adds ("CANCELLED by 1000", "CANCELLED+")."""
    match = re.match(r"[A-Z_]+", value.strip().upper())
    return match[0] if match else "UNKNOWN"


BULK_FORMAT = "%i|%T|%N|%S|%e|%Q|%r|%o"


def parse_bulk(text: str) -> list[list[str]]:
    """Rows of squeue in BULK_FORMAT, a list of its columns each; the command comes last."""
    columns = BULK_FORMAT.count("|")
    rows = [[part.strip() for part in line.split("|", columns)] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns + 1]


SACCT_FIELDS = ("JobID", "State", "Start", "End", "NodeList")
SACCT_COMMAND = (
    "sacct",
    "--allocations",
    "--duplicates",
    "--noheader",
    "--parsable2",
    f"--format={','.join(SACCT_FIELDS)}",
)


class AccountRow(NamedTuple):
    """One incarnation of a job in accounting."""

    job_id: str
    state: str
    start: float | None
    end: float | None
    nodes: str


def parse_sacct(text: str) -> list[AccountRow]:
    """Every incarnation of a job, oldest first: a requeue leaves a row."""
    rows = [line.split("|") for line in text.splitlines()]
    return [
        AccountRow(
            job_id=row[0],
            state=parse_state(row[1]),
            start=parse_time(row[2]),
            end=parse_time(row[3]),
            nodes="" if row[4] == "None assigned" else row[4],
        )
        for row in rows
        if len(row) == len(SACCT_FIELDS)
    ]


def names_of(nodelist: str) -> list[str]:
    """The names of a node list, or the list as it is: SLURM may read what nobody here can."""
    try:
        return expand_nodes(nodelist)
    except ValueError:
        return [nodelist]


def read_nodes(nodelist: str) -> list[str]:
    """The names of a node list; none, and a word about it, for one that cannot be read."""
    try:
        return expand_nodes(nodelist)
    except ValueError as error:
        log.warning("%s; going on without it", error)
        return []


def parse_config(text: str) -> dict[str, str]:
    """The settings that `scontrol show config` printed, ``Name = value`` in each line."""
    lines = (line.partition("=") for line in text.splitlines())
    named = ((name.rstrip(), value.strip()) for name, equals, value in lines if equals)
    return {name: value for name, value in named if name.isidentifier()}


def parse_config_seconds(text: str, name: str) -> float | None:
    """A time of `scontrol show config`, such as ``KillWait = 30 sec``; None where there is none."""
    number, _, unit = parse_config(text).get(name, "").partition(" ")
    seconds = parse_count(number)
    return float(seconds) if seconds is not None and unit.startswith("sec") else None
