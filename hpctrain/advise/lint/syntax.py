"""A program's text, and its syntax tree with what all rules need: names, functions, calls.

Names are followed through imports to where they come from: `dist.barrier` is
`torch.distributed.barrier` whatever the program calls the module.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_Node = TypeVar("_Node", bound=ast.AST)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ScopeNode = ast.Module | FunctionNode
_VENDORS = tuple(
    f"torch.{name}." for name in ("npu", "mlu", "musa", "hpu", "gcu", "sdaa", "dipu", "supa")
)
"""Modules that makers of other devices put into torch: their calls take other arguments."""
_LATER = re.compile(
    r"\s*+(?:type\s++\w++\s*+(?:\[[^]]*\])?\s*+=|(?:async\s+def|def|class)\s+\w+\["
    r"|except\s+[\w.]+\s*,|.*\bt[\"'])"
)
_TABLE = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
GROUP_PLACES: dict[str, int] = _TABLE.pop("group_places")
NAMES: dict[str, frozenset[str]] = {key: frozenset(text.split()) for key, text in _TABLE.items()}
"""Sets of words that rules go by, as names.toml has them."""


class NotPython(UsageError):
    """The text cannot be read as Python."""

    def __init__(self, why: str, line: int = 0, *, is_newer: bool = False) -> None:
        super().__init__(why)
        self.line = line
        self.is_newer = is_newer
        """Whether a later version of Python than this one may read it."""


@dataclass(eq=False)
class LintScope:
    """A module's or function's own statements, without those of functions inside it."""

    node: ScopeNode
    name: str
    owner: str = ""
    """The class, for a method."""
    outer: LintScope | None = None
    nodes: list[ast.AST] = field(default_factory=list)
    """Everything in it, in the order of the text."""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters."""
        if isinstance(self.node, ast.Module):
            return ()
        args = self.node.args
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        return tuple(arg.arg for arg in named)

    def of(self, kind: type[_Node]) -> list[_Node]:
        """Its nodes of a kind."""
        return [node for node in self.nodes if isinstance(node, kind)]


class ProgramSyntax:
    """A program, read once and asked by every rule."""

    def __init__(self, text: str, path: str) -> None:
        """Read it.

        Raises:
            NotPython: it is none, or nested too deeply.
        """
        self.path = path
        self.text = text
        self.lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self.tree = parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: list[LintScope] = []
        self.scope_of: dict[ast.AST, LintScope] = {}
        self.calls: list[ast.Call] = []
        self.imports: dict[str, str] = {}
        self.starred: list[str] = []
        self._collect()
        self.functions: dict[str, list[LintScope]] = {}
        for scope in self.scopes[1:]:
            self.functions.setdefault(scope.name, []).append(scope)
        self._dotted: dict[ast.AST, str] = {}

    @cached_property
    def loaders(self) -> frozenset[str]:
        """Names that are given a DataLoader somewhere in the program."""
        return frozenset(
            target.id if isinstance(target, ast.Name) else target.attr
            for call in self.calls_to("DataLoader")
            if isinstance(parent := self.parents[call], ast.Assign)
            for target in parent.targets
            if isinstance(target, ast.Name | ast.Attribute)
        )

    def _collect(self) -> None:
        """One pass without recursion: a text may be nested as deeply as the parser allows."""
        module = LintScope(self.tree, "")
        self.scopes.append(module)
        stack: list[tuple[ast.AST, LintScope, str]] = [(self.tree, module, "")]
        while stack:
            node, scope, owner = stack.pop()
            self.scope_of[node] = scope
            scope.nodes.append(node)
            inner, inner_owner = scope, owner
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = LintScope(node, node.name, owner, scope)
                inner_owner = ""
                self.scopes.append(inner)
            elif isinstance(node, ast.ClassDef):
                inner_owner = node.name
            elif isinstance(node, ast.Call):
                self.calls.append(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._take_import(node)
            children = list(ast.iter_child_nodes(node))
            for child in reversed(children):
                self.parents[child] = node
                stack.append((child, inner, inner_owner))

    def _take_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.asname:
                    self.imports[name.asname] = name.name
                else:
                    root = name.name.partition(".")[0]
                    self.imports.setdefault(root, root)
            return
        origin = "." * node.level + (node.module or "")
        for name in node.names:
            whole = origin + ("" if origin.endswith(".") else ".") + name.name
            if name.name == "*":
                self.starred.append(origin)
            elif isinstance(self.parents[node], ast.If | ast.Try | ast.ExceptHandler):
                self.imports.setdefault(name.asname or name.name, whole)
            else:
                self.imports[name.asname or name.name] = whole

    def dotted(self, node: ast.AST) -> str:
        """Where a name comes from, e.g. `torch.distributed.barrier`; "" for what is no name."""
        traced = self._dotted.get(node)
        if traced is None:
            traced = self._dotted[node] = self._trace(node)
        return traced

    def _trace(self, node: ast.AST) -> str:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Call):
            origin = self.dotted(node.func)
            parts.append(f"{origin}()")
        elif isinstance(node, ast.Name):
            parts.append(self.imports.get(node.id, node.id))
        else:
            parts.append("")
        return ".".join(reversed(parts))

    def is_imported(self, node: ast.AST) -> bool:
        """Return whether a dotted name begins with an imported one."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self.imports

    def imports_any(self, *roots: str) -> bool:
        """Whether anything is imported from one of these packages."""
        origins = [*self.imports.values(), *self.starred]
        return any(
            origin == root or origin.startswith(f"{root}.") for origin in origins for root in roots
        )

    def calls_to(self, *names: str, root: str = "") -> Iterator[ast.Call]:
        """Calls whose last name is one of these, of a package where one is named."""
        for call in self.calls:
            dotted = self.dotted(call.func)
            if dotted.rpartition(".")[2] in names and (not root or comes_from(dotted, root)):
                yield call

    def methods(self, name: str) -> list[ast.Call]:
        """All calls of an attribute of this name."""
        return [call for call in self.calls if last_attribute(call) == name]

    def callers(self, scope: LintScope) -> list[ast.Call]:
        """All calls of a function of this file."""
        return [one for one in self.calls if self.resolve(one, self.scope_of[one]) is scope]

    def decorators(self, scope: LintScope) -> dict[str, ast.expr]:
        """A function's decorators by their last names."""
        made = [] if isinstance(scope.node, ast.Module) else scope.node.decorator_list
        return {
            last(self.dotted(one.func if isinstance(one, ast.Call) else one)): one for one in made
        }

    def outer(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around one, from the inside, up to its function or module."""
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            node = self.parents[node]
            yield node

    def resolve(self, call: ast.Call, scope: LintScope) -> LintScope | None:
        """The function of this file that is called, where there is exactly one it can be."""
        func = call.func
        if isinstance(func, ast.Name):
            named = [one for one in self.functions.get(func.id, ()) if not one.owner]
            return named[0] if len(named) == 1 and func.id not in self.imports else None
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            owner = scope.owner or (scope.outer.owner if scope.outer else "")
            if func.value.id == "self" and owner:
                named = [one for one in self.functions.get(func.attr, ()) if one.owner == owner]
                return named[0] if len(named) == 1 else None
        return None

    def line(self, number: int) -> str:
        """A line of the text, from 1."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def code(self, node: ast.expr, most: int = 60) -> str:
        """An expression in one line, shortened for a message."""
        lines = [one.encode() for one in self.lines[node.lineno - 1 : node.end_lineno]] or [b""]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]  # columns count bytes
        words = " ".join(b" ".join(lines).decode(errors="ignore").split())
        return words if len(words) <= most else f"{words[: most - 3]}..."


def parse(text: str) -> ast.Module:
    """The text's syntax tree; its own warnings, of odd escapes for instance, are nobody's here.

    Raises:
        NotPython: it has none, in words and with a line where that is known.
    """
    if "\0" in text:
        raise NotPython(
            "holds NUL bytes: no Python source", text[: text.index("\0")].count("\n") + 1
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        raise NotPython(
            f"no Python that this version reads: {error.msg}",
            error.lineno or 0,
            is_newer=_is_of_later_python(text, error),
        ) from None
    except (RecursionError, MemoryError):
        raise NotPython("nested too deeply to be read") from None
    except ValueError as error:
        raise NotPython(f"no Python source: {error}") from None
    return tree


def comes_from(dotted: str, root: str) -> bool:
    """Return whether a name is of a package, and not of another maker's module inside torch."""
    if dotted != root and not dotted.startswith(f"{root}."):
        return False
    return not is_vendors(dotted)


def is_vendors(dotted: str) -> bool:
    """Return whether a name is of another maker's module inside torch."""
    return dotted.startswith(_VENDORS)


def _is_of_later_python(text: str, error: SyntaxError) -> bool:
    """Return whether an error may be syntax that this Python does not know yet.

    Since 3.12 the parts of an f-string take any quotes, and `type`, `def` and `class` type
    parameters; since 3.14 there are t-strings and `except` without brackets.
    """
    if sys.version_info >= (3, 12) and "f-string" in (error.msg or ""):
        return False
    lines = text.split("\n")
    line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
    return "f-string" in (error.msg or "") or _LATER.match(line) is not None


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((one.value for one in call.keywords if one.arg == name), None)


def argument(call: ast.Call, name: str, position: int | None) -> ast.expr | None:
    """The value of an argument, wherever it is given; None where it may hide in a star.

    `position` is its place among those without a keyword, None if it has none.
    """
    named = keyword(call, name)
    if named is not None or position is None or position >= len(call.args):
        return named
    return None if any(isinstance(one, ast.Starred) for one in call.args) else call.args[position]


def spreads(call: ast.Call) -> bool:
    """Whether arguments come out of a list or dictionary, so that nobody can tell which."""
    return any(one.arg is None for one in call.keywords) or any(
        isinstance(one, ast.Starred) for one in call.args
    )


def constant(node: ast.AST | None) -> object:
    """The value of a literal; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(node.operand)
        return -value if isinstance(value, int | float) else None
    return node.value if isinstance(node, ast.Constant) else None


def last_attribute(call: ast.Call) -> str:
    """The attribute that is called, if it is one."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def owner_of(call: ast.Call) -> str:
    """Whose attribute is called, as it is written."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def last(dotted: str) -> str:
    """The last name of a dotted one."""
    return dotted.rpartition(".")[2]


def given(node: ast.AST | None) -> bool:
    """Whether an argument is there and is not a literal None."""
    return node is not None and not (isinstance(node, ast.Constant) and node.value is None)
