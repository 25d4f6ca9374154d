"""Values of events as they come: from any version of hpctrain, by any program. Never raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from enum import StrEnum

T = TypeVar("T", bound="StrEnum")


def whole(value: object) -> int | None:
    """A whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """A number, also one that JSON has no word for ("nan"), else None."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None


def text(value: object) -> str:
    """Text; nothing for None."""
    return "" if value is None else str(value)


def member(kind: type[T], value: object) -> T | None:
    """The member of that value; None for one that this version does not know."""
    return next((one for one in kind if one.value == value), None)
