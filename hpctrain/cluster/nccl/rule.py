"""What the rules for environment values share: a problem, what is known of the site, the wording.

A message says the value, what its reader would make of it and why that is wrong, what to write.
tests/unit/nccl/test_nccl_rules.py holds the promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ERROR = "error"
WARNING = "warning"
DEBUG = "debug"
"""Nothing is wrong with the value, but it should not stay without a reason (`why = "..."`)."""

_LONGEST = 80

Version = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """What is to be said of one variable."""

    level: str
    """error: it does not do what it says; warning: it may well not; debug: it needs a reason."""
    message: str


@dataclass(frozen=True)
class Context:
    """What is known of the place where the variables will hold. Empty or None is unknown."""

    kind: str = ""
    """The fabric, as in [network]."""
    required: Sequence[str] = ()
    """sbatch options that every job has."""
    netdevs: frozenset[str] | None = None
    """Every network interface of a node."""
    hcas: frozenset[str] | None = None
    """Every InfiniBand or RoCE adapter of a node."""
    nccl: str = ""
    """NCCL's version, or the oldest one that is meant."""
    old_plugin: bool = False
    """Whether the variables are for older versions of the network plugin only."""
    multi_node: bool = True
    """Whether the job has several nodes."""

    def older_than(self, version: Version) -> bool:
        """Whether NCCL is known to be older than that."""
        return bool(self.nccl) and as_version(self.nccl) < version


Rule = Callable[[str, str, Context], Iterator[Problem]]
"""Judges one variable: (name, value, context)."""


def as_version(text: str) -> Version:
    """`2.27.3` as (2, 27, 3); what is no number ends it."""
    parts: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != part:
            break
    return tuple(parts)


def said(name: str, value: str) -> str:
    """`NAME=value` for a message: on one line, cut where it is long, quoted where it must be."""
    plain = value.isprintable() and value and " " not in value and "'" not in value
    return f"{name}={cut(value if plain else repr(value))}"


def cut(text: str) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def error(name: str, value: str, rest: str) -> Problem:
    """The value does not do what it says."""
    return _problem(ERROR, name, value, rest)


def warning(name: str, value: str, rest: str) -> Problem:
    """The value may well not do what it says."""
    return _problem(WARNING, name, value, rest)


def reason(name: str, value: str, rest: str) -> Problem:
    """The value should not stay without a reason."""
    return _problem(DEBUG, name, value, rest)


def _problem(level: str, name: str, value: str, rest: str) -> Problem:
    """The message on one line, whatever the value brings into it."""
    one_line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in rest)
    return Problem(level, f"{said(name, value)}: {one_line}")


def listed(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
