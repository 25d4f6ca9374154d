"""Which calls all ranks must make together, and which functions of the program make them.

Calls on a group of their own are left out: only the members meet there, and who they are is seldom
written where one can read it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hpctrain.advise.lint.definitions import blocks_of
from hpctrain.advise.lint.syntax import (
    GROUP_PLACES,
    NAMES,
    LintScope,
    ProgramSyntax,
    argument,
    constant,
    given,
    keyword,
    last,
    owner_of,
    spreads,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_HOMES = ("torch.distributed", "deepspeed.comm", "deepspeed", "torch.distributed.distributed_c10d")
_STATE_CALLS = NAMES["state_calls"]
_SHARDS = re.compile(r"(?i)fsdp|shard|zero_?[123]")
_MPI_WORLD = "mpi4py.MPI.COMM_WORLD"
_OTHER_HOMES = {
    "horovod.torch": NAMES["horovod"],
    "horovod.tensorflow": NAMES["horovod"],
    "torch_xla.core.xla_model": NAMES["xla"],
    "accelerate.utils": NAMES["accelerate"],
    "accelerate.utils.operations": NAMES["accelerate"],
}
"""Collectives of other libraries than torch."""
LIBRARY_SAVES = {
    "save_state": ("accelerate",),
    "save_checkpoint": ("lightning", "pytorch_lightning"),
}
"""Saves that a library wants on all ranks, and which hang alone in some of its strategies."""
_GROUP_WORDS = frozenset({"groups", "process_set", "replicas"})
SEVERAL = ("dist", "world", "ddp", "num_proc", "multi_gpu", "n_gpu")
"""Words of a test whether there are several ranks at all."""
FSDP_NAMES = frozenset({"FullyShardedDataParallel", "fully_shard", "FSDP"})


@dataclass(frozen=True)
class CollectiveCall:
    """A collective to which a call comes, or each call of a function."""

    name: str
    via: str = ""
    """The program's own function that makes it; the call is that function's then."""
    line: int = 0
    """Where it is made, if through a function."""
    is_certain: bool = True
    """Whether each call of that function comes to it."""
    is_elsewhere: bool = False
    """Whether the function is in another module."""

    @property
    def text(self) -> str:
        """How a message speaks of it."""
        if not self.via:
            plain = self.is_certain or self.name in LIBRARY_SAVES
            return f"{self.name}()" if plain else f"{self.name}(), of a sharded model,"
        verb = "calls" if self.is_certain else "may call"
        where = f"line {self.line}{' of its module' if self.is_elsewhere else ''}"
        return f"{self.via}(), which {verb} {self.name}() at {where},"


class CollectiveCalls:
    """The collectives of a program."""

    def __init__(
        self,
        syntax: ProgramSyntax,
        imported: Callable[[str, str], CollectiveCall | None] | None = None,
    ) -> None:
        """Find out which functions make any, through three levels of calls.

        `imported` is given the program's path and a name, and returns the collective that the
        imported function makes.
        """
        self.syntax = syntax
        self.imported = imported
        self.worlds = {
            ast.unparse(target)
            for scope in syntax.scopes
            for node in scope.of(ast.Assign)
            if syntax.dotted(node.value) == _MPI_WORLD
            for target in node.targets
        }
        """Names that are given mpi4py's communicator of all ranks."""
        self.joins = any(True for _ in syntax.calls_to("join", root="horovod"))
        """Whether ranks may stay away from Horovod's collectives, as join() allows."""
        self.sharded = self._targets_of(*FSDP_NAMES, "state_dict_type")
        self.engines = self._targets_of("initialize", root="deepspeed")
        self.direct: dict[ast.Call, CollectiveCall] = {}
        for call in syntax.calls:
            name = self._name(call)
            if name:
                certain = name not in _STATE_CALLS or any(map(self._is_sharded, call.args[:1]))
                certain = certain and not self._is_library_save(call, name)
                self.direct[call] = CollectiveCall(name, is_certain=certain)

    @cached_property
    def made_by(self) -> dict[LintScope, CollectiveCall]:
        """The collective that each function of the program makes, through three levels of calls."""
        made_by: dict[LintScope, CollectiveCall] = {}
        for _ in range(3):
            made_by |= self._through_calls(made_by)
        return made_by

    def _targets_of(self, *names: str, root: str = "") -> set[tuple[LintScope | None, str]]:
        """Variables that hold what such a call returns, or that it is about, by their scopes.

        An attribute is the same one everywhere: its scope is None.
        """
        targets: set[tuple[LintScope | None, str]] = set()
        for call in self.syntax.calls_to(*names):
            dotted = self.syntax.dotted(call.func)
            if root and not dotted.startswith(root):
                continue
            parent = self.syntax.parents[call]
            if isinstance(parent, ast.Assign):
                target = parent.targets[0]
                first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
            elif last(dotted) in ("fully_shard", "state_dict_type") and call.args:
                first = call.args[0]
            else:
                continue
            scope = self.syntax.scope_of[call] if isinstance(first, ast.Name) else None
            targets.add((scope, ast.unparse(first)))
        return targets

    def _is_one(
        self, node: ast.AST, targets: set[tuple[LintScope | None, str]], depth: int = 3
    ) -> bool:
        """Whether an expression is such a variable, or a parameter that is one at every call."""
        if not targets or not isinstance(node, ast.Name):
            return bool(targets) and (None, ast.unparse(node)) in targets
        scope: LintScope | None = self.syntax.scope_of[node]
        while scope is not None and node.id not in scope.parameters:
            if (scope, node.id) in targets:
                return True
            scope = scope.outer
        if scope is None or (scope, node.id) in targets or not depth:
            return scope is not None and (scope, node.id) in targets
        place = scope.parameters.index(node.id) - bool(scope.owner)
        passed = [argument(call, node.id, place) for call in self.syntax.callers(scope)]
        return bool(passed) and all(one and self._is_one(one, targets, depth - 1) for one in passed)

    def _name(self, call: ast.Call) -> str:
        """The collective that a call is; "" for any other call, and for one on a group."""
        dotted = self.syntax.dotted(call.func)
        home, _, name = dotted.rpartition(".")
        if home in _HOMES and (name in GROUP_PLACES or name in NAMES["makers"]):
            return "" if self._has_group(call, name) else name
        if name in _OTHER_HOMES.get(home, ()):
            grouped = any(one.arg in _GROUP_WORDS for one in call.keywords)
            return "" if grouped or (name in NAMES["horovod"] and self.joins) else name
        if "distributed.checkpoint" in home and name in NAMES["checkpoint_calls"] | _STATE_CALLS:
            by_one = constant(keyword(call, "no_dist")) is True
            return "" if by_one or given(keyword(call, "process_group")) else name
        if not isinstance(call.func, ast.Attribute):
            return ""
        if name == "full_tensor" and not call.args and self.syntax.imports_any("torch.distributed"):
            return name
        of_library = self._is_of_library(call.func, name) or self._is_library_save(call, name)
        return name if of_library else ""

    def _is_library_save(self, call: ast.Call, name: str) -> bool:
        """Whether it is `accelerator.save_state()`, or `trainer.save_checkpoint()` of Lightning."""
        owner = owner_of(call).lower()
        libraries = LIBRARY_SAVES.get(name, ())
        is_owner = "accelerator" in owner if libraries == ("accelerate",) else "trainer" in owner
        return bool(libraries) and is_owner and self.syntax.imports_any(*libraries)

    def _is_sharded(self, node: ast.AST) -> bool:
        """Whether a model is sharded where it stands: not where a test says that none is."""
        if not self._is_one(node, self.sharded):
            return False
        for outer in self.syntax.outer(node):
            if isinstance(outer, ast.If | ast.IfExp) and _SHARDS.search(ast.unparse(outer.test)):
                branch = outer.orelse if isinstance(outer.orelse, list) else [outer.orelse]
                if (node in branch) != isinstance(outer.test, ast.UnaryOp):
                    return False
            node = outer
        return True

    def _has_group(self, call: ast.Call, name: str) -> bool:
        """Whether it is for the members of a group; a mesh is made by all."""
        if name in NAMES["makers"]:
            return False
        group = argument(call, "group", GROUP_PLACES[name])
        if group is None:
            return spreads(call)
        return given(group) and not self.syntax.dotted(group).endswith("group.WORLD")

    def _is_of_library(self, func: ast.Attribute, name: str) -> bool:
        if not isinstance(func.value, ast.Name | ast.Attribute):
            return False
        owner = ast.unparse(func.value)
        if name in NAMES["lightning"] and self.syntax.imports_any("lightning", "pytorch_lightning"):
            of_module = owner == "self" and name == "all_gather"
            if last(owner) in ("fabric", "strategy") or of_module:
                return name not in self.syntax.functions
        if name in NAMES["mpi"]:
            return owner in self.worlds or self.syntax.dotted(func.value) == _MPI_WORLD
        of_accelerator = name in ("gather", "reduce") and "accelerator" in owner.lower()
        if name in NAMES["accelerate_calls"] or of_accelerator:
            return self.syntax.imports_any("accelerate")
        if name in NAMES["engine"] and self._is_one(func.value, self.engines):
            return True
        return name in NAMES["of_sharded_models"] and self._is_sharded(func.value)

    def _through_calls(
        self, calls_of: dict[LintScope, CollectiveCall]
    ) -> dict[LintScope, CollectiveCall]:
        makers: dict[LintScope, CollectiveCall] = {}
        for scope in self.syntax.scopes[1:]:
            if scope in calls_of and calls_of[scope].is_certain:
                continue
            for call in scope.of(ast.Call):
                made = self._made(call, scope, calls_of)
                if made is None or (scope in makers and not made.is_certain):
                    continue
                certain = made.is_certain and always_comes_to(self.syntax, call, self.direct)
                line = made.line or call.lineno
                if scope not in makers or certain:
                    makers[scope] = CollectiveCall(
                        made.name, scope.name, line, certain, made.is_elsewhere
                    )
                if certain:
                    break
        return makers

    def of(self, call: ast.Call, scope: LintScope) -> CollectiveCall | None:
        """Return the collective that a call makes, itself or in the function that it calls."""
        return self.direct.get(call) or self._made(call, scope, self.made_by)

    def _made(
        self, call: ast.Call, scope: LintScope, calls_of: dict[LintScope, CollectiveCall]
    ) -> CollectiveCall | None:
        direct = self.direct.get(call)
        if direct is not None:
            return direct
        inner = self.syntax.resolve(call, scope)
        if inner is not None:
            return calls_of.get(inner) if inner is not scope else None
        if self.imported is None or not self.syntax.is_imported(call.func):
            return None
        dotted = self.syntax.dotted(call.func)
        other = self.imported(self.syntax.path, dotted)
        return other and replace(other, via=last(dotted), is_elsewhere=True)


def always_comes_to(
    syntax: ProgramSyntax, call: ast.Call, collectives: Collection[ast.AST]
) -> bool:
    """Return whether a function on several ranks comes to a collective whenever it is called.

    A test whether there are several ranks does not count, nor one of whose branches each makes a
    collective; a loop counts as entered. A decorator may keep the function from being called.
    """
    scope = syntax.scope_of[call]
    if not _runs_when_called(syntax, scope):
        return False
    child: ast.AST = call
    for around in syntax.outer(call):
        if _is_one_of_several(child, around):
            return False
        if isinstance(around, ast.If) and child is not around.test:
            other = around.orelse if child in around.body else around.body
            if not _makes_one(other, collectives) and not asks_for_several(around.test, scope):
                return False
        for block in blocks_of(around):
            if child in block and any(
                _may_return(one, scope) for one in block[: block.index(child)]
            ):
                return False
        child = around
    return True


def _is_one_of_several(child: ast.AST, around: ast.AST) -> bool:
    """Whether a handler, a case or a part of an expression may not be come to."""
    if isinstance(around, ast.BoolOp):
        return child is not around.values[0]
    if isinstance(around, ast.IfExp):
        return child is not around.test
    return isinstance(around, ast.ExceptHandler | ast.Match)


def _runs_when_called(syntax: ProgramSyntax, scope: LintScope) -> bool:
    """Whether a call of a function runs it: no generator, no decorator of unknown effect."""
    if isinstance(scope.node, ast.Module):
        return True
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in scope.nodes):
        return False
    passes_on = NAMES["passing"].issuperset(syntax.decorators(scope))
    return isinstance(scope.node, ast.FunctionDef) and passes_on


def _makes_one(block: list[ast.stmt], collectives: Collection[ast.AST]) -> bool:
    """Whether a block comes to a collective by no test of its own."""
    return any(
        node in collectives
        for statement in block
        if not isinstance(statement, ast.If | ast.Try | ast.Match | ast.While)
        for node in ast.walk(statement)
    )


def _may_return(node: ast.stmt, scope: LintScope) -> bool:
    """Whether a test other than for several ranks ends the function before its end."""
    return (
        isinstance(node, ast.If)
        and not asks_for_several(node.test, scope)
        and any(isinstance(one, ast.Return) for part in node.body for one in ast.walk(part))
    )


def asks_for_several(test: ast.AST, scope: LintScope) -> bool:
    """Return whether a test asks if there are several ranks; a caller's choice is no such test."""
    text = ast.unparse(test).lower()
    names = {one.id for one in ast.walk(test) if isinstance(one, ast.Name)}
    attributes = {
        one.value.id
        for one in ast.walk(test)
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
    }
    if not (names - attributes).isdisjoint(scope.parameters):
        return False
    return "rank" not in text and any(word in text for word in SEVERAL)


def is_distributed(syntax: ProgramSyntax) -> bool:
    """Whether the program itself starts, wraps for or asks about several ranks."""
    if any(last(syntax.dotted(call.func)) in NAMES["distributed"] for call in syntax.calls):
        return True
    return any(
        syntax.dotted(call.func) in ("deepspeed.initialize", "torch.distributed.get_rank")
        for call in syntax.calls
    )
