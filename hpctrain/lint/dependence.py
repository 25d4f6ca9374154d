"""What a value depends on: the rank, the batch, chance, the clock; followed through assignments.

A name depends on what any of its assignments in the same function depends on. What a collective has
been given, or an agreement has returned, is the same on all ranks and depends on nothing.
tests/unit/lint/test_rules.py holds the promises.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hpctrain.lint.syntax import ProgramSyntax, argument, constant, given, last

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpctrain.lint.syntax import LintScope

RANK, LOCAL, BATCH, CHANCE, CLOCK = "rank", "local rank", "batch", "chance", "clock"
RANKS = frozenset({RANK, LOCAL})
NOTHING: frozenset[str] = frozenset()

RANK_VARIABLES = frozenset({"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
LOCAL_VARIABLES = frozenset(
    {"LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"}
)
_RANK_NAMES = frozenset(
    {"rank", "global_rank", "world_rank", "ddp_rank", "dist_rank", "process_index", "proc_id"}
)
_LOCAL_NAMES = frozenset({"local_rank", "ddp_local_rank", "local_process_index", "node_local_rank"})
MAIN_NAMES = frozenset(
    {
        "is_global_zero",
        "is_main",
        "is_main_process",
        "is_local_main_process",
        "is_master",
        "is_master_process",
        "is_rank0",
        "is_rank_0",
        "is_rank_zero",
        "is_world_process_zero",
        "is_local_process_zero",
        "is_main_rank",
        "is_primary",
        "is_root",
        "is_last_process",
        "master_process",
        "main_process",
    }
)
"""Names that mean "I am rank 0" wherever they come from."""
_RANK_CALLS = frozenset({"get_rank", "get_global_rank", "get_ordinal", "get_process_index"})
_LOCAL_CALLS = frozenset({"get_local_rank", "get_node_local_rank", "get_local_process_index"})
_AGREEING = ("reduce", "gather", "broadcast", "sync", "agree", "all_", "consensus", "allreduce")
_PLAIN = frozenset(
    {"int", "bool", "str", "float", "abs", "min", "max", "any", "all", "not_", "format"}
)
_SAME_EVERYWHERE = frozenset({"len", "isinstance", "type", "hasattr", "callable", "id", "range"})
_SHAPES = frozenset({"shape", "ndim", "dtype", "device", "requires_grad", "size", "dim", "numel"})
_CHANCE_MODULES = ("random.", "numpy.random.")
_CHANCE_CALLS = frozenset(
    {"rand", "randn", "randint", "random", "uniform", "choice", "choices", "sample", "normal"}
    | {"gauss", "randrange", "bernoulli", "random_sample", "getrandbits", "betavariate"}
)
_CLOCKS = frozenset({"time.time", "time.monotonic", "time.perf_counter", "datetime.datetime.now"})
_SEEDS = frozenset({"seed", "manual_seed", "seed_everything", "set_seed", "manual_seed_all"})
_ENVIRONMENT = frozenset({"os.environ.get", "os.environ.pop", "os.getenv"})
_LOADER_ENDS = ("_dl", "batches")
_DRAWS = frozenset({"get_batch", "next_batch", "get_micro_batch"})
_LOADER_WORDS = ("loader", "dataloader", "train_iter", "data_iter")


def environment_name(syntax: ProgramSyntax, node: ast.AST) -> str:
    """The environment variable that an expression reads; "" for any other expression."""
    value: object = None
    if isinstance(node, ast.Subscript) and syntax.dotted(node.value) == "os.environ":
        value = constant(node.slice)
    elif isinstance(node, ast.Call) and node.args and syntax.dotted(node.func) in _ENVIRONMENT:
        value = constant(node.args[0])
    return value if isinstance(value, str) else ""


def is_loader(syntax: ProgramSyntax, node: ast.AST) -> bool:
    """Whether an expression looks like batches of data."""
    while isinstance(node, ast.Call) and node.args:
        if last(syntax.dotted(node.func)) not in (
            "enumerate",
            "tqdm",
            "iter",
            "zip",
            "trange",
            "log_every",
        ):
            return False
        node = node.args[0]
    name = node.id if isinstance(node, ast.Name) else last(syntax.dotted(node))
    if name in syntax.loaders or name.lower().endswith(_LOADER_ENDS):
        return True
    return any(word in name.lower() for word in _LOADER_WORDS)


class Dependence:
    """What the values of a program depend on."""

    def __init__(self, syntax: ProgramSyntax) -> None:
        """Follow all assignments of all functions until nothing changes."""
        self.syntax = syntax
        self.names: dict[tuple[LintScope, str], frozenset[str]] = {}
        self.returned: dict[LintScope, frozenset[str]] = {}
        self.agreed: dict[LintScope, set[str]] = {}
        self.seeded = self._is_seeded()
        self._cache: dict[ast.AST, frozenset[str]] = {}
        for scope in syntax.scopes:
            self.agreed[scope] = self._agreed_in(scope)
        self._settle()

    def _is_seeded(self) -> bool:
        return any(last(self.syntax.dotted(call.func)) in _SEEDS for call in self.syntax.calls)

    def _agreed_in(self, scope: LintScope) -> set[str]:
        """Names whose values a collective of this function makes the same everywhere, in place.

        What is used of such a call is its result; then its arguments are as they were.
        """
        names: set[str] = set()
        for call in scope.of(ast.Call):
            dotted = self.syntax.dotted(call.func)
            in_place = isinstance(self.syntax.parents[call], ast.Expr)
            if not in_place and not dotted.startswith("torch.distributed."):
                continue
            if any(word in last(dotted).lower() for word in _AGREEING):
                names.update(one.id for one in call.args if isinstance(one, ast.Name))
        return names

    def _settle(self) -> None:
        """Three rounds are enough for what people write: a rank through two functions."""
        assignments = [
            (scope, target, value, is_loop)
            for scope in self.syntax.scopes
            for target, value, is_loop in _assignments(scope)
        ]
        for _ in range(3):
            before = (dict(self.names), dict(self.returned))
            self._cache.clear()
            for scope, target, value, is_loop in assignments:
                self._assign(scope, target, value, is_loop=is_loop)
            for scope in self.syntax.scopes[1:]:
                sources = NOTHING
                for node in scope.of(ast.Return):
                    if node.value is not None:
                        sources |= self.of(node.value) & RANKS
                self.returned[scope] = sources
            if before == (self.names, self.returned):
                break
        self._cache.clear()

    def _assign(
        self, scope: LintScope, target: ast.expr, value: ast.expr, *, is_loop: bool
    ) -> None:
        if is_loop:
            sources = frozenset({BATCH}) if is_loader(self.syntax, value) else NOTHING
            if sources and isinstance(target, ast.Tuple) and _counts(self.syntax, value):
                self._keep(scope, target.elts[0], NOTHING, anew=True)
                target = target.elts[1] if len(target.elts) > 1 else target.elts[0]
            for name in _names_in(target):
                self._keep(scope, name, sources, anew=not sources)
            return
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for inner, part in zip(target.elts, value.elts, strict=True):
                self._keep(scope, inner, self.of(part))
            return
        sources = self.of(value)
        for name in _names_in(target):
            self._keep(scope, name, sources)

    def _keep(
        self, scope: LintScope, target: ast.AST, sources: frozenset[str], *, anew: bool = False
    ) -> None:
        key = self._key(scope, target)
        if key is not None:
            self.names[key] = sources if anew else self.names.get(key, NOTHING) | sources

    def _key(self, scope: LintScope, target: ast.AST) -> tuple[LintScope, str] | None:
        """A variable: of a function, or an attribute of `self` for all of a class's methods."""
        if isinstance(target, ast.Name):
            return (scope, target.id)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            return (self.syntax.scopes[0], f"{scope.owner}:{target.value.id}.{target.attr}")
        return None

    def of(self, node: ast.AST) -> frozenset[str]:
        """What the value of an expression depends on."""
        cached = self._cache.get(node)
        if cached is None:
            cached = self._cache[node] = self._look(node)
        return cached

    def _look(self, node: ast.AST) -> frozenset[str]:  # noqa: PLR0911 - a line per kind
        if isinstance(node, ast.Name):
            return self._of_name(node)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Compare):
            return self._of_compare(node)
        if isinstance(node, ast.Subscript):
            variable = environment_name(self.syntax, node)
            if variable:
                return _of_variable(variable)
            return self.of(node.value) | (self.of(node.slice) & RANKS)
        if isinstance(node, ast.Lambda | ast.Constant | ast.Dict | ast.DictComp):
            return NOTHING
        return self._union(ast.iter_child_nodes(node))

    def _union(self, nodes: Iterable[ast.AST]) -> frozenset[str]:
        sources = NOTHING
        for node in nodes:
            sources |= self.of(node)
        return sources

    def _of_name(self, node: ast.Name) -> frozenset[str]:
        scope: LintScope | None = self.syntax.scope_of[node]
        while scope is not None:
            if node.id in self.agreed[scope]:
                return NOTHING
            sources = self.names.get((scope, node.id))
            if sources is not None:
                return sources
            if node.id in scope.parameters:
                return _of_word(node.id)
            scope = scope.outer
        return NOTHING if node.id in self.syntax.functions else _of_word(node.id)

    def _of_attribute(self, node: ast.Attribute) -> frozenset[str]:
        if node.attr in _SHAPES:
            return NOTHING
        key = self._key(self.syntax.scope_of[node], node)
        sources = self.names.get(key) if key is not None else None
        by_word = _of_word(node.attr)
        if sources is not None and not by_word:
            return sources
        return by_word | (self.of(node.value) - RANKS)

    def _of_call(self, node: ast.Call) -> frozenset[str]:  # noqa: PLR0911 - a line per kind
        variable = environment_name(self.syntax, node)
        if variable:
            return _of_variable(variable)
        dotted = self.syntax.dotted(node.func)
        name = last(dotted)
        inner = self.syntax.resolve(node, self.syntax.scope_of[node])
        if inner is not None:
            passed = NOTHING if self.agreed[inner] else self._of_arguments(node) & {BATCH}
            return self.returned.get(inner, NOTHING) | passed
        if name in _RANK_CALLS:
            return NOTHING if given(argument(node, "group", 0)) else frozenset({RANK})
        if name in _LOCAL_CALLS:
            return frozenset({LOCAL})
        if name in MAIN_NAMES:
            return frozenset({RANK})
        drawn = self._drawn(node, dotted, name)
        if drawn:
            return drawn
        if (
            name in _SAME_EVERYWHERE
            or name in _SHAPES
            or any(one in name.lower() for one in _AGREEING)
        ):
            return NOTHING
        sources = self._of_arguments(node)
        if isinstance(node.func, ast.Attribute):
            sources |= self.of(node.func.value) - RANKS
        return sources if name in _PLAIN or dotted.startswith("os.path") else sources - RANKS

    def _of_arguments(self, node: ast.Call) -> frozenset[str]:
        return self._union([*node.args, *(one.value for one in node.keywords)])

    def _drawn(self, node: ast.Call, dotted: str, name: str) -> frozenset[str]:
        """What a call brings that is another on each rank: a batch, the clock, chance."""
        follows = name == "next" and bool(node.args) and is_loader(self.syntax, node.args[0])
        if follows or name in _DRAWS:
            return frozenset({BATCH})
        if dotted in _CLOCKS:
            return frozenset({CLOCK})
        return frozenset({CHANCE}) if self._is_chance(dotted, name) else NOTHING

    def _is_chance(self, dotted: str, name: str) -> bool:
        if name not in _CHANCE_CALLS:
            return False
        return dotted.startswith(_CHANCE_MODULES) or dotted in (
            "torch.rand",
            "torch.randint",
            "torch.randn",
        )

    def _of_compare(self, node: ast.Compare) -> frozenset[str]:
        """Whether there are ranks at all (`rank != -1`, `"RANK" in os.environ`) all ranks know."""
        sources = self._union([node.left, *node.comparators])
        if not sources & RANKS or len(node.ops) != 1:
            return sources
        operator, other = node.ops[0], node.comparators[0]
        value = constant(other)
        listed = isinstance(other, ast.Tuple | ast.List | ast.Set)
        if isinstance(operator, ast.In | ast.NotIn) and not listed:
            return sources - RANKS  # a member of some group, as all others who go on
        there = isinstance(operator, ast.Eq | ast.NotEq | ast.Gt | ast.LtE) and value == -1
        there |= isinstance(operator, ast.GtE | ast.Lt) and value == 0 and value is not False
        there |= isinstance(operator, ast.Is | ast.IsNot) and not given(other)
        return sources - RANKS if there else sources


def _of_variable(name: str) -> frozenset[str]:
    if name in RANK_VARIABLES:
        return frozenset({RANK})
    return frozenset({LOCAL}) if name in LOCAL_VARIABLES else NOTHING


def _of_word(name: str) -> frozenset[str]:
    """What a name says of itself, where its value comes from elsewhere."""
    if name in _LOCAL_NAMES:
        return frozenset({LOCAL})
    return frozenset({RANK}) if name in _RANK_NAMES or name in MAIN_NAMES else NOTHING


def _counts(syntax: ProgramSyntax, node: ast.expr) -> bool:
    """Whether `enumerate` is what a loop goes over."""
    while isinstance(node, ast.Call) and node.args:
        if last(syntax.dotted(node.func)) == "enumerate":
            return True
        node = node.args[0]
    return False


def _names_in(target: ast.AST) -> list[ast.AST]:
    if isinstance(target, ast.Tuple | ast.List):
        return [name for one in target.elts for name in _names_in(one)]
    return _names_in(target.value) if isinstance(target, ast.Starred) else [target]


def _assignments(scope: LintScope) -> Iterable[tuple[ast.expr, ast.expr, bool]]:
    """Each (target, value, whether it is a loop's) of a function."""
    for node in scope.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield target, node.value, False
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
            if node.value is not None:
                yield node.target, node.value, False
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield node.target, node.iter, True


def on_rank(dependence: Dependence, node: ast.expr, rank: int) -> bool | None:
    """What a test comes out as on rank 0 or on rank 1; None where nobody can tell."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = on_rank(dependence, node.operand, rank)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        parts = [on_rank(dependence, one, rank) for one in node.values]
        decides = isinstance(node.op, ast.Or)
        if decides in parts:
            return decides
        return None if None in parts else not decides
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and dependence.of(node.left) & RANKS:
        return _compared(node.ops[0], rank, node.comparators[0])
    dotted = dependence.syntax.dotted(node.func if isinstance(node, ast.Call) else node)
    if last(dotted) in MAIN_NAMES:
        return rank == 0
    return _through_name(dependence, node, rank)


def _through_name(dependence: Dependence, node: ast.expr, rank: int) -> bool | None:
    """A test that was given a name: `is_main = rank == 0`."""
    if not dependence.of(node) & RANKS:
        return None
    if isinstance(node, ast.Name):
        scope = dependence.syntax.scope_of[node]
        values = [
            value
            for target, value, _ in _assignments(scope)
            if isinstance(target, ast.Name) and target.id == node.id
        ]
        if len(values) == 1 and isinstance(values[0], ast.Compare | ast.BoolOp | ast.UnaryOp):
            return on_rank(dependence, values[0], rank)
        return bool(rank) if _of_word(node.id) and node.id not in MAIN_NAMES else None
    return None


def _compared(operator: ast.cmpop, rank: int, other: ast.expr) -> bool | None:
    value = constant(other)
    if isinstance(operator, ast.In | ast.NotIn) and isinstance(
        other, ast.Tuple | ast.List | ast.Set
    ):
        inside = rank in [constant(one) for one in other.elts]
        return inside if isinstance(operator, ast.In) else not inside
    if not isinstance(value, int):
        return None
    results: dict[type[ast.cmpop], bool] = {
        ast.Eq: rank == value,
        ast.NotEq: rank != value,
        ast.Gt: rank > value,
        ast.GtE: rank >= value,
        ast.Lt: rank < value,
        ast.LtE: rank <= value,
    }
    return results.get(type(operator))
