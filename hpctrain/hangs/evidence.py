"""What a look at a rank that stands still has found. Pure: text and JSON in, facts out.

Three witnesses speak without the rank's help, also while it holds Python's lock: torch's flight
recorder (each collective that the rank has called, served by a thread of torch's own), Python's
faulthandler (the stacks, written from a signal handler in C), and the kernel (`/proc/PID/stat`).
What torch writes is read as torch 2.13 writes it (`torch/csrc/distributed/c10d/FlightRecorder*`);
what is not there is said as not known. tests/unit/hangs/test_evidence.py holds the promises.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_COLLECTIVES = 20_000
"""Of a rank, the newest: torch keeps 2,000 unless it is told to keep more."""

_THREAD = re.compile(r"(?m)^(?=(?:Current thread|Thread) 0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)


class Collective(NamedTuple):
    """A collective that a rank has called.

    Attributes:
        group: Name of the process group, as this rank calls it.
        number: The how-manieth of the group, from 1.
        name: Such as "all_reduce".
        sizes: Shapes of what goes in.
        dtypes: Of what goes in.
        started_ns: When it was called, in nanoseconds since the epoch, by this node's clock.
    """

    group: str
    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    started_ns: int = 0


class Front(NamedTuple):
    """How far a rank has come in a process group.

    Attributes:
        called: The number of the last collective that it has called; 0 for none.
        completed: The number of the last one that is over. After an error torch says a higher one.
    """

    called: int
    completed: int


class Frame(NamedTuple):
    """A place in a program."""

    path: str
    line: int
    function: str


@dataclass(frozen=True)
class Recorded:
    """What torch's flight recorder says.

    Attributes:
        fronts: By the name of the group.
        collectives: The newest, in the order of their calls.
    """

    fronts: Mapping[str, Front]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class RankEvidence:
    """What a look has found of one rank.

    Attributes:
        rank: Its number.
        node: Its node's name.
        process: Its state as the kernel says it: a letter such as "R", "S", "D" (waits for a disk
            or a server and cannot be interrupted), "T" (stopped), "Z" (dead); "" where there is no
            such process any more.
        recorded: None where nobody answered, or torch has no recorder.
        groups: Members of each process group that it has, by name; empty for not known.
        frames: Of its main thread, innermost first; None for not known.
        step: The step it is in; None for not known.
        phase: Such as "data"; "" for not known.
        has_returned: Its program has ended by itself.
    """

    rank: int
    node: str
    process: str
    recorded: Recorded | None = None
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    frames: tuple[Frame, ...] | None = None
    step: int | None = None
    phase: str = ""
    has_returned: bool = False


def recorded_of(text: str | bytes) -> Recorded | None:
    """What torch's `fr_trace_json` says; None where it is not that.

    Collectives alone: what is sent between two ranks is not numbered by the group.
    """
    try:
        dump = json.loads(text)
        entries = dump["entries"][-MOST_COLLECTIVES:]
        calls = [(entry, _collective(entry)) for entry in entries if not entry.get("is_p2p")]
        names = {str(entry["pg_id"]): called.group for entry, called in calls}
        fronts = {
            names[number]: Front(  # torch says -1 for none
                max(0, int(status["last_enqueued_collective"])),
                max(0, int(status["last_completed_collective"])),
            )
            for number, status in dump.get("pg_status", {}).items()
            if number in names
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return Recorded(fronts, tuple(called for _, called in calls))


def _collective(entry: Mapping[str, Any]) -> Collective:
    return Collective(
        str(entry["process_group"][0]),
        int(entry["collective_seq_id"]),
        str(entry["profiling_name"]).rpartition(":")[2],
        tuple(tuple(int(length) for length in shape) for shape in entry["input_sizes"]),
        tuple(str(dtype) for dtype in entry["input_dtypes"]),
        int(entry.get("time_created_ns", 0)),
    )


def frames_of(text: str) -> tuple[Frame, ...] | None:
    """The main thread's frames, innermost first, of what faulthandler has written last.

    None where there is nothing whole. faulthandler writes the main thread last of each time.
    """
    threads = [part for part in _THREAD.split(text) if _THREAD.match(part)]
    if not threads:
        return None
    frames = _FRAME.findall(threads[-1])
    return tuple(
        Frame(path, int(line) if line.isdigit() else 0, function) for path, line, function in frames
    )


def process_state(stat: str) -> str:
    """The state in what `/proc/PID/stat` holds; "" where that is nothing of the kind."""
    _, closed, rest = stat.rpartition(")")
    words = rest.split()
    return words[0] if closed and words else ""
