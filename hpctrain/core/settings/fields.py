"""Keys of settings and of site presets: a value's rule stands beside the field that holds it.

`field`, `table` and `tables` declare the keys of a `Table`, a frozen dataclass.

Pure, standard library only. tests/unit/settings/test_layers.py, test_check.py and
tests/unit/site/test_schema.py hold the promises.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")
BITS = 63
"""TOML's integers have 64 bits with their sign."""
WORD = r"\S*"
_VERSION = r"(>=|<=|==|!=|>|<) ?\d+(\.\d+)*"
NAME = r"[a-z][a-z0-9_-]{1,31}"
VARIABLE = r"[A-Z_][A-Z0-9_]*"
TIME = r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d"
VERSIONS = rf"{_VERSION}( ?, ?{_VERSION})*"
OPTION = r"--?[A-Za-z].*"
DATE = r"\d{4}-\d\d-\d\d"
ABSOLUTE = r"/.+"
BIN = r"[1-9]\d*-([1-9]\d*)?"
COUNT = r"[1-9]\d*"
CPU_LIST = r"\d+(-\d+)?(,\d+(-\d+)?)*"
SBATCH = r"SBATCH_[A-Z0-9_]+"
MEMLOCK = r"unlimited|\d+"
IN_WORDS = {
    WORD: "one word without blanks",
    NAME: "2 to 32 of a-z, 0-9, - and _, beginning with a letter",
    VARIABLE: "capital letters, digits and _, not beginning with a digit",
    TIME: "[days-]hours:minutes:seconds",
    VERSIONS: "conditions such as >=2.27 or >=2.21,<2.24",
    OPTION: "an option such as --gres=gpu:4",
    DATE: "a date such as 2026-01-31",
    ABSOLUTE: "an absolute path",
    BIN: "numbers of nodes such as 1-91, or 184- without an upper end",
    COUNT: "a number of nodes",
    CPU_LIST: "numbers of CPUs such as 0-7,64-71",
    SBATCH: "a variable of sbatch's such as SBATCH_ACCOUNT",
    MEMLOCK: "unlimited, or a number of KiB",
}
"""What each pattern asks for, for messages. Patterns hold for the whole text."""
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
"""What a field's type asks of a value."""
TAKES = {
    "free text": "text",
    "text": "text in quotes",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "texts": "a list of texts",
    "text table": "a table of NAME = text",
    "number table": "a table of NAME = number",
    "table": "a table",
    "tables": "tables under names of their own",
}
"""What each form of `Key` takes, for messages."""


@dataclass(frozen=True)
class Key:
    """One key of a table, as reading, the JSON Schema and the reference pages see it."""

    doc: str
    """What it means, in which unit."""
    name: str = ""
    form: str = ""
    """A value of _FORMS; "table" for a table of its own, "tables" for named ones of one class."""
    default: Any = None
    inner: type | None = None
    """The class behind "table" and "tables"."""
    choices: tuple[str, ...] = ()
    """The texts that it takes, where they are few."""
    pattern: str = ""
    """Of a text, of each item of a list, or of each value of a table."""
    keys: str = ""
    """Pattern of a table's names."""
    least: float | None = 0
    """Smallest number; None for any."""
    above: float | None = None
    """The number is larger than this; in seconds."""
    most: float | None = None
    regex: bool = False
    """Its texts are regular expressions, which must compile."""
    free: bool = False
    """A setting: text may be empty, have several lines or be a bare number, and its rules but
    `choices` are held against what all layers give together."""


def field(default: Any, doc: str, **rules: Any) -> Any:
    """A dataclass's field: its default, what it means, and the rules among `Key`'s attributes."""
    metadata = {"key": Key(doc, default=default, **rules)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def table(cls: type[Any]) -> Any:
    """A field that holds a table of its own."""
    key = Key(title_of(cls), form="table", inner=cls)
    return dataclasses.field(default_factory=cls, metadata={"key": key})


def tables(cls: type[Any]) -> Any:
    """A field that holds tables of one class under names of the user's own."""
    key = Key(title_of(cls), form="tables", inner=cls)
    return dataclasses.field(default_factory=dict, metadata={"key": key})


def title_of(cls: type[Any]) -> str:
    """What a table is, from its class's first line: the words behind "[name]: "."""
    return (cls.__doc__ or "").splitlines()[0].partition(": ")[2]


@dataclass_transform(frozen_default=True)
class Table:
    """Base of the classes whose fields are keys: frozen dataclasses.

    The methods that a dataclass has are made once here and not for each class: that would cost
    every command 8 ms.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(init=False, eq=False, repr=False, match_args=False)(cls)

    def __init__(self, *first: Any, **values: Any) -> None:
        values |= zip(self.__dataclass_fields__, first, strict=False)
        for name, key in self.__dataclass_fields__.items():
            if name in values:
                value = values.pop(name)
            elif key.default_factory is not dataclasses.MISSING:
                value = key.default_factory()
            else:
                value = key.default
            object.__setattr__(self, name, value)
        if values:
            raise TypeError(f"{type(self).__name__} has no key {', '.join(values)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


@cache
def keys_of(cls: Any) -> dict[str, Key]:
    """The keys of a class by name, in their order."""
    keys: dict[str, Key] = {}
    for attribute in dataclasses.fields(cls):
        if key := attribute.metadata.get("key"):
            form = key.form or _FORMS[str(attribute.type)]
            keys[attribute.name] = replace(key, name=attribute.name, form=form)
    return keys


def make(cls: Callable[..., _T], values: Mapping[str, Any]) -> _T:
    """An instance of such a class from plain values, nested tables included.

    Raises:
        KeyError: the class has no such key.
    """
    keys = keys_of(cls)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        inner, form = keys[name].inner, keys[name].form
        if inner is None:
            arguments[name] = value
        elif form == "table":
            arguments[name] = make(inner, value)
        else:
            arguments[name] = {at: make(inner, one) for at, one in value.items()}
    return cls(**arguments)


def convert(key: Key, value: Any, name: str) -> Any:
    """The value as its key takes it; of a table with free names, one of its values.

    TOML's unquoted times of day pass as text (`time = 01:30:00`), dates too but in a setting, and
    for a setting bare whole numbers (`nodes = 4`); a whole number passes as any number (`lr = 1`).

    Raises:
        ValueError: it is of another type or form.
    """
    form = key.form.removesuffix(" table")
    converted = _converted(value, form, free=key.free)
    if converted is None:
        nan = key.free and isinstance(value, float)  # as TOML spells it
        takes = TAKES["free text" if key.free and form == "text" else form]
        raise ValueError(f"{name} is {str(value) if nan else shown(value)}; it takes {takes}")
    if key.free:
        key = replace(key, pattern="", least=None, above=None, most=None)
    if wrong := fault(key, converted, name):
        raise ValueError(wrong)
    return converted


def _converted(value: Any, form: str, *, free: bool) -> Any:  # noqa: PLR0911 - a line per type
    if form == "texts":
        texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return list(value) if texts else None
    if isinstance(value, bool) or form == "boolean":
        return value if isinstance(value, bool) and form == "boolean" else None
    if isinstance(value, int) and value.bit_length() > BITS:
        return None
    if form == "integer":
        return value if isinstance(value, int) else None
    if form == "number":
        finite = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if finite else None
    if isinstance(value, dt.time) or (type(value) is dt.date and not free):
        return value.isoformat()
    if free and isinstance(value, int):
        return str(value)
    return value if isinstance(value, str) else None


def fault(key: Key, value: Any, name: str) -> str:
    """What is wrong with a value of its key's type, in a sentence; "" where nothing is."""
    form = key.form.removesuffix(" table")
    if form == "texts":
        faults = ((text, _text_fault(key, text, item=True)) for text in value)
        return next((f"{name} has {shown(text)}{wrong}" for text, wrong in faults if wrong), "")
    wrong = ""
    if form == "text":
        wrong = _text_fault(key, value, item=False)
    elif form in {"integer", "number"}:
        wrong = _number_fault(key, value)
    return wrong and f"{name} is {shown(value)}{wrong}"


def _number_fault(key: Key, value: float) -> str:
    if key.least is not None and value < key.least:
        return f"; it takes at least {key.least:g}"
    if key.above is not None and value <= key.above:
        return f"; it takes more than {key.above:g} seconds"
    if key.most is not None and value > key.most:
        return f"; it takes at most {key.most:g}"
    return ""


def _text_fault(key: Key, text: str, *, item: bool) -> str:
    if key.choices and text not in key.choices:
        return f"; it takes one of {', '.join(filter(None, key.choices))}"
    if not text:
        return "; leave empty texts out" if item and not key.free else ""
    if not key.free and not text.isprintable():
        return "; it takes one line without control characters"
    if key.pattern and not (re.fullmatch(key.pattern, text) and text.isprintable()):
        return f"; it takes {in_words(key.pattern)}"
    if key.regex:
        try:
            re.compile(text)
        except re.error as error:
            return f", which is no regular expression: {error}"
    return ""


def in_words(pattern: str) -> str:
    """What a pattern of this module asks for."""
    return IN_WORDS.get(pattern, f"what matches {pattern}")


def shown(value: Any) -> str:
    """A value as its owner wrote it, near enough for a message."""
    return json.dumps(value, ensure_ascii=False, default=str)
