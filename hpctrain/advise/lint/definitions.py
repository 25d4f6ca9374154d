"""Which assignments may have given a name its value at the place where the name is used.

Statements count in their order, and branches of one test apart: an assignment below a use, or in
the other branch, does not reach it unless a loop leads back.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.advise.lint.syntax import LintScope, ProgramSyntax

Place = tuple[int, ...]
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(eq=False)
class Definition:
    """One assignment to a name."""

    scope: LintScope
    target: ast.AST
    value: ast.expr
    place: Place | None = ()
    """Where in an unpacked value the name's part is; None behind a star."""
    kind: str = "assign"
    """"assign", "add" (`+=` and the like) or "loop"."""


@dataclass(eq=False)
class NameDefinitions:
    """All assignments to one name in one function, or to one attribute in a class."""

    syntax: ProgramSyntax
    all: list[Definition] = field(default_factory=list)
    _of_statement: dict[ast.AST, list[Definition]] = field(default_factory=dict)
    _holders: set[ast.AST] = field(default_factory=set)

    def reaching(self, use: ast.AST) -> tuple[list[Definition], bool]:
        """Return the assignments that may reach a use, and whether the start may reach it too."""
        if not self._holders:
            self._index()
        reaching: dict[Definition, None] = {}
        child = use
        for around in self.syntax.outer(use):
            more, ends = self._before(child, around)
            reaching.update(dict.fromkeys(more))
            if ends:
                return list(reaching), False
            child = around
        return list(reaching), True

    def _index(self) -> None:
        for definition in self.all:
            node = self._statement(definition)
            self._of_statement.setdefault(node, []).append(definition)
            self._holders.add(node)
            self._holders.update(self.syntax.outer(node))

    def _statement(self, definition: Definition) -> ast.AST:
        """Return the statement that assigns; a comprehension's names are its own."""
        node = definition.target
        while not isinstance(node, (ast.stmt, *_COMPREHENSIONS)):
            node = self.syntax.parents[node]
        return node

    def _before(self, child: ast.AST, around: ast.AST) -> tuple[list[Definition], bool]:
        """Return what reaches a child from its parent's other parts, and whether that is all."""
        if isinstance(around, _COMPREHENSIONS):
            own = self._of_statement.get(around, [])
            return own, bool(own)
        reaching: list[Definition] = []
        for block in blocks_of(around):
            if child in block:
                reaching, ends = self._block(block[: block.index(child)])
                if ends:
                    return reaching, True
        if isinstance(around, ast.Try):
            more, ends = self._earlier_in_try(child, around)
            return reaching + more, ends
        if isinstance(around, ast.For | ast.AsyncFor) and child in around.body:
            own = self._of_statement.get(around, [])
            return reaching + (own or list(self._inside(around))), bool(own)
        if isinstance(around, ast.While) and child not in around.orelse:
            return reaching + list(self._inside(around)), False
        return reaching, False

    def _earlier_in_try(self, child: ast.AST, around: ast.Try) -> tuple[list[Definition], bool]:
        if child in around.orelse:
            return self._block(around.body)
        if child in around.handlers or child in around.finalbody:
            return [one for part in around.body for one in self._inside(part)], False
        return [], False

    def _block(self, block: Sequence[ast.stmt]) -> tuple[list[Definition], bool]:
        """Return what is assigned at the end of a block, and whether every way through assigns."""
        if block and isinstance(block[-1], _LEAVING):
            return [], True
        reaching: list[Definition] = []
        for statement in reversed(block):
            if statement not in self._holders:
                continue
            more, ends = self._after(statement)
            reaching += more
            if ends:
                return reaching, True
        return reaching, False

    def _after(self, node: ast.stmt) -> tuple[list[Definition], bool]:
        own = self._of_statement.get(node, [])
        if isinstance(node, ast.If):
            body, body_ends = self._block(node.body)
            other, other_ends = self._block(node.orelse)
            return [*own, *body, *other], bool(own) or (body_ends and other_ends)
        if isinstance(node, ast.With | ast.AsyncWith):
            body, ends = self._block(node.body)
            return [*own, *body], ends or bool(own)
        if isinstance(node, ast.Try):
            _, ends = self._block(node.body)
            kept = all(self._block(handler.body)[1] for handler in node.handlers)
            return list(self._inside(node)), ends and kept
        if isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.Match | ast.ClassDef):
            return list(self._inside(node)), False
        return own, bool(own)

    def _inside(self, node: ast.AST) -> Iterator[Definition]:
        """Yield all assignments at or below a node."""
        if node not in self._holders:
            return
        for statement, definitions in self._of_statement.items():
            if statement is node or node in self.syntax.outer(statement):
                yield from definitions


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements that a statement holds."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def definitions_in(scope: LintScope) -> Iterator[Definition]:
    """Yield each assignment of a function, part by part where a value is unpacked."""
    for node in scope.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _parts(scope, target, node.value, "assign")
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
            if node.value is not None:
                kind = "add" if isinstance(node, ast.AugAssign) else "assign"
                yield Definition(scope, node.target, node.value, (), kind)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield from _parts(scope, node.target, node.iter, "loop")


def _parts(
    scope: LintScope, target: ast.AST, value: ast.expr, kind: str, place: Place | None = ()
) -> Iterator[Definition]:
    if isinstance(target, ast.Tuple | ast.List):
        starred = False
        for index, part in enumerate(target.elts):
            starred = starred or isinstance(part, ast.Starred)
            inner = None if starred or place is None else (*place, index)
            yield from _parts(scope, part, value, kind, inner)
    elif isinstance(target, ast.Starred):
        yield from _parts(scope, target.value, value, kind, None)
    else:
        yield Definition(scope, target, value, place, kind)
