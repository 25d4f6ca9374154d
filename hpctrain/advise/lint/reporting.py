"""How a rule tells what it has found: a finding with its place and the line of the source."""

from __future__ import annotations

import ast
from functools import cached_property
from typing import TYPE_CHECKING

from hpctrain.advise.lint.collectives import CollectiveCalls, is_distributed
from hpctrain.advise.lint.definitions import blocks_of
from hpctrain.advise.lint.dependence import RANKS, Dependence
from hpctrain.advise.lint.rule import RULES, LintFinding
from hpctrain.advise.lint.syntax import NAMES, ProgramSyntax, last_attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpctrain.advise.lint.folder import LintFolder, ModuleSummary


class ProgramFacts:
    """All that rules ask of a program: its syntax, what depends on what, what ranks do together."""

    def __init__(
        self, syntax: ProgramSyntax, cpus: int | None = None, folder: LintFolder | None = None
    ) -> None:
        self.syntax = syntax
        self.folder = folder
        """The other files of the checked folder."""
        self.cpus = cpus
        """Of each rank, where that is known."""

    @cached_property
    def dependence(self) -> Dependence:
        """What values depend on."""
        return Dependence(self.syntax)

    @cached_property
    def collectives(self) -> CollectiveCalls:
        """Calls that all ranks make together."""
        imported = self.folder.collective_of if self.folder is not None else None
        return CollectiveCalls(self.syntax, imported)

    @cached_property
    def distributed(self) -> bool:
        """Whether the program itself deals with several ranks."""
        return is_distributed(self.syntax)

    @cached_property
    def trains(self) -> bool:
        """Whether there is a backward pass in the program."""
        return any(is_backward(call) for call in self.syntax.calls)

    @cached_property
    def texts(self) -> frozenset[str]:
        """All texts of the program."""
        return frozenset(
            node.value
            for scope in self.syntax.scopes
            for node in scope.of(ast.Constant)
            if isinstance(node.value, str)
        )

    @cached_property
    def spawns(self) -> bool:
        """Whether it starts its ranks itself, on one machine, by torch.multiprocessing."""
        return any(True for _ in self.syntax.calls_to("spawn", "start_processes", "Process"))

    @cached_property
    def called(self) -> frozenset[str]:
        """The dotted names of all calls."""
        return frozenset(self.syntax.dotted(call.func) for call in self.syntax.calls)

    def imports_where(self, holds: Callable[[ModuleSummary], bool]) -> bool:
        """Return whether it holds for a module of the folder, imported here or there by `*`."""
        if self.folder is None:
            return False
        path = self.syntax.path
        modules = [self.folder.module_of(path, one) for one in self.syntax.imports.values()]
        read = [one for one in modules if one is not None]
        passed_on = [
            self.folder.module_of(one.path, f"{origin}.*") for one in read for origin in one.starred
        ]
        return any(one is not None and holds(one) for one in (*read, *passed_on))

    def mentions(self, *names: str) -> bool:
        """Whether one of these is a name, an attribute or an import of the program."""
        return not self.words.isdisjoint(names)

    @cached_property
    def words(self) -> frozenset[str]:
        """Every identifier of the program."""
        words: set[str] = set()
        for scope in self.syntax.scopes:
            for node in scope.nodes:
                if isinstance(node, ast.Name):
                    words.add(node.id)
                elif isinstance(node, ast.Attribute):
                    words.add(node.attr)
                elif isinstance(node, ast.alias):
                    words.update(node.name.split("."))
                elif isinstance(node, ast.keyword) and node.arg:
                    words.add(node.arg)
        return frozenset(words)

    def finding(self, code: str, node: ast.AST, message: str) -> LintFinding:
        """A finding at a node."""
        line = getattr(node, "lineno", 0)
        text = self.syntax.line(line)
        column = len(text.encode()[: getattr(node, "col_offset", 0)].decode(errors="ignore")) + 1
        return LintFinding(
            rule=RULES[code],
            path=self.syntax.path,
            line=line,
            column=column,
            end_line=getattr(node, "end_lineno", None) or line,
            message=message,
            evidence=text.strip(),
        )


def is_backward(call: ast.Call) -> bool:
    """Whether a call computes gradients."""
    return last_attribute(call) == "backward"


def inside_loop(syntax: ProgramSyntax, node: ast.AST) -> ast.For | ast.While | None:
    """The innermost loop around a node, within its function."""
    for around in syntax.outer(node):
        if isinstance(around, ast.For | ast.While):
            return around
    return None


def exclusive(syntax: ProgramSyntax, first: ast.AST, second: ast.AST) -> bool:
    """Return whether two nodes are in opposite branches of one test, or of tests alike in words."""
    sides = dict(_branches(syntax, first))
    return any(sides.get(test, side) != side for test, side in _branches(syntax, second))


def _branches(syntax: ProgramSyntax, node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the tests around a node, and whether each must be true."""
    child = node
    for around in syntax.outer(node):
        if isinstance(around, ast.If | ast.IfExp) and child is not around.test:
            inside = around.body if isinstance(around.body, list) else [around.body]
            yield _as_plain(around.test, child in inside)
        elif isinstance(around, ast.Match) and child in around.cases:
            for case in around.cases:
                yield f"case {case.pattern.lineno} of {around.lineno}", case is child
        child = around


def _as_plain(test: ast.expr, side: bool) -> tuple[str, bool]:
    """A test without `not`, and whether it must be true."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _as_plain(test.operand, not side)
    text = ast.unparse(test)
    for negative, positive in ((" is not ", " is "), (" != ", " == "), (" not in ", " in ")):
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and negative in text:
            return text.replace(negative, positive, 1), not side
    return text, side


def under_rank_test(facts: ProgramFacts, node: ast.AST) -> bool:
    """Whether only some ranks come to a node: a test around it, or an exit of others before it."""
    child = node
    for around in facts.syntax.outer(node):
        test = around.test if isinstance(around, ast.If | ast.IfExp) else None
        if test is not None and child is not test and facts.dependence.of(test) & RANKS:
            return True
        before = [
            one
            for block in blocks_of(around)
            if child in block
            for one in block[: block.index(child)]
        ]
        if any(
            isinstance(one, ast.If)
            and isinstance(one.body[-1], ast.Return | ast.Continue | ast.Break)
            and facts.dependence.of(one.test) & RANKS
            for one in before
        ):
            return True
        child = around
    return not MAIN_ONLY.isdisjoint(facts.syntax.decorators(facts.syntax.scope_of[node]))


MAIN_ONLY = NAMES["main_only"]
"""Decorators that have one process alone run a function."""


def for_main_only(facts: ProgramFacts, node: ast.AST) -> bool:
    """The same as `under_rank_test`, also where all calls of its function are under one."""
    if under_rank_test(facts, node):
        return True
    calls = facts.syntax.callers(facts.syntax.scope_of[node])
    return bool(calls) and all(under_rank_test(facts, call) for call in calls)
