"""What a signature is: a word and a pattern for a line, its kind of fault, and its role. Pure.

tests/unit/doctor/test_corpus.py holds the promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum

from hpctrain.doctor.faults import Certainty, FaultKind


class Role(IntEnum):
    """What a line can explain; a lower one explains the higher ones."""

    CAUSE = 0
    """A fault that ends a process by itself."""
    WAIT = 1
    """A collective's time was up: somebody did not come, for one reason or another."""
    LINK = 2
    """A connection broke: the other end may have died first."""
    DEATH = 3
    """A process is said to be dead, and by what; not why."""
    HINT = 4
    """No end by itself: it may explain one."""


@dataclass(frozen=True)
class LogSign:
    """A signature.

    Attributes:
        name: Its own, as `--json` tells it.
        kind: The fault that it speaks of.
        role: What it can explain.
        word: Stands in every line that fits.
        pattern: What fits; named groups become details.
        certainty: How sure its fault is where nothing comes before it.
        is_late: Printed when all is over, by those who clean up: it may have been the first.
    """

    name: str
    kind: FaultKind
    role: Role
    word: str
    pattern: str
    certainty: Certainty = Certainty.CERTAIN
    is_late: bool = False
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", re.compile(self.pattern))
