"""What every kind of event is made of: its fields with their checks, and the class of them all.

A field that was not told is None; where None would say no more than nothing does, it is "", () or
False. The kinds themselves are in `event_types`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

from hpctrain.run import event_fields as check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Check = Callable[[object], Any]

T = TypeVar("T", bound="LedgerFact")
_UNSET: Any = object()
NEEDED: Any = object()
"""Stands where a field has no default."""
_NOTHING: dict[object, Any] = {
    **dict.fromkeys((check.words, check.identifier, check.path), ""),
    **dict.fromkeys((check.counts, check.texts, check.mappings, check.skipped_checkpoints), ()),
    check.mapping: {},
    check.metrics: {},
    check.flag: False,
}
"""What a field is that was not told, by its check; None for the others."""


def maybe(passed: Check, doc: str, default: Any = _UNSET) -> Any:
    """A field that may be left out.

    Args:
        passed: Gives the value that passes, else None.
        doc: What it means.
        default: What it is where nothing, or nothing that passes, was told.
    """
    if default is _UNSET:
        default = _NOTHING.get(passed)
    return dataclasses.field(metadata={"check": passed, "doc": doc, "default": default})


def needed(passed: Check, doc: str) -> Any:
    """A field without which the event says nothing, and is left out."""
    return dataclasses.field(metadata={"check": passed, "doc": doc, "default": NEEDED})


class LedgerFact:
    """What an event says, beside its time and its attempt.

    The methods that a dataclass has are made once here and not for each kind: that would cost
    every command 20 ms.

    Attributes:
        kind: As the ledger names it.
        writer: Who writes it.
    """

    __slots__ = ()
    kind: str
    writer: str
    _FIELDS: tuple[tuple[str, Check, Any, Callable[[Any, Any], None]], ...]

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
def event(kind: str, *, by: str) -> Callable[[type[T]], type[T]]:
    """Make a class the kind of event that a ledger knows by this name.

    Args:
        kind: Its name in the ledger, for good.
        by: Who writes it.
    """

    def made(cls: type[T]) -> type[T]:
        cls = dataclasses.dataclass(
            init=False, eq=False, repr=False, match_args=False, kw_only=True, slots=True
        )(cls)
        cls.kind, cls.writer = kind, by
        cls._FIELDS = tuple(
            (f.name, f.metadata["check"], f.metadata["default"], getattr(cls, f.name).__set__)
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        )  # fmt: skip
        KINDS[kind] = cls
        return cls

    return made


class UnknownFact(LedgerFact):
    """An event of a kind that this version does not know.

    Attributes:
        fields: As they were read.
    """

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
