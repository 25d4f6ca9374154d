"""Signatures: what a line of a log looks like that speaks of a fault. Read from TOML files.

A signature is looked for in a line only where one of its words stands in it, and a line is looked
at only where one of `SignatureTable.words` stands in it: searching for a few plain words is what
makes a log of a gigabyte a matter of seconds. docs/doctor.md describes the fields for users.
tests/unit/doctor/test_own_signatures.py and test_corpus.py hold the promises.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.doctor.faults import Certainty, FaultKind
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FOLDER = Path(__file__).with_name("signatures")
ORDER = (
    *("harmless", "accelerators", "memory", "storage", "program", "meeting", "training"),
    *("scheduler", "waits", "links", "deaths"),
)
"""Our own files in the order in which they are tried."""
FATAL = "fatal-python-error"
"""faulthandler's, of a crash in native code, whose place follows. An abort is none."""
COMMON: tuple[str, ...] = (
    *("rror", "xception", "raceback", "memory", "WARN", "ismatch", "illed", "ailed", "ssert"),
    *("imed out", "imeout", "xitcode", "SIG", "onnect", "losed by"),
    *("handling of the above", "direct cause of", "NET/IB", "NET/Socket", "NCCL version"),
    "(local_rank: ",
)
"""Most lines worth a look have one of these: the words of signatures that have one are not searched
for by themselves."""
SHORTEST_WORD = 3
EXCEPTION = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception))(?:: (?P<text>.*)|:?)$"
)
"""A line that begins with the name of an exception."""


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
    HARMLESS = 5
    """It reads like a fault and is none."""


class Where(StrEnum):
    """Where in a line a pattern may stand."""

    ANYWHERE = "anywhere"
    START = "start"
    ERROR = "error"
    """Behind the name of an exception that begins the line."""


class Speaker(StrEnum):
    """Who writes the line."""

    PROGRAM = "program"
    SYSTEM = "system"
    """The scheduler, the kernel or a driver, whose word is certain wherever it stands."""


@dataclass(frozen=True)
class Signature:
    """One kind of line.

    Attributes:
        name: Its own, as `--json` tells it.
        fault: The fault that it speaks of; None for what is harmless.
        role: What it can explain.
        words: One of them stands in every line that fits.
        pattern: What fits; named groups become details.
        where: Where in the line it may stand.
        certainty: How sure its fault is where nothing comes before it. Certain holds only where
            the line begins with an exception's name, or `says_so` is the system.
        says_so: Who writes the line.
        is_late: Printed when all is over, by those who clean up: it may have been the first.
        advice: What to do, in place of what the fault's own row says.
        matches: Lines that fit.
        near_misses: Lines that look alike and do not fit.
        source: Where such lines come from.
    """

    name: str
    fault: FaultKind | None
    role: Role
    words: tuple[str, ...]
    pattern: str
    where: Where = Where.ANYWHERE
    certainty: Certainty = Certainty.CERTAIN
    says_so: Speaker = Speaker.PROGRAM
    is_late: bool = False
    advice: tuple[str, ...] = ()
    matches: tuple[str, ...] = ()
    near_misses: tuple[str, ...] = ()
    source: str = ""
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", re.compile(self.pattern))

    def fits(self, text: str) -> re.Match[str] | None:
        """The pattern's match in a line without its prefixes; None where it does not fit."""
        if not any(word in text for word in self.words):
            return None
        if self.where is Where.ANYWHERE:
            return self.compiled.search(text)
        if self.where is Where.START:
            return self.compiled.match(text)
        error = EXCEPTION.match(text)
        return self.compiled.search(text, error.start("text")) if error and error["text"] else None


@dataclass(frozen=True)
class SignatureTable:
    """All signatures, in the order in which they are tried: the first that fits a line counts.

    Attributes:
        faults: Those that speak of a fault.
        harmless: Those whose lines are passed over.
        words: One of them stands in every line that is worth a look, once its digits are taken out.
    """

    faults: tuple[Signature, ...]
    harmless: tuple[Signature, ...]
    words: tuple[bytes, ...]

    @classmethod
    def of(cls, signatures: Iterable[Signature]) -> SignatureTable:
        """Sort them by what becomes of their lines."""
        every = tuple(signatures)
        own = {
            word
            for one in every
            if one.role is not Role.HARMLESS
            for word in one.words
            if not any(common in word for common in COMMON)
        }
        shortest = sorted(w for w in own if not any(o in w for o in own if o != w))
        return cls(
            tuple(one for one in every if one.role is not Role.HARMLESS),
            tuple(one for one in every if one.role is Role.HARMLESS),
            tuple(dict.fromkeys(_without_digits(word) for word in (*COMMON, *shortest))),
        )

    def with_more(self, more: Iterable[Signature]) -> SignatureTable:
        """Others before these, which may take the name of one of these and then replace it."""
        first = tuple(more)
        names = {one.name for one in first}
        rest = (one for one in (*self.harmless, *self.faults) if one.name not in names)
        return SignatureTable.of((*first, *rest))


def _without_digits(word: str) -> bytes:
    return word.encode().translate(None, b"0123456789")


@cache
def packaged() -> SignatureTable:
    """The signatures of this package."""
    return SignatureTable.of(one for name in ORDER for one in read(FOLDER / f"{name}.toml"))


def read(path: Path) -> list[Signature]:
    """The signatures of a file.

    Raises:
        UsageError: it cannot be read, or a signature is wrong: which one, and what about it.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} has no signatures that can be read: {why}") from None
    rows = table.pop("signature", [])
    if table or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        odd = f", not {next(iter(table))}" if table else ""
        raise UsageError(f"{path} may hold [[signature]] tables alone{odd}")
    return [_signature(row, f"{path}, signature {n}") for n, row in enumerate(rows, 1)]


_KEYS = {one.name: one for one in fields(Signature) if one.init}
_LISTS = frozenset({"words", "advice", "matches", "near_misses"})
_CHOICES: dict[str, dict[str, Any]] = {
    "role": {role.name.lower(): role for role in Role},
    **{
        key: {member.value: member for member in kind}
        for key, kind in (
            ("fault", FaultKind),
            ("where", Where),
            ("certainty", Certainty),
            ("says_so", Speaker),
        )
    },
}
_REQUIRED = ("name", "role", "words", "pattern", "matches", "near_misses")


def _signature(row: Mapping[str, Any], place: str) -> Signature:
    name = row.get("name")
    place = f"{place} ({name})" if isinstance(name, str) else place
    if unknown := sorted(row.keys() - _KEYS.keys()):
        raise UsageError(f"{place}: no field is called {unknown[0]}; there are {', '.join(_KEYS)}")
    if missing := [key for key in _REQUIRED if not row.get(key)]:
        raise UsageError(f"{place}: {missing[0]} is missing")
    values = {key: _value(key, value, place) for key, value in row.items()}
    if short := [word for word in values["words"] if len(_without_digits(word)) < SHORTEST_WORD]:
        raise UsageError(
            f"{place}: the word {short[0]!r} stands in too many lines: write {SHORTEST_WORD} "
            "characters or more that are no digits"
        )
    values.setdefault("fault", None)
    if (values["fault"] is None) != (values["role"] is Role.HARMLESS):
        raise UsageError(f"{place}: a fault belongs to every role but harmless, which has none")
    try:
        return Signature(**values)
    except re.error as error:
        raise UsageError(f"{place}: the pattern is none: {error}") from None


def _value(key: str, value: object, place: str) -> Any:
    """One field's value, checked.

    Raises:
        UsageError: it is not of the field's kind.
    """
    if key == "is_late":
        if not isinstance(value, bool):
            raise UsageError(f"{place}: is_late is true or false, not {value!r}")
        return value
    if key in _LISTS:
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise UsageError(f"{place}: {key} is a list of texts, not {value!r}")
        return tuple(value)
    if not isinstance(value, str):
        raise UsageError(f"{place}: {key} is a text, not {value!r}")
    choices = _CHOICES.get(key)
    if choices is None:
        return value
    if value in choices:
        return choices[value]
    raise UsageError(f"{place}: {key} is one of {', '.join(choices)}, not {value!r}")
