"""Values of events as they come: from any version of hpctrain, by any program. Never raises."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from enum import StrEnum

T = TypeVar("T", bound="StrEnum")
_JOB_ID = re.compile(r"\d+(_\d+)?|local-\d+|pid-\d+", re.ASCII)
"""SLURM's (an array's task too), the embedded cluster's, and a process in a terminal."""


def whole(value: object) -> int | None:
    """A whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """A number, also one that JSON has no word for ("nan"), else None."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def finite(value: object) -> float | None:
    """A number that a screen can show and JSON can hold, else None."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def listed(value: object) -> list[Any]:
    """A list; an empty one for everything else."""
    return value if isinstance(value, list) else []


def text(value: object) -> str:
    """Text; nothing for None."""
    return "" if value is None else str(value)


def is_job_id(value: str) -> bool:
    """Whether a scheduler may be asked about it: an option or a path in its place is a trap."""
    return _JOB_ID.fullmatch(value) is not None


def member(kind: type[T], value: object) -> T | None:
    """The member of that value; None for one that this version does not know."""
    return next((one for one in kind if one.value == value), None)
