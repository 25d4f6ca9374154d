"""What is read of logs and ledgers before anybody judges it: lines that speak of faults. Pure.

tests/unit/doctor/test_judge.py holds the promises.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.advise.doctor.faults import Certainty, FaultKind
    from hpctrain.advise.doctor.lines import Stamp
    from hpctrain.advise.doctor.signature import Role


@dataclass(frozen=True)
class Sighting:
    """A line, or an event of the ledger, that speaks of a fault.

    Attributes:
        sign: Name of the signature, or of the kind of event.
        kind: The fault that it speaks of.
        role: What it can explain.
        certainty: How sure its fault is where nothing comes before it.
        text: The line.
        source: The log, or the ledger.
        line: Its number, from 1; 0 for an event.
        offset: Where it lies in the log.
        rank: Who wrote it; None where nobody knows.
        node: Where; "" where nobody knows.
        clock: When, by its own words.
        is_late: Printed when all was over: it may have been the first.
        details: What the signature has read in the line.
        place: The program's own line that a traceback ends with, "file:line in function".
        is_handled: Another error came while it was handled, or it follows from the one before.
        advice: What to do, where the signature says so itself.
    """

    sign: str
    kind: FaultKind
    role: Role
    certainty: Certainty
    text: str
    source: str
    line: int = 0
    offset: int = 0
    rank: int | None = None
    node: str = ""
    clock: Stamp | None = None
    is_late: bool = False
    details: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    is_handled: bool = False
    advice: tuple[str, ...] = ()


@dataclass
class LogFacts:
    """What was read of one log.

    Attributes:
        source: Its name.
        lines: How many it has.
        sightings: What speaks of faults, in order; a few of each signature and rank.
        counts: How often each signature was met.
        progress: Where in the log the last losses were printed, oldest first.
        networks: What NCCL said that it uses, in the order of its words.
        versions: NCCL's, as it printed them.
        ranks: Who wrote, as far as lines say.
    """

    source: str
    lines: int = 0
    sightings: list[Sighting] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    progress: tuple[int, ...] = ()
    networks: dict[str, str] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)


def precedes(first: Sighting, second: Sighting) -> bool | None:
    """Whether one came before the other; None where nothing tells.

    What is printed when all is over may have been the first. Lines of one log are in order; those
    of several are where their clocks are of one kind.
    """
    if first.is_late or second.is_late:
        return None
    if first.source == second.source:
        return first.offset < second.offset if first.offset != second.offset else None
    if first.clock is None or second.clock is None or first.clock.form != second.clock.form:
        return None
    return first.clock.at < second.clock.at if first.clock.at != second.clock.at else None
