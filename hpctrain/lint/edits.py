"""Changes of a text: where they go in bytes, and how several are made at once.

tests/unit/lint/test_fixes.py holds the promises.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from hpctrain.lint.rule import SourceEdit

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable

    from hpctrain.lint.syntax import ProgramSyntax


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
