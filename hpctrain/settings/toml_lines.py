"""TOML files whose keys know their line, so that every message can say `hpctrain.toml:14`.

Values come from the standard library's parser; a small scanner over the same, already accepted text
finds where each key stands. It must not judge TOML: what it does not see gets its table's line.
tests/unit/settings/test_toml_lines.py holds the promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.base.files import read_plain
from hpctrain.errors import NotFound, UsageError
from hpctrain.settings.fields import BITS

if TYPE_CHECKING:
    from pathlib import Path

_TOKEN = re.compile(
    r'(?P<string>"""(?:\\.|[^\\])*?""""{0,2}'
    r"|'''.*?''''{0,2}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*')"
    r"|(?P<comment>\#[^\n]*)"
    r"|(?P<bare>[A-Za-z0-9_-]+)"
    r"|(?P<other>.)",
    re.DOTALL,
)

MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class TomlFile:
    """One parsed file."""

    path: Path
    shown: str
    """The file as messages name it."""
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def where(self, *key: str) -> str:
        """`hpctrain.toml:14` for a key; its table's line where the key has none of its own."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.lines:
                return f"{self.shown}:{self.lines[key[:length]]}"
        return self.shown


def read_toml(path: Path, *, shown: str | None = None) -> TomlFile:
    """Read a TOML file with the line of each key.

    Args:
        path: The file.
        shown: How messages name it; the path by default.

    Raises:
        NotFound: there is no such file.
        UsageError: it cannot be read, or is not TOML.
    """
    shown = shown or str(path)
    try:
        text = read_plain(path, MOST_BYTES).decode()
        values = parse_toml(text.replace("\r\n", "\n"))
    except FileNotFoundError:
        raise NotFound(f"{shown} is not there; check the path") from None
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown} is not UTF-8 text: {error.reason}; save it as UTF-8") from None
    except ValueError as error:
        raise UsageError(f"{shown} is not valid TOML: {error}") from None
    return TomlFile(path, shown, values, key_lines(text))


def parse_toml(text: str) -> dict[str, Any]:
    """The values of a TOML text.

    Raises:
        ValueError: it is not TOML, or no program could hold what it says.
    """
    import tomllib

    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists or tables lie too deep in each other") from None
    _refuse_huge(values)
    return values


def _refuse_huge(value: object) -> None:
    """TOML's integers have 64 bits; the parser takes any, which floats and C cannot."""
    if isinstance(value, int) and value.bit_length() > BITS:
        raise ValueError(f"an integer of {value.bit_length()} bits; there are 64 with its sign")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        _refuse_huge(one)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line of every table and key in a text that is valid TOML, counted from 1.

    Keys inside inline tables and arrays are not listed; a key in two places has its first line.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    key: list[str] = []
    line, depth = 1, 0
    in_value = in_header = False
    for token in _TOKEN.finditer(text + "\n"):
        word = token.group()
        if in_value:
            depth += (word in "[{") - (word in "]}")
            in_value = depth > 0 or word != "\n"
        elif token.lastgroup in {"bare", "string"}:
            key.append(word.strip("\"'"))
        elif word == "[":
            in_header = True
        elif word == "=":
            lines.setdefault((*table, *key), line)
            key, in_value, depth = [], True, 0
        elif word == "\n" and in_header:
            table, key, in_header = tuple(key), [], False
            lines.setdefault(table, line)
        line += word.count("\n")
    return lines
