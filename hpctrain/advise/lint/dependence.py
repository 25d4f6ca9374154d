"""What a value depends on: the rank, the batch, chance, the clock; followed through assignments.

A name depends on what the assignments that reach its use depend on (`definitions`). What a
collective has been given, or an agreement has returned, is the same on all ranks and depends on
nothing. A mark with a question mark may be wrong: it passed through a call of unknown effect, or
only some assignments have it. Such a mark never makes an error.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.advise.lint.definitions import Definition, NameDefinitions, Place, definitions_in
from hpctrain.advise.lint.syntax import (
    NAMES,
    LintScope,
    ProgramSyntax,
    argument,
    constant,
    given,
    last,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

RANK, LOCAL, BATCH, CHANCE, CLOCK = "rank", "local rank", "batch", "chance", "clock"
RANKS = frozenset({RANK, LOCAL})
NOTHING: frozenset[str] = frozenset()
_MAYBE = "?"
"""Behind a mark: it may be so, and no error rests on it."""
_GIVEN = "given "
"""Before the name of a parameter: as the caller's argument."""
_CLOCKED = frozenset({CLOCK, CLOCK + _MAYBE})
_RANK_SOURCES = RANKS | {RANK + _MAYBE, LOCAL + _MAYBE}
_OWN = frozenset({BATCH, CHANCE, CLOCK})
UNSURE = frozenset({RANK + _MAYBE, LOCAL + _MAYBE, BATCH + _MAYBE, CLOCK + _MAYBE})
"""Marks that are worth a hint, and no more."""

RANK_VARIABLES = frozenset({"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
LOCAL_VARIABLES = NAMES["local_variables"]
MAIN_NAMES = NAMES["main_names"]
"""Names that mean "I am rank 0" wherever they come from."""
_ORDERS = (ast.Gt, ast.GtE, ast.Lt, ast.LtE)
_TO_ONE = frozenset({"torch.distributed.reduce", "torch.distributed.gather"})
"""Collectives whose result one rank alone has."""
_CHANCE_MODULES = ("random.", "numpy.random.")
_ENVIRONMENT = frozenset({"os.environ.get", "os.environ.pop", "os.getenv"})
_LOADER_ENDS = ("_dl", "batches")
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
        if last(syntax.dotted(node.func)) not in NAMES["loader_wrappers"]:
            return False
        node = node.args[0]
    name = node.id if isinstance(node, ast.Name) else last(syntax.dotted(node))
    if name in syntax.loaders or name.lower().endswith(_LOADER_ENDS):
        return True
    return any(word in name.lower() for word in _LOADER_WORDS)


@dataclass(frozen=True)
class _Returned:
    """What a function's result depends on."""

    whole: frozenset[str]
    parts: tuple[frozenset[str], ...] = ()
    """Of a tuple, where each return is one of the same length."""


class Dependence:
    """What the values of a program depend on."""

    def __init__(self, syntax: ProgramSyntax) -> None:
        """Follow all assignments of all functions until nothing changes."""
        self.syntax = syntax
        self.definitions: dict[tuple[LintScope, str], NameDefinitions] = {}
        self.marks: dict[Definition, frozenset[str]] = {}
        self.returned: dict[LintScope, _Returned] = {}
        self.agreed: dict[LintScope, set[str]] = {}
        self.losses: dict[LintScope, set[str]] = {}
        self.seeded = any(last(syntax.dotted(call.func)) in NAMES["seeds"] for call in syntax.calls)
        self.rank_parameters = {
            (syntax.scope_of[call], value.id)
            for call in syntax.calls_to("init_process_group")
            if isinstance(value := argument(call, "rank", 4), ast.Name)
        }
        """Names that a function gives init_process_group() as the rank."""
        self._cache: dict[ast.AST, frozenset[str]] = {}
        for scope in syntax.scopes:
            self.agreed[scope] = self._agreed_in(scope)
            self.losses[scope] = {name for call in scope.of(ast.Call) for name in _loss_of(call)}
            for definition in definitions_in(scope):
                key = self._key(scope, definition.target)
                if key is not None:
                    self.definitions.setdefault(key, NameDefinitions(syntax)).all.append(definition)
        # Names that are assigned once are not looked at: without that they have no value.
        self._under_tests = {
            one
            for names in self.definitions.values()
            if len(names.all) > 1
            for one in names.all
            if one.kind == "assign" and isinstance(one.target, ast.Name) and one.place == ()
        }
        self._settle()

    def _agreed_in(self, scope: LintScope) -> set[str]:
        """Return names whose values a collective of this function makes equal in place.

        If a call's result is used, its arguments stay as they were; not so torch.distributed's own
        calls.
        """
        names: set[str] = set()
        for call in scope.of(ast.Call):
            dotted = self.syntax.dotted(call.func)
            in_place = isinstance(self.syntax.parents[call], ast.Expr)
            if not in_place and not dotted.startswith("torch.distributed."):
                continue
            if dotted in _TO_ONE:
                continue
            if any(word in last(dotted).lower() for word in NAMES["agreeing"]):
                names.update(one.id for one in call.args if isinstance(one, ast.Name))
        return names

    def _settle(self) -> None:
        """Three rounds are enough for what people write: a rank through two functions."""
        in_order = [definition for names in self.definitions.values() for definition in names.all]
        returns = {
            scope: [each.value for each in scope.of(ast.Return) if each.value is not None]
            for scope in self.syntax.scopes[1:]
        }
        for _ in range(3):
            before = (dict(self.marks), dict(self.returned))
            self._cache.clear()
            for definition in in_order:
                self.marks[definition] = self._of_definition(definition)
            for scope, values in returns.items():
                if values:
                    self.returned[scope] = self._of_returns(values)
            if before == (self.marks, self.returned):
                break
        self._cache.clear()

    def _of_definition(self, definition: Definition) -> frozenset[str]:
        """What an assignment gives its name."""
        if definition.kind == "loop":
            counted = definition.place is not None and definition.place[:1] == (0,)
            counted = counted and self._counts(definition.value)
            batches = is_loader(self.syntax, definition.value) and not counted
            return frozenset({BATCH}) if batches else NOTHING
        sources = self._part(definition.value, definition.place)
        is_main = isinstance(definition.target, ast.Name) and definition.target.id in MAIN_NAMES
        is_unknown = isinstance(definition.value, ast.Call) and not self._called(definition.value)
        if is_main and not sources and is_unknown:
            return frozenset({RANK})
        if definition.kind == "add":
            sources |= self.of(definition.target)
        if definition in self._under_tests and self._is_of_some_ranks(definition):
            sources |= {RANK}
        if not isinstance(definition.target, ast.Name):
            return sources
        if definition.target.id in self.losses[definition.scope] and maybe(BATCH) in sources:
            return sources - {maybe(BATCH)} | {BATCH}  # what has gradients was computed of a batch
        return sources

    def _is_of_some_ranks(self, definition: Definition) -> bool:
        """Whether rank 0, or all others, cannot come to an assignment."""
        child: ast.AST = definition.target
        for around in self.syntax.outer(definition.target):
            if isinstance(around, ast.If) and self.of(around.test) & RANKS:
                ways = [on_rank(self, around.test, rank) for rank in (0, 1)]
                barred = child not in around.body
                if ways.count(barred) == 1:
                    return True
            child = around
        return False

    def _counts(self, node: ast.expr, names: int = 2) -> bool:
        """Whether `enumerate` is what a loop goes over, by itself or through so many names."""
        if isinstance(node, ast.Name):
            return names > 0 and any(self._counts(one, names - 1) for one in self.values_at(node))
        if isinstance(node, ast.IfExp):
            return self._counts(node.body, names)
        if not isinstance(node, ast.Call) or not node.args:
            return False
        is_counter = last(self.syntax.dotted(node.func)) == "enumerate"
        return is_counter or self._counts(node.args[0], names)

    def _of_returns(self, values: list[ast.expr]) -> _Returned:
        """What a function returns: as a whole, and part by part where each return is a tuple."""
        whole = _joined([(self.of(one), _is_plain(one)) for one in values])
        tuples = [one for one in values if isinstance(one, ast.Tuple)]
        lengths = {len(one.elts) for one in tuples}
        if len(tuples) < len(values) or len(lengths) > 1:
            return _Returned(whole)
        columns = zip(*(one.elts for one in tuples), strict=True)
        return _Returned(
            whole,
            tuple(_joined([(self.of(one), _is_plain(one)) for one in row]) for row in columns),
        )

    def _part(self, value: ast.expr, place: Place | None) -> frozenset[str]:
        """What one part of an unpacked value depends on."""
        if place == ():
            return self.of(value)
        if place and isinstance(value, ast.Tuple | ast.List) and place[0] < len(value.elts):
            part = value.elts[place[0]]
            if not any(isinstance(one, ast.Starred) for one in value.elts):
                return self._part(part, place[1:])
        if isinstance(value, ast.IfExp):
            ways = (value.body, value.orelse)
            return _joined([(self._part(one, place), _is_plain(one)) for one in ways])
        inner = self._called(value)
        if place and inner is not None and isinstance(value, ast.Call):
            parts = self.returned.get(inner, _Returned(NOTHING)).parts
            if place[0] < len(parts):
                return self._in_terms_of(value, inner, parts[place[0]])
        return _unsure(self.of(value), RANKS)

    def _called(self, node: ast.AST) -> LintScope | None:
        if not isinstance(node, ast.Call):
            return None
        return self.syntax.resolve(node, self.syntax.scope_of[node])

    def _in_terms_of(
        self, call: ast.Call, inner: LintScope, marks: frozenset[str]
    ) -> frozenset[str]:
        """What a function's result depends on, its parameters replaced by a call's arguments."""
        result = frozenset(one for one in marks if not one.startswith(_GIVEN))
        shift = int(bool(inner.owner) and isinstance(call.func, ast.Attribute))
        for mark in marks - result:
            name = mark.removeprefix(_GIVEN).removesuffix(_MAYBE)
            position = inner.parameters.index(name) - shift if name in inner.parameters else -1
            passed = argument(call, name, position) if position >= 0 else None
            if passed is None or name in self.agreed[inner]:
                continue
            sources = self.of(passed)
            result |= _unsure(sources - RANKS) if mark.endswith(_MAYBE) else sources
        return result

    def _key(self, scope: LintScope, target: ast.AST) -> tuple[LintScope, str] | None:
        """A variable: of a function, or an attribute of `self` for all of a class's methods."""
        if isinstance(target, ast.Name):
            return (scope, target.id)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            return (self.syntax.scopes[0], f"{scope.owner}:{target.value.id}.{target.attr}")
        return None

    def values_at(self, node: ast.Name) -> list[ast.expr]:
        """Return all values that a name may have where it is used; none where that is not known."""
        scope: LintScope | None = self.syntax.scope_of[node]
        own = scope
        while scope is not None:
            names = self.definitions.get((scope, node.id))
            if names is not None:
                reaching, starts = names.reaching(node) if scope is own else (names.all, False)
                if starts and scope is own and (node.id in scope.parameters or not reaching):
                    return []
                plain = all(one.place == () and one.kind == "assign" for one in reaching)
                return [one.value for one in reaching] if plain else []
            if node.id in scope.parameters:
                return []
            scope = scope.outer
        return []

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
            return self._of_subscript(node)
        if isinstance(node, ast.IfExp):
            ways = [(self.of(one), _is_plain(one)) for one in (node.body, node.orelse)]
            return _joined(ways) | self.of(node.test)
        if isinstance(node, ast.Lambda | ast.Constant | ast.Dict | ast.DictComp):
            return NOTHING
        sources = self._union(ast.iter_child_nodes(node))
        return sources - _CLOCKED if isinstance(node, ast.JoinedStr) else sources

    def _of_subscript(self, node: ast.Subscript) -> frozenset[str]:
        variable = environment_name(self.syntax, node)
        if variable:
            return _of_variable(variable)
        index = constant(node.slice)
        if self._called(node.value) is not None and isinstance(index, int) and index >= 0:
            return self._part(node.value, (index,))
        return self.of(node.value) | (self.of(node.slice) & RANKS)

    def _union(self, nodes: Iterable[ast.AST]) -> frozenset[str]:
        sources = NOTHING
        for node in nodes:
            sources |= self.of(node)
        return sources

    def _of_name(self, node: ast.Name) -> frozenset[str]:
        own = scope = self.syntax.scope_of[node]
        while True:
            if node.id in self.agreed[scope]:
                return NOTHING
            names = self.definitions.get((scope, node.id))
            if names is not None:
                return self._of_definitions(names, node if scope is own else None)
            if node.id in scope.parameters:
                if (scope, node.id) in self.rank_parameters:
                    return frozenset({RANK})
                is_own = scope is own
                return _of_word(node.id) or (frozenset({_GIVEN + node.id}) if is_own else NOTHING)
            if scope.outer is None:
                break
            scope = scope.outer
        return NOTHING if node.id in self.syntax.functions else _of_word(node.id)

    def _of_definitions(self, names: NameDefinitions, use: ast.Name | None) -> frozenset[str]:
        """What a name depends on by the assignments that reach its use, or by all of them."""
        parameter = use is not None and use.id in self.syntax.scope_of[use].parameters
        kinds = {self.marks.get(one, NOTHING) for one in names.all}
        if len(kinds) == 1 and not parameter:
            return kinds.pop()
        reaching, starts = (names.all, False) if use is None else names.reaching(use)
        ways = [(self.marks.get(one, NOTHING), _is_plain(one.value)) for one in reaching]
        if parameter and starts and use is not None:
            ways.append((_of_word(use.id) or frozenset({_GIVEN + use.id}), False))
        return _joined(ways)

    def _of_attribute(self, node: ast.Attribute) -> frozenset[str]:
        if node.attr in NAMES["shapes"]:
            return NOTHING
        by_word = _of_word(node.attr)
        key = self._key(self.syntax.scope_of[node], node)
        names = self.definitions.get(key) if key is not None else None
        if names is None or by_word:
            return by_word | (self.of(node.value) - RANKS)
        sources = self._of_definitions(names, None)
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        return sources if is_own else _unsure(sources, _OWN)

    def _of_call(self, node: ast.Call) -> frozenset[str]:  # noqa: PLR0911 - a line per kind
        variable = environment_name(self.syntax, node)
        if variable:
            return _of_variable(variable)
        dotted = self.syntax.dotted(node.func)
        name = last(dotted)
        inner = self._called(node)
        if inner is not None:
            returned = self.returned.get(inner)
            return NOTHING if returned is None else self._in_terms_of(node, inner, returned.whole)
        if name in NAMES["rank_calls"] or dotted in NAMES["rank_functions"]:
            return NOTHING if given(argument(node, "group", 0)) else frozenset({RANK})
        if name in NAMES["local_calls"]:
            return frozenset({LOCAL})
        if name in MAIN_NAMES:
            return frozenset({RANK})
        drawn = self._drawn(node, dotted, name)
        if drawn:
            return drawn
        if (
            name in NAMES["same_everywhere"]
            or name in NAMES["shapes"]
            or any(one in name.lower() for one in NAMES["agreeing"])
        ):
            return NOTHING
        return self._passed_on(node, dotted, name)

    def _passed_on(self, node: ast.Call, dotted: str, name: str) -> frozenset[str]:
        """What a call that nobody knows makes of its arguments, and a known one of its own."""
        sources = self._union([*node.args, *(one.value for one in node.keywords)])
        owner = NOTHING
        if isinstance(node.func, ast.Attribute):
            owner = self.of(node.func.value) - RANKS
        if name in NAMES["text_calls"]:
            sources, owner = sources - _CLOCKED, owner - _CLOCKED
        if name in NAMES["plain"] or dotted.startswith("os.path"):
            return sources | owner
        sources -= RANKS
        if dotted in NAMES["listing"]:
            return owner | _unsure(sources - {CHANCE}) | (sources & {CHANCE})
        is_known = dotted.partition(".")[0] in NAMES["computing"] and name not in NAMES["reading"]
        return owner | (sources if is_known else _unsure(sources))

    def _drawn(self, node: ast.Call, dotted: str, name: str) -> frozenset[str]:
        """What a call brings that is another on each rank: a batch, the clock, chance."""
        follows = name == "next" and bool(node.args) and is_loader(self.syntax, node.args[0])
        if follows or name in NAMES["draws"]:
            return frozenset({BATCH})
        if dotted in NAMES["clocks"]:
            return frozenset({CLOCK})
        of_torch = dotted in ("torch.rand", "torch.randint", "torch.randn")
        is_chance = name in NAMES["chance_calls"] and (
            dotted.startswith(_CHANCE_MODULES) or of_torch
        )
        return frozenset({CHANCE}) if is_chance else NOTHING

    def _of_compare(self, node: ast.Compare) -> frozenset[str]:
        """Whether there are ranks at all (`rank != -1`, `"RANK" in os.environ`) all ranks know."""
        sources = self._union([node.left, *node.comparators])
        operator, other = node.ops[0], node.comparators[0]
        if isinstance(operator, ast.Is | ast.IsNot) and not given(other):
            return _unsure(sources - RANKS)  # whether there is a value says little of the value
        if not sources & _RANK_SOURCES:
            return sources
        if len(node.ops) != 1:
            plain = constant(node.left) is not None or constant(node.comparators[-1]) is not None
            return sources if plain else sources - _RANK_SOURCES  # one of a group's range of ranks
        value = constant(other)
        listed = isinstance(other, ast.Tuple | ast.List | ast.Set)
        if isinstance(operator, ast.In | ast.NotIn) and not listed:
            return sources - _RANK_SOURCES  # a member of some group, as all others who continue
        of_world = re.search("world|size|ranks", ast.unparse(other).lower())
        if isinstance(operator, _ORDERS) and value is None and not of_world:
            return _unsure(sources)  # whether any rank is beyond it, nobody can tell
        there = isinstance(operator, ast.Eq | ast.NotEq | ast.Gt | ast.LtE) and value == -1
        there |= isinstance(operator, ast.GtE | ast.Lt) and value == 0 and value is not False
        return sources - _RANK_SOURCES if there else sources


def _of_variable(name: str) -> frozenset[str]:
    if name in RANK_VARIABLES:
        return frozenset({RANK})
    return frozenset({LOCAL}) if name in LOCAL_VARIABLES else NOTHING


def _of_word(name: str) -> frozenset[str]:
    """What a name says of itself, where its value comes from elsewhere."""
    if name in NAMES["local_names"]:
        return frozenset({LOCAL})
    return frozenset({RANK}) if name in NAMES["rank_names"] or name in MAIN_NAMES else NOTHING


def _is_plain(node: ast.AST) -> bool:
    """Whether a value is written out: what a program without ranks takes."""
    return constant(node) is not None or (isinstance(node, ast.Constant) and node.value is None)


def _loss_of(call: ast.Call) -> list[str]:
    """The names of what gradients are computed of: `loss.backward()`, `engine.backward(loss)`."""
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr != "backward":
        return []
    inner = func.value.args if isinstance(func.value, ast.Call) else [func.value]
    return [one.id for one in (*inner, *call.args) if isinstance(one, ast.Name)]


def maybe(mark: str) -> str:
    """The mark of a value of which nobody can tell whether it still depends on that."""
    return mark if mark.endswith(_MAYBE) else mark + _MAYBE


def _unsure(marks: frozenset[str], of: frozenset[str] | None = None) -> frozenset[str]:
    """Marks that no error may rest on, all or those of some kinds."""
    return frozenset(maybe(one) if of is None or one in of else one for one in marks)


def _joined(ways: list[tuple[frozenset[str], bool]]) -> frozenset[str]:
    """Return what a value depends on that comes one of several ways; a flag marks constants.

    A mark is certain if each way has it. A rank stays one beside constants: a program that runs on
    one rank takes those.
    """
    if not ways:
        return NOTHING
    everywhere = frozenset.intersection(*(marks for marks, _ in ways))
    beside = frozenset.intersection(
        frozenset(RANKS), *(marks for marks, plain in ways if not plain)
    )
    several = frozenset.union(*(marks for marks, _ in ways))
    certain = everywhere | (beside & several)
    return certain | frozenset(maybe(one) for one in several - certain)


def on_rank(
    dependence: Dependence, node: ast.expr, rank: int, under_way: frozenset[ast.AST] = frozenset()
) -> bool | None:
    """Return what a test comes out as on a rank (0 or 1); None if nobody can tell.

    `under_way` are values that are being looked at already; a loop may lead back to them.
    """
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = on_rank(dependence, node.operand, rank, under_way)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        parts = [on_rank(dependence, one, rank, under_way) for one in node.values]
        decides = isinstance(node.op, ast.Or)
        if decides in parts:
            return decides
        return None if None in parts else not decides
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and dependence.of(node.left) & RANKS:
        return _compared(node.ops[0], rank, node.comparators[0])
    dotted = dependence.syntax.dotted(node.func if isinstance(node, ast.Call) else node)
    if last(dotted) in MAIN_NAMES:
        return rank == 0
    return _through_name(dependence, node, rank, under_way)


def _through_name(
    dependence: Dependence, node: ast.expr, rank: int, under_way: frozenset[ast.AST]
) -> bool | None:
    """A test that was given a name: `is_main = rank == 0`."""
    if not isinstance(node, ast.Name) or not dependence.of(node) & RANKS:
        return None
    values = dependence.values_at(node)
    if len(values) == 1 and isinstance(values[0], ast.Compare | ast.BoolOp | ast.UnaryOp):
        if values[0] in under_way:
            return None
        return on_rank(dependence, values[0], rank, under_way | {values[0]})
    return bool(rank) if _of_word(node.id) and node.id not in MAIN_NAMES else None


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
