"""Whether a value is what its key takes. Pure; messages are without their place."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from typing import TYPE_CHECKING, Any

from hpctrain.site.schema import IN_WORDS

if TYPE_CHECKING:
    from hpctrain.site.keys import Key

TAKES = {
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
"""What each form of `keys.Key` takes, for messages."""


def checked(key: Key, value: Any, told: str) -> Any:
    """The value as its key takes it; of a table with free names, one of its values.

    TOML's unquoted dates and times of day pass as text: `reviewed = 2026-01-31`.

    Args:
        key: The key.
        value: As the file has it.
        told: How messages name it.

    Raises:
        ValueError: it is of another type or form.
    """
    form = key.form.removesuffix(" table")
    converted = _converted(value, form)
    if converted is None:
        raise ValueError(f"{told} is {shown(value)}; it takes {TAKES[form]}")
    if form == "text":
        if converted:
            _check_text(key, converted, f"{told} is {shown(converted)}")
        elif key.choices and "" not in key.choices:
            raise ValueError(f'{told} is ""; it takes one of {", ".join(key.choices)}')
    elif form == "texts":
        for text in converted:
            _check_text(key, text, f"{told} has {shown(text)}")
    elif form != "boolean" and key.least is not None and converted < key.least:
        raise ValueError(f"{told} is {shown(value)}; it takes at least {key.least:g}")
    return converted


def _converted(value: Any, form: str) -> Any:
    """The value as that form, or None where it is of another."""
    if form == "texts":
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return list(value) if texts else None
    if isinstance(value, bool) or form == "boolean":
        return value if isinstance(value, bool) and form == "boolean" else None
    if form == "integer":
        return value if isinstance(value, int) else None
    if form == "number":
        finite = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if finite else None
    if isinstance(value, dt.date | dt.time) and not isinstance(value, dt.datetime):
        return value.isoformat()
    return value if isinstance(value, str) else None


def _check_text(key: Key, text: str, told: str) -> None:
    if not text:
        raise ValueError(f"{told}; leave empty texts out")
    if not text.isprintable():
        raise ValueError(f"{told}; it takes one line without control characters")
    if key.choices and text not in key.choices:
        raise ValueError(f"{told}; it takes one of {', '.join(filter(None, key.choices))}")
    if key.pattern and not re.fullmatch(key.pattern, text):
        raise ValueError(f"{told}; it takes {in_words(key.pattern)}")
    if key.regex:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"{told}, which is no regular expression: {error}") from None


def in_words(pattern: str) -> str:
    """What a pattern of the schema's asks for."""
    return IN_WORDS.get(pattern, f"what matches {pattern}")


def shown(value: Any) -> str:
    """A value as its owner wrote it, near enough for a message."""
    return json.dumps(value, ensure_ascii=False, default=str)
