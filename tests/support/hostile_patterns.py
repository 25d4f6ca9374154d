"""Every regular expression of the package, and texts made to keep each of them busy.

A pattern that tries a text in more ways than the text is long can stop a program: `doctor` stood
for a minute before a line of 400 digits. `patterns_of` finds the patterns of a module in its syntax
tree and in what it holds; `probes` goes through a pattern's own parse tree and makes, for each
place in it that repeats, a text that fits so far and then goes on for ever.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import functools
import importlib
import random
import re
import re._constants as op
import re._parser as parser
import signal
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TOP = Path(__file__).parents[2]
LENGTH = 32_000
"""Characters: time that grows with their square is seconds here, and with their number none."""
OWN_LENGTH = 8192
"""Characters of a pattern's own words: what `doctor` looks at of a line."""
CPU_S = 0.15
"""Of this process, not of the clock on the wall: the package's own patterns need 0.04 at most, and
those that a text keeps busy 0.3."""
_PLACE_OF_FLAGS = {"compile": 1, "split": 3, "sub": 4, "subn": 4}
METHODS = frozenset(
    {"compile", "match", "search", "sub", "subn", "findall", "finditer", "fullmatch", "split"}
)
_REPEATS = {op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT}
_MANY = 100
"""A place that repeats more often than that is worth an attack."""
_ASKED = {"match": "match", "fullmatch": "fullmatch"}


@dataclasses.dataclass(frozen=True)
class Found:
    """A pattern and how it is used.

    Attributes:
        pattern: As it is written.
        flags: Its flags.
        methods: "search", "match", "fullmatch": by what it meets a text.
        place: Where it stands.
    """

    pattern: str | bytes
    flags: int
    methods: frozenset[str]
    place: str


def modules() -> list[str]:
    """Names of the package's modules that use `re`, or rules with patterns."""
    return [
        _name_of(path)
        for path in sorted((TOP / "hpctrain").rglob("*.py"))
        if re.search(r"^\s*import re$|^from re |pattern", path.read_text(), re.MULTILINE)
    ]


def patterns_of(module: str) -> tuple[list[Found], list[str]]:
    """A module's patterns, and the calls in its functions whose pattern stands in no constant."""
    loaded = importlib.import_module(module)
    tree = ast.parse(Path(loaded.__file__ or "").read_text())
    found: list[Found] = []
    open_calls: list[str] = []
    for name, value in vars(loaded).items():
        for pattern, flags, holder in _held(value, name):
            found.append(Found(pattern, flags, _methods_on(holder, module), f"{module}.{name}"))
    in_functions = {
        id(call)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for call in ast.walk(function)
    }
    for call in _calls(tree):
        method = call.func.attr  # type: ignore[attr-defined]
        try:
            pattern = _evaluated(call.args[0], loaded)
            flags = _flags(call, method, loaded)
        except NameError:
            if id(call) in in_functions:
                open_calls.append(ast.unparse(call))
            continue
        asked = frozenset({_ASKED.get(method, "search")})
        if method != "compile":
            found.append(Found(pattern, flags, asked, f"{module}:{call.lineno}"))
    return found, open_calls


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and node.func.attr in METHODS
        ):
            yield node


def _evaluated(node: ast.expr, module: Any) -> Any:
    code = compile(ast.Expression(node), "pattern", "eval")
    return eval(code, dict(vars(module)))  # noqa: S307 - the package's own text


def _flags(call: ast.Call, method: str, module: Any) -> int:
    at = _PLACE_OF_FLAGS.get(method, 2)
    given = [word.value for word in call.keywords if word.arg == "flags"] + call.args[at : at + 1]
    return int(_evaluated(given[0], module)) if given else 0


def _methods_on(name: str, module: str) -> frozenset[str]:
    """By what a constant or attribute is used; all ways for one that only loops name.

    What begins with _ is looked for in its own module, everything else in the package.
    """
    if name == _RULE:
        return frozenset({"fullmatch"})
    used = {
        _ASKED.get(method, "search")
        for where, variable, method in _uses()
        if variable == name and (where == module or not name.startswith("_"))
    }
    return frozenset(used or {"search", "match", "fullmatch"})


@functools.cache
def _uses() -> frozenset[tuple[str, str, str]]:
    """Module, name and method of every call `NAME.method(...)` that may be one of a pattern's."""
    return frozenset(
        (_name_of(path), variable, method)
        for path in (TOP / "hpctrain").rglob("*.py")
        for variable, method in re.findall(r"\b(\w+)\.(\w+)\(", path.read_text())
        if method in METHODS and variable != "re"
    )


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__")


_RULE = "rule of a key"


def _held(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str | bytes, int, str]]:
    """Patterns in a constant, each with its flags and the name by which it is called."""
    if isinstance(value, re.Pattern):
        yield value.pattern, value.flags, name
    elif dataclasses.is_dataclass(value) and isinstance(value, type):
        keys = [field.metadata.get("key") for field in dataclasses.fields(value)]
        rules = [getattr(key, rule, "") for key in keys for rule in ("pattern", "keys")]
        yield from ((text, 0, _RULE) for text in rules if text)
    elif depth < _DEEPEST:
        for item_name, item in _items(value, name):
            yield from _held(item, item_name, depth + 1)


_DEEPEST = 5


def _items(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What a container or a record of a dataclass holds, each by the name it is called by."""
    if isinstance(value, tuple | list | set | frozenset):
        yield from ((name, item) for item in value)
    elif isinstance(value, dict):
        yield from ((name, item) for item in (*value, *value.values()))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)


def patterns_of_data(names: set[str]) -> list[Found]:
    """The patterns of the TOML files that come with the package.

    Args:
        names: Keys whose texts are patterns.
    """
    files = [*(TOP / "site-configs").rglob("*.toml"), *(TOP / "hpctrain").rglob("*.toml")]
    return [
        Found(text, 0, frozenset({"fullmatch"}), str(path.relative_to(TOP)))
        for path in sorted(files)
        for text in _texts(tomllib.loads(path.read_text()), names, inside=False)
    ]


def _texts(value: Any, names: set[str], *, inside: bool) -> Iterator[str]:
    if isinstance(value, str):
        if inside:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, names, inside=inside)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, names, inside=inside or name in names)


FILLERS = (
    *("a", "9", "[", "]", " ", ".", "_", '"', ":", "ab "),
    base64.b64encode(random.Random(20261128).randbytes(LENGTH)).decode(),
)


def probes(
    found: Found, length: int = LENGTH, fillers: Sequence[str] = FILLERS
) -> Iterator[str | bytes]:
    """Texts that fit a pattern up to some place, and then go on for ever with what may follow."""
    tree = parser.parse(found.pattern, found.flags)  # type: ignore[arg-type]
    places = list(_places(tree, ""))
    seen: set[tuple[str, str]] = set()
    own_texts = {""}
    for before, body in places:
        for filler in (body, *(fillers if (before, "") not in seen else ())):
            seen.add((before, ""))
            if filler and (before, filler) not in seen:
                seen.add((before, filler))
                text = before + (filler * (length // len(filler)))[:length] + "\x01"
                yield _like(found, text)
        # Its own words again and again: each of them could be the beginning.
        own = (before * (OWN_LENGTH // len(before) + 1))[:OWN_LENGTH] if before else ""
        if own not in own_texts:
            own_texts.add(own)
            yield _like(found, own + "\x01")


def _like(found: Found, text: str) -> str | bytes:
    return text.encode("latin-1", "replace") if isinstance(found.pattern, bytes) else text


def _places(sequence: Any, before: str) -> Iterator[tuple[str, str]]:
    """What fits up to each place, and what that place repeats; "" where it repeats nothing."""
    yield before, ""
    for operation, value in sequence:
        for inner in _inner(operation, value):
            yield from _places(inner, before)
        if operation in _REPEATS and value[1] > _MANY:
            body = _fitting(value[2])
            yield before, body
            yield before + _fitting([(operation, value)]) + body, body
        before += _fitting([(operation, value)])


def _inner(operation: Any, value: Any) -> list[Any]:
    if operation in _REPEATS:
        return [value[2]]
    if operation is op.SUBPATTERN:
        return [value[3]]
    if operation is op.BRANCH:
        return list(value[1])
    if operation in {op.ASSERT, op.ASSERT_NOT}:
        return [value[1]]
    return [value] if operation is op.ATOMIC_GROUP else []


def _fitting(sequence: Any) -> str:
    """The shortest text that a part of a pattern takes, or nearly."""
    make: dict[Any, Callable[[Any], str]] = {
        op.LITERAL: chr,
        op.NOT_LITERAL: lambda code: "b" if code == ord("a") else "a",
        op.ANY: lambda _: "a",
        op.IN: _of_set,
        op.SUBPATTERN: lambda value: _fitting(value[3]),
        op.BRANCH: lambda value: _fitting(value[1][0]),
        op.ATOMIC_GROUP: _fitting,
        **dict.fromkeys(_REPEATS, lambda value: _fitting(value[2]) * value[0]),
    }
    return "".join(make[each](value) for each, value in sequence if each in make)


def _of_set(items: Any) -> str:
    pattern = parser.SubPattern(parser.State(), [(op.IN, items)])
    fits = re._compiler.compile(pattern).fullmatch  # type: ignore[attr-defined]
    return next(char for char in map(chr, _CODES) if fits(char))


_CODES = (*map(ord, "a0-. _/:[(\n\tZ~"), *range(256), *range(0x2500, 0x2600), *range(256, 0x2500))


class TooSlow(Exception):
    """A pattern has used up its time."""


def tried(found: Found, text: str | bytes) -> None:
    """Hold a text against a pattern in each way in which the package does.

    Raises:
        TooSlow: it takes more CPU time than a hundred such texts should.
    """
    compiled = re.compile(found.pattern, found.flags)

    def over(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, over)
    try:
        for method in sorted(found.methods):
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
            getattr(compiled, method)(text)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
