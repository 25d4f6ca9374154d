"""What an inspection of a rank that stands still found: text and JSON in, facts out. Pure.

Sources work without the rank's help and while it holds the GIL: torch's flight recorder (as torch
2.13 writes it, `torch/csrc/distributed/c10d/FlightRecorder*`), faulthandler's stacks, and
`/proc/PID/stat`. What is missing is not known. tests/unit/hangs/test_evidence.py and test_plain.py
hold the promises.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.node.hangs.standing import Stand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MOST_COLLECTIVES = 20_000
"""Of a rank, the newest: torch keeps 2,000 by default."""

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


def threads_of(text: str) -> list[tuple[bool, tuple[Frame, ...]]]:
    """Of each thread that faulthandler has written: whether it was running, and its frames.

    Innermost frames come first. faulthandler writes the main thread last of each time.
    """
    threads = []
    for part in _THREAD.split(text):
        if _THREAD.match(part):
            rows = _FRAME.findall(part)
            frames = tuple(
                Frame(path, int(n) if n.isdigit() else 0, name) for path, n, name in rows
            )
            threads.append((part.startswith("Current"), frames))
    return threads


def frames_of(text: str) -> tuple[Frame, ...] | None:
    """The main thread's frames of what faulthandler has written last; None for nothing whole."""
    threads = threads_of(text)
    return threads[-1][1] if threads else None


def process_state(stat: str) -> str:
    """The state in what `/proc/PID/stat` holds; "" where that is nothing of the kind."""
    _, closed, rest = stat.rpartition(")")
    words = rest.split()
    return words[0] if closed and words else ""


MOST_CALLS = 24
"""Of a group, the newest: ranks that call different ones do so where they stand."""
MOST_FRAMES = 24


def plain_of(evidence: RankEvidence) -> dict[str, Any]:
    """What JSON holds of it; of long lists the end that counts."""
    recorded, frames = evidence.recorded, evidence.frames
    if recorded is not None:
        calls: defaultdict[str, list[Collective]] = defaultdict(list)
        for call in recorded.collectives:
            calls[call.group].append(call)
        kept = tuple(call for group in calls.values() for call in group[-MOST_CALLS:])
        recorded = Recorded(recorded.fronts, kept)
    frames = None if frames is None else frames[:MOST_FRAMES]
    groups = {name: _short(members) for name, members in evidence.groups.items()}
    plain = asdict(replace(evidence, recorded=recorded, frames=frames, groups={}))
    return plain | {"groups": groups}


def evidence_of(plain: Mapping[str, Any]) -> RankEvidence:
    """What `plain_of` gave, after JSON."""
    recorded, frames = plain["recorded"], plain["frames"]
    if recorded is not None:
        fronts = {name: Front(*front) for name, front in recorded["fronts"].items()}
        recorded = Recorded(fronts, tuple(map(_call, recorded["collectives"])))
    if frames is not None:
        frames = tuple(Frame(*frame) for frame in frames)
    groups = {name: _members(short) for name, short in plain["groups"].items()}
    return RankEvidence(
        **{**plain, "recorded": recorded, "frames": frames, "groups": groups},
    )


def plain_stand(stand: Stand) -> list[Any]:
    """What JSON holds of it."""
    return [*stand[:4], stand.limit_s if math.isfinite(stand.limit_s) else None]


def stand_of(plain: Sequence[Any]) -> Stand:
    """What `plain_stand` gave, after JSON."""
    rank, step, phase, stood_s, limit_s = plain
    return Stand(rank, step, phase, stood_s, math.inf if limit_s is None else limit_s)


def _call(plain: Sequence[Any]) -> Collective:
    group, number, name, sizes, dtypes, started_ns = plain
    return Collective(group, number, name, tuple(map(tuple, sizes)), tuple(dtypes), started_ns)


def _short(members: Sequence[int]) -> dict[str, list[int]]:
    """Members of a group: as a range, where each is as far from the next."""
    listed = list(members)
    step = listed[1] - listed[0] if len(listed) > 1 else 1
    if step > 0 and listed and listed == list(range(listed[0], listed[-1] + 1, step)):
        return {"range": [listed[0], listed[-1] + 1, step]}
    return {"list": listed}


def _members(short: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    return tuple(range(*short["range"])) if "range" in short else tuple(short["list"])
