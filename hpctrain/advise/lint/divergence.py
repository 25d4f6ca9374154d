"""Rules HT101 to HT115: ranks that do not come to the same collectives.

A walk over each function's statements, with the tests around each of them in hand.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.advise.lint.collectives import (
    LIBRARY_SAVES,
    SEVERAL,
    CollectiveCall,
    asks_for_several,
)
from hpctrain.advise.lint.dependence import BATCH, CHANCE, CLOCK, RANKS, UNSURE, on_rank
from hpctrain.advise.lint.reporting import MAIN_ONLY, ProgramFacts, exclusive, is_backward
from hpctrain.advise.lint.syntax import NAMES, LintScope, constant, keyword, last, last_attribute

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.advise.lint.rule import LintFinding

_MAYBE = "maybe"
"""The kind of a test that may come out differently, or alike: a hint."""
_CODES = {BATCH: "HT105", CHANCE: "HT106", CLOCK: "HT112", _MAYBE: "HT113"}
_GENERAL = NAMES["general"]
"""Exceptions that one rank may meet and another not; a missing import, all meet."""
_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit", "os.abort", "os.kill"})


@dataclass(frozen=True)
class _Test:
    """What must hold for a statement to be reached."""

    kind: str
    node: ast.stmt | ast.expr | ast.ExceptHandler
    text: str
    side: str = ""
    """"main": false on rank 1; "others": false on rank 0."""


@dataclass(frozen=True)
class _After:
    """What comes after a block, seen from inside it."""

    rest: tuple[ast.stmt, ...]
    loop: ast.For | ast.AsyncFor | ast.While | None = None
    """The loop whose body the block is."""


class _Walk:
    """One function's statements in order."""

    def __init__(self, facts: ProgramFacts, scope: LintScope) -> None:
        self.facts = facts
        self.scope = scope
        self.findings: list[tuple[LintFinding, _Test | None, str]] = []
        self.reported: set[tuple[str, ast.AST]] = set()

    def run(self) -> Iterator[LintFinding]:
        """All findings but those of tests that are each other's opposite."""
        node = self.scope.node
        tests = tuple(
            _Test("rank", node, f"@{ast.unparse(decorator)}")
            for name, decorator in self.facts.syntax.decorators(self.scope).items()
            if name in MAIN_ONLY and not isinstance(node, ast.Module)
        )
        self._block(node.body, tests, ())
        sides: dict[str, set[str]] = {}
        for _, test, name in self.findings:
            if test is not None and test.side:
                sides.setdefault(name, set()).add(test.side)
        for finding, test, name in self.findings:
            # One test gives it to rank 0 and another one to the others: they meet.
            if test is None or not test.side or len(sides[name]) == 1:
                yield finding

    def _block(
        self, block: Sequence[ast.stmt], tests: tuple[_Test, ...], after: tuple[_After, ...]
    ) -> None:
        for index, statement in enumerate(block):
            here = (_After(tuple(block[index + 1 :])), *after)
            self._statement(statement, tests, here)

    def _statement(
        self, node: ast.stmt, tests: tuple[_Test, ...], after: tuple[_After, ...]
    ) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, ast.If):
            self._if(node, tests, after)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            head = node.test if isinstance(node, ast.While) else node.iter
            self._expression(head, tests)
            self._rounds(node, head)
            self._block(node.body, tests, (_After((), node), *after))
            self._block(node.orelse, tests, after)
        elif isinstance(node, ast.Try):
            self._try(node, tests, after)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._expression(item.context_expr, tests)
            self._block(node.body, tests, after)
        elif isinstance(node, ast.Match):
            self._expression(node.subject, tests)
            for case in node.cases:
                self._block(case.body, tests, after)
        else:
            self._expression(node, tests)

    # tests

    def _test(
        self, node: ast.expr, *, inverted: bool = False, of_exit: bool = False
    ) -> _Test | None:
        """What a test lets through that not all ranks come to, if any; or lets leave."""
        sources = self.facts.dependence.of(node)
        text = self.facts.syntax.code(node)
        text = f"not ({text})" if inverted else text
        if sources & RANKS and not of_exit and self._all_may_pass(node, inverted=inverted):
            return _Test(_MAYBE, node, text)
        if sources & RANKS:
            results = [on_rank(self.facts.dependence, node, rank) for rank in (0, 1)]
            results = [None if one is None else one != inverted for one in results]
            side = "main" if results[1] is False else "others" if results[0] is False else ""
            return _Test("rank", node, text, side)
        for kind in (CLOCK, BATCH, CHANCE):
            if kind in sources and not (kind == CHANCE and self.facts.dependence.seeded):
                return _Test(kind, node, text)
        return _Test(_MAYBE, node, text) if sources & UNSURE else None

    def _all_may_pass(self, node: ast.expr, *, inverted: bool) -> bool:
        """Whether a part of a test that knows no rank lets all through: `rank == 0 or always`."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._all_may_pass(node.operand, inverted=not inverted)
        if not isinstance(node, ast.BoolOp) or isinstance(node.op, ast.Or) == inverted:
            return False
        others = [one for one in node.values if not self.facts.dependence.of(one) & RANKS]
        return any(not _is_for_several(one) for one in others)

    def _if(self, node: ast.If, tests: tuple[_Test, ...], after: tuple[_After, ...]) -> None:
        self._expression(node.test, tests)
        test = self._test(node.test)
        if test is None or test.kind == _MAYBE:
            self._exit_inside(node, tests, after)
        made, otherwise = self._sequence(node.body), self._sequence(node.orelse)
        ends = isinstance(node.body[-1], ast.Return) and after
        meets_later = bool(made and ends) and made == self._sequence(after[0].rest)
        if test is None or (made and otherwise) or meets_later:
            if test is not None and test.kind == "rank" and otherwise and made != otherwise:
                self._report_order(node, made, otherwise)
            self._block(node.body, tests, after)
            self._block(node.orelse, tests, after)
            return
        inverted = self._test(node.test, inverted=True)
        self._block(node.body, (*tests, test), after)
        self._block(node.orelse, (*tests, inverted or test), after)
        for block, other, is_else in (
            (node.body, node.orelse, False),
            (node.orelse, node.body, True),
        ):
            leaves = _leaves(self.facts, block)
            passed = self._test(node.test, inverted=is_else, of_exit=True)
            if leaves is None or _leaves(self.facts, other) is not None or passed is None:
                continue
            if passed.kind != "rank" or not self._all_may_pass(node.test, inverted=not is_else):
                self._exit(leaves, block, passed, after)

    def _report_order(self, node: ast.If, made: list[str], otherwise: list[str]) -> None:
        """HT109, if both branches come to their collectives whenever they are taken."""
        calls = [self.facts.collectives.of(one, self.scope) for one in _calls_in([node])]
        if made and all(one.is_certain for one in calls if one is not None):
            message = (
                f"ranks call different collectives: {_listed(made)} where "
                f"{self.facts.syntax.code(node.test)}, {_listed(otherwise)} elsewhere"
            )
            self._report("HT109", node, message, node)

    def _exit(
        self, leaves: ast.stmt, block: Sequence[ast.stmt], test: _Test, after: tuple[_After, ...]
    ) -> None:
        """Leaving a function or a loop early leaves what the others still do."""
        ends = isinstance(leaves, ast.Expr)
        if isinstance(leaves, ast.Raise) or self._sequence(block) or (ends and test.kind != "rank"):
            return
        skipped = self._skipped(leaves, after)
        if skipped is None:
            return
        if test.kind == _MAYBE and not self.facts.distributed:
            return
        code = _CODES.get(test.kind, "HT102")
        how = {ast.Continue: "continue", ast.Break: "break", ast.Return: "return"}
        word = how.get(type(leaves), "the exit")
        line = skipped[0].lineno
        message = f"{word} where {test.text}: such a rank leaves out {skipped[1]}() at line {line}"
        named = _Test(test.kind, test.node, test.text)
        self._report(code, leaves, message, test.node, named, skipped[1])

    def _exit_inside(
        self, node: ast.If, tests: tuple[_Test, ...], after: tuple[_After, ...]
    ) -> None:
        """HT102 for a test under a rank's: no other rank comes to it, and none leaves later on."""
        leaves, test = _leaves(self.facts, node.body), _strongest(tests) if tests else None
        around = self.facts.syntax.parents[test.node] if test is not None else None
        if leaves is None or test is None or not isinstance(around, ast.If) or around.orelse:
            return
        skipped, end = self._skipped(leaves, after), around.end_lineno or 0
        if skipped is None or test.kind != "rank" or around in self.facts.syntax.outer(skipped[0]):
            return
        last_line = skipped[0].lineno if skipped[0].lineno > end else math.inf
        others = [one for one in self.scope.nodes if isinstance(one, type(leaves))]
        if not any(end < one.lineno < last_line for one in others):
            self._exit(leaves, node.body, test, after)

    def _skipped(self, leaves: ast.stmt, after: tuple[_After, ...]) -> tuple[ast.Call, str] | None:
        """The first call that a rank leaves out which leaves here."""
        for following in after:
            skipped = self._first(following.rest, leaves)
            if skipped is not None:
                return skipped
            if following.loop is None:
                continue
            if not isinstance(leaves, ast.Continue):
                skipped = self._first(following.loop.body, leaves)
                if skipped is not None:
                    return skipped
            if isinstance(leaves, ast.Continue | ast.Break):
                return None
        return None

    def _first(
        self, block: Sequence[ast.stmt], leaves: ast.stmt | None = None
    ) -> tuple[ast.Call, str] | None:
        """The first call that ranks make together, but in a branch opposite to that statement."""
        for call in _calls_in(block):
            name = self._name(call)
            if name and not (leaves and exclusive(self.facts.syntax, leaves, call)):
                return call, name
        return None

    def _name(self, call: ast.Call) -> str:
        made = self.facts.collectives.of(call, self.scope)
        if made is not None:
            return (made.via or made.name) if made.is_certain else ""
        if not self.facts.distributed:
            return ""
        if is_backward(call):
            return "backward"
        inner = self.facts.syntax.resolve(call, self.scope)
        computes = inner is not None and any(is_backward(one) for one in inner.of(ast.Call))
        return inner.name if inner is not None and computes else ""

    def _sequence(self, block: Sequence[ast.stmt]) -> list[str]:
        """The collectives of a block, in order."""
        made = [self.facts.collectives.of(call, self.scope) for call in _calls_in(block)]
        return [one.name for one in made if one is not None]

    # try

    def _rounds(self, node: ast.For | ast.AsyncFor | ast.While, head: ast.expr) -> None:
        """A loop that makes collectives a random number of times, or in the order of a set."""
        made = self._first(node.body)
        if isinstance(node, ast.While) or made is None:
            return
        text, later = self.facts.syntax.code(head), f"{made[1]}() at line {made[0].lineno}"
        dependence = self.facts.dependence
        called = self.facts.syntax.dotted(head.func) if isinstance(head, ast.Call) else ""
        lengths = head.args if isinstance(head, ast.Call) and called == "range" else []
        if not dependence.seeded and any(CHANCE in dependence.of(one) for one in lengths):
            message = f"ranks call {later} a different number of times: {text} is random"
            self._report("HT106", node, message, node)
        elif self._is_set_of_texts(head):
            message = f"ranks call {later} in a different order: {text} is a set"
            self._report("HT109", node, message, node)

    def _is_set_of_texts(self, node: ast.expr) -> bool:
        """Whether a loop goes over texts whose order is another in each process."""
        if isinstance(node, ast.Name):
            values = self.facts.dependence.values_at(node)
            node = values[0] if len(values) == 1 else node
        if isinstance(node, ast.Set):
            return all(isinstance(constant(one), str) for one in node.elts)
        return isinstance(node, ast.SetComp) and _is_text(node.elt)

    def _try(self, node: ast.Try, tests: tuple[_Test, ...], after: tuple[_After, ...]) -> None:
        self._block(node.body, tests, after)
        self._block(node.orelse, tests, after)
        self._block(node.finalbody, tests, after)
        for handler in node.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            names = [
                last(self.facts.syntax.dotted(kind)) if kind else "BaseException" for kind in kinds
            ]
            if _GENERAL.isdisjoint(names):
                self._block(handler.body, tests, after)
                continue
            caught = _Test("except", handler, "the exception")
            self._block(handler.body, (*tests, caught), after)
            self._swallowed(node, handler, after)

    def _swallowed(
        self, node: ast.Try, handler: ast.ExceptHandler, after: tuple[_After, ...]
    ) -> None:
        """An exception that one rank meets and gets over, while the others wait for it."""
        loop = next((one.loop for one in after if one.loop is not None), None)
        if loop is None or not self.facts.distributed or not self._goes_on(handler):
            return
        if isinstance(loop, ast.While) and isinstance((node.orelse or node.body)[-1], ast.Break):
            return  # it tries the same step again
        skipped = self._first(node.body)
        code = "HT107"
        if skipped is not None and not self._is_step(node.body):
            if self.facts.collectives.of(skipped[0], self.scope) is None:
                return  # a backward pass of something else than the model
            code = "HT113"  # all ranks may meet the same exception
        if skipped is None and isinstance(handler.body[-1], ast.Continue | ast.Break):
            skipped = self._skipped(handler.body[-1], after)
            if skipped is not None and not self._is_step(node.body):
                return
        if skipped is not None:
            message = (
                "a rank that meets the exception goes on without "
                f"{skipped[1]}() at line {skipped[0].lineno}; the others wait in it"
            )
            self._report(code, handler, message, handler)

    def _goes_on(self, handler: ast.ExceptHandler) -> bool:
        """Whether a rank alone may get to the end of a handler."""
        for node in ast.walk(handler):
            if isinstance(node, ast.Return):
                return False
            if isinstance(node, ast.If) and asks_for_several(node.test, self.scope):
                return False
            if isinstance(node, ast.Call):
                dotted = self.facts.syntax.dotted(node.func)
                if dotted in _EXITS or self.facts.collectives.of(node, self.scope) is not None:
                    return False
        return not _always_raises(handler.body)

    def _is_step(self, block: Sequence[ast.stmt]) -> bool:
        """Whether a block computes with a batch."""
        return any(
            BATCH in self.facts.dependence.of(arg) for call in _calls_in(block) for arg in call.args
        )

    # what is reported

    def _expression(self, node: ast.AST, tests: tuple[_Test, ...]) -> None:
        for call in _calls_in([node]):
            around = (*tests, *self._inline(call))
            if not around:
                continue
            test = _strongest(around)
            where = f"only where {test.text} (line {test.node.lineno})"
            made = self.facts.collectives.of(call, self.scope)
            if made is not None:
                self._report_collective(made, call, test)
            elif is_backward(call) and self.facts.distributed:
                if test.kind != "except":
                    code = _CODES.get(test.kind, "HT111")
                    self._report(
                        code, call, f"backward() runs {where}", test.node, test, "backward"
                    )
            elif test.kind == "rank" and self._is_wrapped(call):
                message = f"{ast.unparse(call.func)}() is DDP's, and runs only where {test.text}"
                self._report("HT115", call, message, test.node)
            elif last_attribute(call) == "no_sync" and test.kind not in ("except", _MAYBE):
                self._report("HT110", call, f"no_sync() holds {where}", test.node)

    def _is_wrapped(self, call: ast.Call) -> bool:
        """Whether it calls a model that this function has wrapped by DDP, buffers and all."""
        if not isinstance(call.func, ast.Name):
            return False
        values = self.facts.dependence.values_at(call.func)
        return bool(values) and all(
            isinstance(one, ast.Call)
            and last(self.facts.syntax.dotted(one.func)) == "DistributedDataParallel"
            and keyword(one, "broadcast_buffers") is None
            for one in values
        )

    def _inline(self, call: ast.Call) -> Iterator[_Test]:
        """Tests within the expression: `a and f()`, `f() if a else b`."""
        child: ast.AST = call
        for node in self.facts.syntax.outer(call):
            if isinstance(node, ast.stmt):
                return
            tests: list[ast.expr] = []
            if isinstance(node, ast.IfExp) and child is not node.test:
                other = node.orelse if child is node.body else node.body
                if not self._sequence([ast.Expr(other)]):
                    tests = [node.test]
            elif isinstance(node, ast.BoolOp):
                tests = node.values[: node.values.index(child)] if child in node.values else []
            for condition in tests:
                test = self._test(condition)
                if test is not None:
                    yield test
            child = node

    def _report_collective(self, made: CollectiveCall, call: ast.Call, test: _Test) -> None:
        if isinstance(test.node, ast.ExceptHandler):
            # A test of the exception's own words may be all ranks'.
            around = [one for one in self.facts.syntax.outer(call) if isinstance(one, ast.If)]
            parts = [part for one in around for part in ast.walk(one.test)]
            if any(isinstance(one, ast.Name) and one.id == test.node.name for one in parts):
                return
            message = f"{made.text} is reached only by a rank that met an exception"
            self._report("HT108" if made.is_certain else "HT113", call, message, test.node)
            return
        code = _CODES.get(test.kind, "HT101") if made.is_certain else "HT113"
        if test.kind == "rank" and not made.is_certain and made.name in LIBRARY_SAVES:
            code = "HT114"
        if test.kind in (BATCH, _MAYBE) and not self.facts.distributed:
            return
        message = f"{made.text} is called only where {test.text} (line {test.node.lineno})"
        self._report(code, call, message, test.node, test, made.name)

    def _report(  # noqa: PLR0917 - whom it is about, then why
        self,
        code: str,
        node: ast.AST,
        message: str,
        cause: ast.AST,
        test: _Test | None = None,
        name: str = "",
    ) -> None:
        """Once for each test and code."""
        if (code, cause) not in self.reported or (test is not None and test.side):
            self.reported.add((code, cause))
            self.findings.append((self.facts.finding(code, node, message), test, name))


def check_divergence(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT101, HT102, HT105 to HT115."""
    for scope in facts.syntax.scopes:
        yield from _Walk(facts, scope).run()


def _calls_in(block: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """Calls in the order of the text, without those of functions that are only defined there."""
    stack: list[ast.AST] = list(reversed(block))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            yield node
        stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _leaves(facts: ProgramFacts, block: Sequence[ast.stmt]) -> ast.stmt | None:
    """The statement by which a block always leaves what is around it."""
    if not block:
        return None
    end = block[-1]
    if isinstance(end, ast.Return | ast.Continue | ast.Break | ast.Raise):
        return end
    if isinstance(end, ast.Expr) and isinstance(end.value, ast.Call):
        return end if facts.syntax.dotted(end.value.func) in _EXITS else None
    return None


def _is_text(node: ast.expr) -> bool:
    """Whether a value is certainly a text: `f"{x}"`, `str(x)`, `tensor.type()`."""
    if isinstance(node, ast.Call) and not node.keywords:
        func = node.func
        of_tensor = isinstance(func, ast.Attribute) and func.attr == "type" and not node.args
        return of_tensor or (isinstance(func, ast.Name) and func.id == "str")
    return isinstance(node, ast.JoinedStr) or isinstance(constant(node), str)


def _always_raises(block: Sequence[ast.stmt]) -> bool:
    """Whether each way through a block raises."""
    return any(
        isinstance(one, ast.Raise)
        or (isinstance(one, ast.If) and _always_raises(one.body) and _always_raises(one.orelse))
        for one in block
    )


def _strongest(tests: Sequence[_Test]) -> _Test:
    """The innermost test that is certain to part ranks, or else the innermost."""
    return next((one for one in reversed(tests) if one.kind != _MAYBE), tests[-1])


def _is_for_several(test: ast.expr) -> bool:
    """Whether a test without a rank asks if there are several."""
    text = re.sub("distributed_?type", "", ast.unparse(test).lower())
    return any(word in text for word in (*SEVERAL, "is_initialized", "is_available"))


def _listed(names: list[str]) -> str:
    most = 4
    return ", ".join(f"{name}()" for name in names[:most]) + (", ..." if len(names) > most else "")
