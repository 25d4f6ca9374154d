"""The preset's classes as data: what each key takes, and instances from plain values. Pure."""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.site import schema

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = TypeVar("_T")

_FORMS = {
    "str": "text",
    "int": "integer",
    "int | None": "integer",
    "float": "number",
    "float | None": "number",
    "bool": "boolean",
    "bool | None": "boolean",
    "list[str]": "texts",
    "dict[str, str]": "text table",
    "dict[str, float]": "number table",
}


@dataclass(frozen=True)
class Key:
    """One key of a table, as reading, the JSON Schema and the reference page see it."""

    name: str
    form: str
    """A value of _FORMS; "table" for a table of its own, "tables" for named ones of one class."""
    inner: type | None
    """The class behind "table" and "tables"."""
    doc: str
    default: Any
    choices: tuple[str, ...] = ()
    pattern: str = ""
    keys: str = ""
    least: float | None = None
    regex: bool = False


_KNOWN: dict[type, dict[str, Key]] = {}


def keys_of(cls: type[Any]) -> dict[str, Key]:
    """The keys of one of the schema's classes, by name, in their order."""
    if cls not in _KNOWN:
        _KNOWN[cls] = {one.name: _key(one) for one in fields(cls)}
    return _KNOWN[cls]


def _key(one: Field[Any]) -> Key:
    annotation = str(one.type)
    if annotation in _FORMS:
        default = one.default if one.default is not MISSING else _made(one)
        return Key(one.name, _FORMS[annotation], None, default=default, **one.metadata)
    inner = annotation.removeprefix("dict[str, ").removesuffix("]")
    form = "table" if inner == annotation else "tables"
    cls = getattr(schema, inner)
    return Key(one.name, form, cls, doc=title_of(cls), default=None)


def _made(one: Field[Any]) -> Any:
    assert one.default_factory is not MISSING  # noqa: S101 - `fact` gives one or the other
    return one.default_factory()


def title_of(cls: type[Any]) -> str:
    """What a table is, from its class's first line: the words behind "[name]: "."""
    return (cls.__doc__ or "").splitlines()[0].partition(": ")[2]


def make(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """An instance of one of the schema's classes from plain values, nested tables included."""
    known = keys_of(cls)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        inner, form = known[name].inner, known[name].form
        if inner is None:
            arguments[name] = value
        elif form == "table":
            arguments[name] = make(inner, value)
        else:
            arguments[name] = {one: make(inner, table) for one, table in value.items()}
    return cls(**arguments)
