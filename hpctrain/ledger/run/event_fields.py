"""How a line of a ledger becomes a fact: the checks of fields, and the base class of every kind.

`typed` is the one place where what was read becomes typed: what it gives has the types and ranges
that every reader counts on. A field that has not is left out as if it had not been told, and so is
an event that says nothing without it. Nothing here raises because of a value.
tests/unit/run/test_event_fields.py and test_untrusted_ledgers.py hold the promises.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

from hpctrain.core.base.records import Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from enum import StrEnum

    Check = Callable[[object], Any]


T = TypeVar("T", bound="StrEnum")
V = TypeVar("V")
_JOB_ID = re.compile(r"\d+(_\d+)?|local-\d+|pid-\d+", re.ASCII)
"""SLURM's (an array's task too), the embedded cluster's, and a process in a terminal."""
LAST_T = 250_000_000_000.0
"""A little before the year 9900: what comes later no calendar can show."""
MOST = 2**53
"""Larger whole numbers are not exact in every reader of JSON."""
MOST_S = 1e12
MOST_NUMBER = 1e300
MOST_ATTEMPTS = 10_000_000
DEEPEST = 20
"""Lists in lists: a fact of ours has three, and to print a thousand takes the stack."""
_IDENTIFIER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\[\]-]{0,299}")
_BRACKETS = 60
_NUMBERS = frozenset({int, float})
_WORDS_FOR_NO_NUMBER = frozenset({"nan", "inf", "-inf"})


# Values of events as they come.


def whole(value: object) -> int | None:
    """A whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: object) -> float | None:
    """A number, also one that JSON has no word for ("nan"), else None."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def finite(value: object) -> float | None:
    """A number that a screen can show and JSON can hold, else None."""
    parsed = as_number(value)
    return parsed if parsed is not None and math.isfinite(parsed) else None


def is_job_id(value: str) -> bool:
    """Whether a scheduler may be asked about it: an option or a path in its place is a trap."""
    return _JOB_ID.fullmatch(value) is not None


def member(kind: type[T], value: object) -> T | None:
    """The member of that value; None for one that this version does not know."""
    return next((one for one in kind if one.value == value), None)


# Checks: each gives the value that passes, else None.


def moment(value: object) -> float | None:
    """Seconds since the epoch that a clock can show, else None."""
    return _between(0, value, LAST_T)


def attempt_number(value: object) -> int | None:
    """The number of an attempt, else None."""
    parsed = count(value)
    return parsed if parsed is not None and parsed <= MOST_ATTEMPTS else None


def count(value: object) -> int | None:
    """A whole number from 0 on, else None."""
    return value if type(value) is int and 0 <= value <= MOST else None


def seconds(value: object) -> float | None:
    """A duration, else None."""
    return _between(0, value, MOST_S)


def number(value: object) -> float | None:
    """A number, also one that JSON has only a word for: "nan", "inf", "-inf"; else None."""
    if isinstance(value, str):
        return float(value) if value in _WORDS_FOR_NO_NUMBER else None
    return _between(-MOST_NUMBER, value, MOST_NUMBER)


def _between(low: float, value: object, high: float) -> float | None:
    """The number as it is; None for one that is out of range, for NaN, and for what is none."""
    # A boolean is an int to isinstance. Every comparison with NaN is false.
    return value if type(value) in _NUMBERS and low <= value <= high else None  # type: ignore[operator, return-value]


def words(value: object) -> str | None:
    """Text; a number as text; else None."""
    if isinstance(value, str):
        return value
    return None if _between(-MOST, value, MOST) is None else str(value)


def copy_source(value: object) -> str | None:
    """`memory`, `peer` or `will`, where a state came from copies in memory; None if not text."""
    return "peer" if value == "buddy" else words(value)  # its name until 0.2


def identifier(value: object) -> str | None:
    """The name of a job or a submission: never an option of a command, never a path; else None."""
    text_value = words(value)
    return text_value if text_value is not None and _IDENTIFIER.fullmatch(text_value) else None


def path(value: object) -> str | None:
    """Text that a file system can be asked about, else None."""
    return value if isinstance(value, str) and "\0" not in value else None


def flag(value: object) -> bool | None:
    """True or false, else None."""
    return value if isinstance(value, bool) else None


def list_of(check: Callable[[object], V | None]) -> Callable[[object], tuple[V, ...] | None]:
    """What passes the check, of a list; the rest of it is left out."""

    def checked(value: object) -> tuple[V, ...] | None:
        if not isinstance(value, list):
            return None
        return tuple(found for one in value if (found := check(one)) is not None)

    return checked


def mapping(value: object) -> dict[str, Any] | None:
    """Plain values by name, else None."""
    if not isinstance(value, dict):
        return None
    return {name: _plain(one) for name, one in value.items()}


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool) else words(value)


def metrics(value: object) -> dict[str, float] | None:
    """Finite numbers by name; what is none is left out."""
    if not isinstance(value, dict):
        return None
    numbers = ((name, _between(-MOST_NUMBER, one, MOST_NUMBER)) for name, one in value.items())
    return {name: one for name, one in numbers if one is not None}


def skipped_checkpoints(value: object) -> tuple[Skipped, ...] | None:
    """Checkpoints that were not taken, as far as they are named."""
    if not isinstance(value, list):
        return None
    return tuple(
        Skipped(
            count(one.get("step")) or 0,
            words(one.get("name")) or "",
            words(one.get("reason")) or "",
        )
        for one in value
        if isinstance(one, dict)
    )


def one_of(kind: type[T]) -> Callable[[object], T | None]:
    """A member of a closed set; else None, as for the word of a newer version."""
    by_value: dict[str, T] = {one.value: one for one in kind}

    def member_of(value: object) -> T | None:
        return by_value.get(value) if isinstance(value, str) else None

    return member_of


counts, texts, mappings = list_of(count), list_of(words), list_of(mapping)


def whole_text(line: bytes, fact: dict[str, Any]) -> dict[str, Any] | None:
    """The fact of a line without what no screen or file can hold; None if lists lie too deep."""
    if line.count(b"[") + line.count(b"{") > _BRACKETS and _depth(fact) > DEEPEST:
        return None
    lone = b"\\ud" in line or b"\\uD" in line
    return _without_surrogates(fact) if lone else fact


def _depth(value: object) -> int:
    """How deep lists and mappings lie in each other, without going deeper than asked."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST:
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        depth, level = depth + 1, inner
    return depth


def _without_surrogates(value: Any) -> Any:
    """Without halves of characters (lone surrogates), which cannot be written or printed."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_without_surrogates(one) for one in value]
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(one) for name, one in value.items()}
    return value


E = TypeVar("E", bound="LedgerFact")
_UNSET: Any = object()
NEEDED: Any = object()
"""Stands where a field has no default."""
_NOTHING: dict[object, Any] = {
    **dict.fromkeys((words, copy_source, identifier, path), ""),
    **dict.fromkeys((counts, texts, mappings, skipped_checkpoints), ()),
    mapping: {},
    metrics: {},
    flag: False,
}
"""The value of a field that is missing, by its check; None for the others."""


def maybe(passed: Check, doc: str, default: Any = _UNSET, *, was: str = "") -> Any:
    """A field that may be left out; `passed` gives a value that passes, else `default` counts.

    `was` is the field's old name, which is read and never written.
    """
    if default is _UNSET:
        default = _NOTHING.get(passed)
    return dataclasses.field(metadata={"check": passed, "doc": doc, "default": default, "was": was})


def needed(passed: Check, doc: str) -> Any:
    """A field without which the event says nothing, and is left out."""
    return dataclasses.field(metadata={"check": passed, "doc": doc, "default": NEEDED})


class LedgerFact:
    """What an event says, beside its time and its attempt; `writer` is who writes it.

    The methods that a dataclass has are made once here and not for each kind: that would cost every
    command 20 ms.
    """

    __slots__ = ()
    kind: str
    writer: str
    _FIELDS: tuple[tuple[str, Check, Any, Callable[[Any, Any], None]], ...]
    _RENAMED: tuple[tuple[str, str], ...]

    def __init__(self, **fields: Any) -> None:
        for name, _, default, put in self._FIELDS:
            value = fields.pop(name, default)
            if value is NEEDED:
                raise TypeError(f"{type(self).__name__} needs {name}")
            put(self, value)
        if fields:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(fields)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fields_set() == self.fields_set()

    def __hash__(self) -> int:
        return hash((self.kind, *map(str, self.fields_set().values())))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.fields_set().items())
        return f"{type(self).__name__}({fields})"

    def fields_set(self) -> dict[str, Any]:
        """The fields by name, without those that are None."""
        return {
            name: value for name, *_ in self._FIELDS if (value := getattr(self, name)) is not None
        }


KINDS: dict[str, type[LedgerFact]] = {}
"""Every kind of event, in the order in which docs/development/ledger.md shows them."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(needed,))
def event(kind: str, *, by: str) -> Callable[[type[E]], type[E]]:
    """Make a class the kind of event that a ledger knows by this name, for good."""

    def made(cls: type[E]) -> type[E]:
        cls = dataclasses.dataclass(
            init=False, eq=False, repr=False, match_args=False, kw_only=True, slots=True
        )(cls)
        cls.kind, cls.writer = kind, by
        cls._FIELDS = tuple(
            (f.name, f.metadata["check"], f.metadata["default"], getattr(cls, f.name).__set__)
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        )  # fmt: skip
        cls._RENAMED = tuple(
            (was, f.name)
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
            if (was := f.metadata.get("was"))
        )
        KINDS[kind] = cls
        return cls

    return made


class UnknownFact(LedgerFact):
    """An event of a kind that this version does not know; `fields` are as they were read."""

    __slots__ = ("fields", "kind")
    writer = ""

    def __init__(self, kind: str, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "fields", fields)

    kind: str
    fields: Mapping[str, Any]

    def fields_set(self) -> dict[str, Any]:
        """The fields by name, without those that are None."""
        return {name: value for name, value in self.fields.items() if value is not None}


def typed(kind: str, raw: dict[str, Any]) -> LedgerFact | None:
    """What was read as readers may count on it; None for an event that says nothing.

    Fields of `raw` that this version does not know are left in it.
    """
    cls = KINDS.get(kind)
    if cls is None:
        return UnknownFact(kind, raw)
    for was, name in cls._RENAMED:
        if was in raw:
            raw.setdefault(name, raw.pop(was))
    fact = cls.__new__(cls)
    for name, passed, default, put in cls._FIELDS:
        value = raw.pop(name, None)
        if value is None or (value := passed(value)) is None:
            if default is NEEDED:
                return None
            value = default
        put(fact, value)
    return fact
