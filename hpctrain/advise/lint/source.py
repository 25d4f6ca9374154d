"""The text of a program: read in the encoding that it names, changed in places, written back.

tests/unit/lint/test_files.py and test_fixes.py hold the promises.
"""

from __future__ import annotations

import codecs
import difflib
import io
import os
import shutil
import tempfile
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.lint.rule import SourceEdit
from hpctrain.advise.lint.syntax import MOST_BYTES
from hpctrain.core.base.files import read_plain

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable

    from hpctrain.advise.lint.syntax import ProgramSyntax

_UTF8 = frozenset({"utf-8", "utf-8-sig"})
_OF_HOST_NAMES = frozenset({"idna", "punycode", "undefined"})
"""Codecs that Python takes in a first line: they raise, or take minutes for megabytes."""


class NotText(ValueError):
    """A file that cannot be read, in words."""


def read_source(path: Path) -> str:
    """The text of a file, in the encoding that its first lines name.

    Raises:
        NotText: it cannot be read, in words.
    """
    try:
        raw = read_plain(path, MOST_BYTES)
    except OSError as error:
        raise NotText(f"cannot be read: {error.strerror or error}") from None
    return decoded(raw)


def decoded(raw: bytes) -> str:
    """A source as text.

    Raises:
        NotText: it is in another encoding than it says.
    """
    if len(raw) > MOST_BYTES:
        raise NotText(f"has more than {MOST_BYTES} bytes")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        if codecs.lookup(encoding).name in _OF_HOST_NAMES:
            raise NotText(f"cannot be read: {encoding} is no encoding of a program")
        return raw.decode(encoding)
    except (SyntaxError, LookupError) as error:
        raise NotText(f"cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise NotText(
            f"is not {error.encoding} text at byte {error.start}; save it as UTF-8, or name its "
            "encoding in the first line"
        ) from None


def write_source(path: Path, text: str) -> None:
    """Put a fixed text in a file's place, with its permissions; a link stays a link.

    Raises:
        OSError: it could not be written, in the name of the file, which is as it was.
        NotText: the file is not in UTF-8, or has changed meanwhile.
    """
    place = path.resolve()
    raw = place.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    if encoding not in _UTF8:
        raise NotText(f"is {encoding} text; --fix writes UTF-8 only")
    descriptor, staged = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode(encoding))
        shutil.copymode(place, staged)
        Path(staged).replace(place)
    except OSError as error:
        Path(staged).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


# ---- changes: where they go in bytes, and how several are made at once


def span(syntax: ProgramSyntax, node: ast.expr | ast.alias) -> tuple[int, int]:
    """The bytes of a node, from and to."""
    offsets = syntax.offsets
    end_line = node.end_lineno or node.lineno
    start = offsets[node.lineno - 1] + node.col_offset
    return start, offsets[end_line - 1] + (node.end_col_offset or 0)


def replace_node(syntax: ProgramSyntax, node: ast.expr | ast.alias, text: str) -> SourceEdit:
    """Another text in a node's place."""
    return SourceEdit(*span(syntax, node), text)


def insert_argument(syntax: ProgramSyntax, call: ast.Call, text: str) -> tuple[SourceEdit, ...]:
    """A new first argument; nothing where the call's bracket cannot be told for certain."""
    raw = syntax.raw
    place = span(syntax, call.func)[1]
    if raw[place : place + 1] != b"(":
        return ()
    place += 1
    has_more = bool(call.args or call.keywords)
    return (SourceEdit(place, place, f"{text}, " if has_more else text),)


def apply_edits(text: str, edits: Iterable[SourceEdit]) -> str:
    """The text with all edits that do not overlap, each once."""
    raw = text.encode()
    parts: list[bytes] = []
    place = 0
    for edit in sorted(set(edits)):
        if edit.start < place:
            continue
        parts += [raw[place : edit.start], edit.text.encode()]
        place = edit.end
    parts.append(raw[place:])
    return b"".join(parts).decode()


def as_diff(before: str, after: str, path: str) -> str:
    """What changes, as `diff -u` shows it."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
