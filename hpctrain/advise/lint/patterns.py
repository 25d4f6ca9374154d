"""Rules that are one call's or one variable's pattern: what their `find` tables say is looked for.

Each row of rules/*.toml with `find` tables becomes `CallPattern`s. A row needs no knowledge of the
analysis; docs/development/contributing.md has its fields. tests/unit/lint/test_rules.py runs every
row's programs, and switches every table off once.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hpctrain.advise.lint.arguments import rank_origin
from hpctrain.advise.lint.reporting import ProgramFacts, for_main_only
from hpctrain.advise.lint.rule import ROWS, LintFinding
from hpctrain.advise.lint.syntax import argument, constant, is_vendors, keyword, last

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NOT = "not "


@dataclass(frozen=True)
class ArgumentTest:
    """What one argument must be. Nothing holds of an argument that may hide behind a star."""

    name: str  # as a keyword
    place: int | None = None  # among the arguments without a keyword; None where it has none
    # one of these holds: `absent`; a literal as Python writes it; `name X`, the last name of what
    # is given; `call X`, a call of X; `like REGEX`, a text in which it is found; `over N`, a
    # whole number above N; `rank local` or `rank global`, certainly that rank
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()  # none of these holds

    def holds(self, facts: ProgramFacts, call: ast.Call) -> bool:
        """Whether it holds of a call's argument."""
        value = argument(call, self.name, self.place)
        hides = any(one.arg is None for one in call.keywords) or (
            self.place is not None and any(isinstance(one, ast.Starred) for one in call.args)
        )
        if hides and keyword(call, self.name) is None:
            return False
        if self.any_of and not any(_is(facts, value, word) for word in self.any_of):
            return False
        return not any(_is(facts, value, word) for word in self.none_of)


def _is(  # noqa: PLR0911 - a line per word
    facts: ProgramFacts, value: ast.expr | None, word: str
) -> bool:
    """Whether an argument is what one word of a test says."""
    if value is None or word == "absent":
        return value is None and word == "absent"
    literal = constant(value)
    kind, _, rest = word.partition(" ")
    match kind:
        case "name":
            return last(facts.syntax.dotted(value)) == rest
        case "call":
            return isinstance(value, ast.Call) and facts.syntax.dotted(value.func) == rest
        case "rank":
            return rank_origin(facts, value) == rest
        case "like":
            return isinstance(literal, str) and re.search(rest, literal) is not None
        case "over":
            return isinstance(literal, int) and literal > int(rest)
        case _:
            is_literal = literal is not None or isinstance(value, ast.Constant)
            return is_literal and repr(literal) == word


_FILE_FACTS: dict[str, Callable[..., bool]] = {
    "distributed": lambda facts: facts.distributed,
    "trains": lambda facts: facts.trains,
    "spawns": lambda facts: facts.spawns,
    "on one machine": lambda facts: (
        facts.spawns or facts.mentions("spawn", "mp", "multiprocessing")
    ),
    "on GPUs": lambda facts: (
        not facts.mentions("is_available")
        and any(not call.args for call in facts.syntax.methods("cuda"))
    ),
}
_USES = (
    *(ast.Assign, ast.NamedExpr, ast.AugAssign, ast.If, ast.While, ast.BinOp, ast.Compare),
    *(ast.UnaryOp, ast.Attribute, ast.Call),
)


def _is_used(facts: ProgramFacts, node: ast.AST) -> bool:
    """Whether a value goes anywhere but on to a caller, who may know; a name must be read."""
    parent = facts.syntax.parents[node]
    target = parent.targets[0] if isinstance(parent, ast.Assign) else None
    if isinstance(target, ast.Name):
        names = [one for one in facts.syntax.scope_of[node].of(ast.Name) if one.id == target.id]
        parents = facts.syntax.parents
        reads = [one for one in names if one not in getattr(parents[one], "targets", ())]
        return any(node in facts.dependence.values_at(one) for one in reads)
    return isinstance(parent, _USES)


def _for_determinism(facts: ProgramFacts, node: ast.AST) -> bool:
    """Whether it is set so that sums have one order: what it is there for."""
    scope = facts.syntax.scope_of[node]
    first, end = getattr(scope.node, "lineno", 1), getattr(scope.node, "end_lineno", None)
    lines = facts.syntax.lines[first - 1 : end]
    return "determin" in scope.name or any("determin" in line.lower() for line in lines)


def _is_under(facts: ProgramFacts, node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(one, kinds) for one in facts.syntax.outer(node))


_PLACE_FACTS: dict[str, Callable[..., bool]] = {
    "used result": _is_used,
    "unused result": lambda facts, node: isinstance(facts.syntax.parents[node], ast.Expr),
    "main only": for_main_only,
    "under a test": lambda facts, node: _is_under(facts, node, ast.If),
    "guarded": lambda facts, node: _is_under(facts, node, ast.If, ast.ExceptHandler),
    "for determinism": _for_determinism,
}


def _frozen(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


@dataclass(frozen=True)
class CallPattern:
    """One `find` table of a rule."""

    code: str  # the rule
    # {name} is the call's last name or the variable; {value} is the variable's, or the first
    # tested argument
    message: str
    call: tuple[str, ...] = ()  # dotted names; `*` stands for anything
    sets: tuple[str, ...] = ()  # variables of the environment that the program sets
    by_default: bool = False  # it counts for `os.environ.setdefault`, too
    # what the variable's value begins with, as a regex; without it any value counts
    value: str | None = None
    args: tuple[ArgumentTest, ...] = ()  # what arguments must be
    # what must hold of the program (`_FILE_FACTS`), or with "not" before it must not
    file: tuple[str, ...] = ()
    # what must hold of the call or the assignment (`_PLACE_FACTS`), likewise
    place: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()  # one of these identifiers is in the program
    mentions_not: tuple[str, ...] = ()  # none of these is
    calls_not: tuple[str, ...] = ()  # none of these dotted names is called
    says_not: tuple[str, ...] = ()  # none of these texts is in the program
    imports_not: tuple[str, ...] = ()  # nothing of these packages is imported
    names_not: str = ""  # a regex that no identifier in small letters has
    texts_not: str = ""  # a regex that no text in small letters has
    first: bool = False  # report only the first place of a program
    at: str = ""  # the argument that is shown instead of the call

    @classmethod
    def of(cls, code: str, row: dict[str, Any]) -> CallPattern:
        """The pattern of a `find` table.

        Raises:
            TypeError: it has a field that no pattern has, or lacks its message.
        """
        tests = tuple(ArgumentTest(**_frozen(one)) for one in row.get("args", ()))
        return cls(code, **{**_frozen(row), "args": tests})

    @property
    def finds_calls(self) -> re.Pattern[str]:
        """What a call's dotted name must be."""
        return re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in self.call))

    def fits_file(self, facts: ProgramFacts) -> bool:
        """Whether the rule applies to the program."""
        return (
            _all_hold(self.file, _FILE_FACTS, facts)
            and (not self.mentions or facts.mentions(*self.mentions))
            and not (self.mentions_not and facts.mentions(*self.mentions_not))
            and facts.called.isdisjoint(self.calls_not)
            and facts.texts.isdisjoint(self.says_not)
            and not (self.imports_not and facts.syntax.imports_any(*self.imports_not))
            and not (self.names_not and re.search(self.names_not, "\n".join(facts.words).lower()))
            and not (self.texts_not and re.search(self.texts_not, "\n".join(facts.texts).lower()))
        )


def _all_hold(words: tuple[str, ...], facts: dict[str, Callable[..., bool]], *given: Any) -> bool:
    """Whether each fact holds of what is given, or with "not" before it does not."""
    return all(facts[word.removeprefix(_NOT)](*given) != word.startswith(_NOT) for word in words)


@cache
def packaged_patterns() -> tuple[CallPattern, ...]:
    """Those of rules/*.toml."""
    return tuple(CallPattern.of(row.rule.code, find) for row in ROWS for find in row.finds)


@cache
def _by_name(
    patterns: tuple[CallPattern, ...],
) -> tuple[dict[str, list[tuple[CallPattern, re.Pattern[str]]]], dict[str, list[CallPattern]]]:
    """Patterns by the call's last name ("" if that is not plain), and by the variable.

    So each call meets few of them.
    """
    calls: dict[str, list[tuple[CallPattern, re.Pattern[str]]]] = {}
    variables: dict[str, list[CallPattern]] = {}
    for pattern in patterns:
        for name in {"" if "*" in last(name) else last(name) for name in pattern.call}:
            calls.setdefault(name, []).append((pattern, pattern.finds_calls))
        for name in pattern.sets:
            variables.setdefault(name, []).append(pattern)
    return calls, variables


def check_patterns(
    facts: ProgramFacts, patterns: tuple[CallPattern, ...] | None = None
) -> Iterator[LintFinding]:
    """Every finding of some patterns; of ours where none are given."""
    fits: dict[int, bool] = {}
    for pattern, node, name, literal in _places(facts, patterns or packaged_patterns()):
        key = id(pattern)
        if key not in fits:
            fits[key] = pattern.fits_file(facts)
        if not fits[key] or not _all_hold(pattern.place, _PLACE_FACTS, facts, node):
            continue
        fits[key] = not pattern.first
        where: ast.AST = node
        shown = literal
        if isinstance(node, ast.Call) and pattern.call:
            tests = [argument(node, one.name, one.place) for one in pattern.args]
            tested = tests[0] if tests else None
            text = constant(tested)
            shown = text if isinstance(text, str) else facts.syntax.code(tested) if tested else ""
            where = (keyword(node, pattern.at) or node) if pattern.at else node
        message = pattern.message.replace("{name}", name).replace("{value}", shown)
        yield facts.finding(pattern.code, where, message)


def _places(
    facts: ProgramFacts, patterns: tuple[CallPattern, ...]
) -> Iterator[tuple[CallPattern, ast.AST, str, str]]:
    """Each (pattern, node, name, value) of which all but the file and the place holds."""
    of_calls, of_variables = _by_name(patterns)
    for call in facts.syntax.calls:
        dotted = facts.syntax.dotted(call.func)
        name = last(dotted)
        rows = of_calls.get(name, ()) if name else ()
        for pattern, names in (*rows, *of_calls.get("", ())):
            if not names.fullmatch(dotted) or is_vendors(dotted):
                continue
            if all(test.holds(facts, call) for test in pattern.args):
                yield pattern, call, name, ""
    for name, value, node, is_default in _environment(facts):
        literal = constant(value)
        for pattern in of_variables.get(name, ()):
            fits = pattern.value is None or (
                literal is not None and re.match(pattern.value, str(literal)) is not None
            )
            if fits and (pattern.by_default or not is_default):
                yield pattern, node, name, str(literal)


def _environment(facts: ProgramFacts) -> Iterator[tuple[str, ast.expr, ast.AST, bool]]:
    """Each (variable, value, where, whether by `setdefault`) that a program sets."""
    for scope in facts.syntax.scopes:
        for node in scope.of(ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Subscript):
                    continue
                name = constant(target.slice)
                if facts.syntax.dotted(target.value) == "os.environ" and isinstance(name, str):
                    yield name, node.value, node, False
    for call in facts.syntax.calls:
        dotted = facts.syntax.dotted(call.func)
        if dotted == "os.environ.update":
            for arg in call.args:
                pairs = zip(arg.keys, arg.values, strict=True) if isinstance(arg, ast.Dict) else ()
                yield from (
                    (str(constant(key)), value, key, False)
                    for key, value in pairs
                    if key is not None
                )
        elif dotted in ("os.putenv", "os.environ.setdefault") and len(call.args) > 1:
            by_default = dotted != "os.putenv"
            yield str(constant(call.args[0])), call.args[1], call, by_default
