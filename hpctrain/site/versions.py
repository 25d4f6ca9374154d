"""Versions and conditions on them: `>=2.21,<2.24`. Pure."""

from __future__ import annotations

import operator
import re

_CONDITION = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)")
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)*)")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def parse_condition(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """The parts of a condition, all of which must hold: `[(">=", (2, 21)), ("<", (2, 24))]`.

    Raises:
        ValueError: a part is not an operator with a version.
    """
    parts = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f'"{text}" is not a condition on a version; it takes parts such as >=2.27, '
                "joined by commas that mean `and`"
            )
        parts.append((match[1], _key(match[2])))
    return parts


def holds(condition: str, version: str) -> bool:
    """Whether a version meets the condition; 2.9 and 2.9.0 are the same, `+cu128` does not count.

    Raises:
        ValueError: the condition is not one, or the version does not begin with a number.
    """
    match = _NUMBERS.match(version.strip())
    if match is None:
        raise ValueError(f'"{version}" does not begin like a version')
    return all(_COMPARE[sign](_key(match[1]), bound) for sign, bound in parse_condition(condition))


def _key(digits: str) -> tuple[int, ...]:
    """The numbers without the zeros at the end, so that 2.9 equals 2.9.0."""
    numbers = [int(part) for part in digits.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
