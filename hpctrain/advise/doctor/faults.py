"""What a job can die of (faults.toml), and what is read of that in logs and ledgers. Pure.

`docs/doctor.md` has a row for each fault. tests/unit/doctor/test_faults.py switches each off.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.ledger.history.run_state import EndCause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpctrain.advise.doctor.lines import Stamp


class Certainty(StrEnum):
    """How sure a diagnosis is."""

    CERTAIN = "certain"  # what failed said so itself, and nothing before it explains it
    LIKELY = "likely"
    POSSIBLE = "possible"
    NOT_KNOWN = "not known"

    @property
    def rank(self) -> int:
        """0 for the surest."""
        return list(Certainty).index(self)


class Role(StrEnum):
    """What a line can explain; an earlier role explains the later ones."""

    CAUSE = "cause"  # a fault that ends a process by itself
    WAIT = "wait"  # a collective's time was up: somebody did not come
    LINK = "link"  # a connection broke: the other end may have died first
    DEATH = "death"  # a process is said to be dead, and by what; not why
    HINT = "hint"  # no end by itself: it may explain one
    HARMLESS = "harmless"  # it reads like a fault and is none


@dataclass(frozen=True)
class FaultRow:
    """A kind of fault: its row of faults.toml, whose comments say what each field is."""

    code: str
    title: str
    do: list[str]
    ledger_causes: list[str] = field(default_factory=list)
    first_of: list[str] = field(default_factory=list)
    all_of: list[str] = field(default_factory=list)


TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))
FAULTS: dict[str, FaultRow] = {name: FaultRow(**row) for name, row in TABLE["faults"].items()}
"""Each kind of fault by its name."""
OF_CAUSE = {
    EndCause(cause): kind for kind, fault in FAULTS.items() for cause in fault.ledger_causes
}
"""Which fault each cause of the ledger is where nothing finer is known."""
OF_WORDS: dict[EndCause, tuple[str, Role, Certainty]] = {
    EndCause(cause): (kind, Role(role), Certainty(certainty))
    for cause, (kind, role, certainty) in TABLE["of_words"].items()
}
"""What the ledger's words for an error line mean where no signature is finer."""


@dataclass(frozen=True)
class Sighting:
    """A line of a log, or an event of the ledger, that speaks of a fault."""

    sign: str  # name of the signature, or of the kind of event
    kind: str  # the fault, by its name in faults.toml
    role: Role
    certainty: Certainty  # how sure its fault is where nothing comes before it
    text: str = ""
    source: str = ""  # the log, or the ledger
    line: int = 0  # its number, from 1; 0 for an event
    offset: int = 0  # where it lies in the log
    rank: int | None = None
    node: str = ""
    clock: Stamp | None = None
    is_late: bool = False  # printed when all was over: it may have been the first
    details: Mapping[str, str] = field(default_factory=dict)  # what the signature read in the line
    place: str = ""  # the program's own line that a traceback ends with, "file:line in function"
    is_handled: bool = False  # another error came while it was handled, or it follows from one
    advice: Sequence[str] = ()  # where the signature has its own

    def precedes(self, other: Sighting) -> bool | None:
        """Return whether it came before the other one; None where no order or clock tells."""
        if self.is_late or other.is_late:
            return None
        here, there = float(self.offset), float(other.offset)
        if self.source != other.source:
            if self.clock is None or other.clock is None or self.clock.form != other.clock.form:
                return None
            here, there = self.clock.at, other.clock.at
        return here < there if here != there else None


def ranks_of(sightings: Iterable[Sighting]) -> tuple[int, ...]:
    """Return the ranks that they name."""
    return tuple(sorted({s.rank for s in sightings if s.rank is not None}))


@dataclass
class LogFacts:
    """What was read of one log."""

    source: str
    lines: int = 0
    sightings: list[Sighting] = field(default_factory=list)  # a few of each signature and rank
    counts: Counter[str] = field(default_factory=Counter)  # how often each signature was met
    progress: tuple[int, ...] = ()  # where the last losses were printed, oldest first
    networks: dict[str, str] = field(default_factory=dict)  # that NCCL uses, in its own words


@dataclass(frozen=True)
class FollowOn:
    """Failures of one signature that follow from the cause, on ranks as far as lines say."""

    what: str
    times: int
    ranks: tuple[int, ...]
    example: Sighting


@dataclass(frozen=True)
class Diagnosis:
    """What ended a job, with how sure that is."""

    kind: str  # the fault, by its name in faults.toml
    certainty: Certainty
    headline: str  # one line: what, where, with its numbers
    why: str = ""  # this and nothing else
    evidence: tuple[Sighting, ...] = ()  # what says so, the first one first
    follow_ons: tuple[FollowOn, ...] = ()
    ruled_out: Mapping[str, str] = field(default_factory=dict)  # each with what says so
    do: Sequence[str] = ()
    rivals: tuple[Sighting, ...] = ()  # other faults that nothing puts in order with this one
    lines: int = 0  # that were read
    logs: int = 0

    @property
    def code(self) -> str:
        """HT8xx: its row in docs/doctor.md."""
        return FAULTS[self.kind].code
