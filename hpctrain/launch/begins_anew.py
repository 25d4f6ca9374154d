"""Programs that save checkpoints and do not resume from them by themselves, found in their source.

A run of such a program begins at step 0 after each preemption, for as long as anybody lets it. What
is looked for is that a program saves, and that nothing in it loads, or that it loads only under a
test of an option that the command line does not give. It is a note of `submit` and of `check`, with
the words to add, and lint's HT608; a program that speaks with hpctrain is not looked at.
tests/unit/submit/test_begins_anew.py holds the promises; docs/getting-started.md says how often it
is right.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SAVED = ("checkpoint", "ckpt", "snapshot", "pretrained", "state", "model", "weights", "master")
"""With "save" in a function's name: what it saves."""
_LOADED = ("checkpoint", "ckpt", "snapshot", "state", "model", "weights", "pretrained", "last")
_BACK = ("load", "restore", "resume", "restart", "from_state", "from_checkpoint")
"""With one of `_LOADED` in a function's name: it goes back to what was saved."""
_ASKED = ("resume", "ckpt", "checkpoint", "restore", "load", "continue", "init_from")
_OF_TRAINING = (*_SAVED, "ckpt", "optim", "param", "net", "epoch", "best", "last")
"""One of these stands in what `torch.save` is given by a program that trains; else it is data."""
_TRAINS = re.compile(r"backward|epoch|optimizer|\btrain")
_OF_CHECKPOINTS = (".pt", ".ckpt", ".tar", ".bin", ".safetensors", "ckpt", "checkpoint")
PLACE = "PATH"
"""Stands for a path that is not plain from the source."""


@dataclass(frozen=True)
class AskedOption:
    """An option of the program."""

    name: str  # as one types it
    dest: str  # of the parsed arguments
    is_flag: bool  # it takes no value
    # its value where it is not given, as text; None where that is none or not plain
    default: str | None

    @property
    def goes_on(self) -> bool:
        """Whether its name says that it resumes from something."""
        return any(word in self.dest.lower() for word in _ASKED)


@dataclass(frozen=True)
class BeginsAnew:
    """What was found."""

    pattern: str  # where it saves, as `checkpoint.sealed` takes it; PLACE where nobody can say
    save: ast.Call  # the first save
    option: AskedOption | None  # the option with which it resumes; None where nothing in it loads

    def note(self, name: str) -> str:
        """What to tell its user."""
        saves = f"{name} saves its checkpoints (line {self.save.lineno})"
        if self.option is None:
            return (
                f"{saves} and loads none: after a preemption it begins at its first step again. "
                "Load the newest one at the start, or have hpctrain save and load: give model and "
                "optimizer to run.track, and loop over run.steps (`hpctrain help getting-started`)"
            )
        words = self.option.name if self.option.is_flag else f"{self.option.name} {{checkpoint}}"
        return (
            f"{saves} and resumes from one only with {self.option.name}, which is not given: after "
            "a preemption it begins at its first step again. Add: "
            f"--checkpoint {shlex.quote(self.pattern)} --resume-args={shlex.quote(words)}"
            f"{' (PATH: where it saves)' if self.pattern == PLACE else ''}"
        )


def begins_anew(text: str, args: Sequence[str]) -> BeginsAnew | None:
    """Look at a program's source and command-line arguments.

    Return None if it seems to resume by itself, saves nothing, or cannot be read.
    """
    if "hpctrain" in text.lower() or not _TRAINS.search(text):  # its module, or its variables
        return None
    try:
        program = _Program(ast.parse(text), args)
    except (SyntaxError, ValueError, RecursionError):
        return None
    saves = [call for call in program.saves if program.is_repeated(call)]
    if not saves:  # what is saved once, at the end, is a result
        return None
    first = saves[0]
    pattern = next((p for call in saves if (p := program.path(call))), PLACE)
    if not program.loads:
        return BeginsAnew(pattern, first, None)
    under = [program.asked_under(call) for call in program.loads]
    if None in under:
        return None
    going_on = (option for option in under if option is not None and option.goes_on)
    option = next(going_on, None)
    return None if option is None else BeginsAnew(pattern, first, option)


def _is_named(name: str, does: Sequence[str], what: Sequence[str]) -> bool:
    name = name.lower()
    return any(word in name for word in does) and any(word in name for word in what)


@dataclass
class _Program:
    """A program's saves, loads and options."""

    tree: ast.Module
    args: Sequence[str]
    saves: list[ast.Call] = field(default_factory=list)
    loads: list[ast.AST] = field(default_factory=list)
    options: dict[str, AskedOption] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parents = {
            below: node for node in ast.walk(self.tree) for below in ast.iter_child_nodes(node)
        }
        self._constants: dict[str, ast.expr] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self._set: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._constants.setdefault(node.targets[0].id, node.value)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                self._set.add(node.targets[0].attr)
            if isinstance(node, ast.Call):
                self._take(node)
        self.saves = [call for call in self.saves if self._is_of_training(call)]
        self.saves.sort(key=lambda call: call.lineno)

    def _take(self, call: ast.Call) -> None:
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        self._calls.setdefault(last, []).append(call)
        if last in {"add_argument", "option"}:
            self._take_option(call)
        elif name in {"torch.save", "dcp.save"} or _is_named(last, ("save",), _SAVED):
            self.saves.append(call)
        elif name in {"torch.load", "dcp.load"} or _is_named(last, _BACK, _LOADED):
            self.loads.append(call)
        for keyword in call.keywords:
            is_none = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in {"resume_from_checkpoint", "ckpt_path"} and not is_none:
                self.loads.append(keyword.value)

    def _is_of_training(self, call: ast.Call) -> bool:
        """Whether a save writes what training resumes from, and not pieces of a data set."""
        name = ast.unparse(call.func).lower()
        if self._is_of_hook(call):
            return False
        if name != "torch.save":
            return not any(word in name for word in ("tokenizer", "processor"))
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = [one for node in given for one in ast.walk(node) if isinstance(one, ast.Name)]
        followed = [self._constants[one.id] for one in names if one.id in self._constants]
        words = " ".join(ast.unparse(one) for one in (*given, *followed)).lower()
        return any(word in words for word in _OF_TRAINING)

    def _is_of_hook(self, node: ast.AST) -> bool:
        """Whether a library calls it, which resumes by itself."""
        inside = next((one for one in self._above(node) if isinstance(one, ast.ClassDef)), None)
        return inside is not None and any("Hook" in ast.unparse(one) for one in inside.bases)

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node stands in, the innermost first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def _take_option(self, call: ast.Call) -> None:
        names = [one.value for one in call.args if isinstance(one, ast.Constant)]
        long = [n for n in names if isinstance(n, str) and n.startswith("-")]
        if not long:
            return
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        name = max(long, key=len)
        dest = given.get("dest")
        name_of_value = (
            dest.value if isinstance(dest, ast.Constant) else name.lstrip("-").replace("-", "_")
        )
        action = given.get("action")
        is_flag = isinstance(action, ast.Constant) and str(action.value).startswith("store_")
        is_flag = is_flag or "is_flag" in given
        default = given.get("default")
        plain = default.value if isinstance(default, ast.Constant) else None
        self.options[str(name_of_value)] = AskedOption(
            name, str(name_of_value), is_flag, str(plain) if plain else None
        )

    def asked_under(self, node: ast.AST) -> AskedOption | None:
        """Return the option whose test a load stands under, where nothing else lets it load."""
        if isinstance(node, ast.Call) and "auto" in ast.unparse(node.func):
            return None
        asked = self._asked_inside(node)
        for parent in self._above(node):
            if isinstance(parent, ast.If | ast.IfExp):
                asked = asked or self._option_in(parent.test)
            if isinstance(parent, ast.FunctionDef) and asked is None:
                asked = self._asked_by_callers(parent.name)
        given = asked is None or self._is_given(asked) or asked.dest in self._set
        return None if given else asked

    def _asked_inside(self, node: ast.AST) -> AskedOption | None:
        """Return the option that a helper of another module asks, which has all of them."""
        if not isinstance(node, ast.Call):
            return None
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not any(isinstance(one, ast.Name) and one.id in {"args", "opt"} for one in given):
            return None
        asks = (o for o in self.options.values() if "resume" in o.dest and o.default is None)
        return next(asks, None)

    def is_repeated(self, node: ast.AST, depth: int = 0) -> bool:
        """Whether a call stands in a loop, or in a function that is called in one."""
        for parent in self._above(node):
            if isinstance(parent, ast.For | ast.While):
                return True
            if isinstance(parent, ast.FunctionDef):
                calls = self._calls.get(parent.name, []) if depth < 3 else []  # noqa: PLR2004
                return any(self.is_repeated(call, depth + 1) for call in calls)
        return False

    def _asked_by_callers(self, name: str) -> AskedOption | None:
        asked = [self._asked_directly(call) for call in self._calls.get(name, [])]
        return asked[0] if asked and None not in asked else None

    def _asked_directly(self, node: ast.AST) -> AskedOption | None:
        tests = (one.test for one in self._above(node) if isinstance(one, ast.If))
        return next((asked for test in tests if (asked := self._option_in(test))), None)

    def _option_in(self, test: ast.expr) -> AskedOption | None:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
            return None  # it loads without the option, too
        asked: list[AskedOption] = []
        for node in ast.walk(test):
            dest = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            option = self.options.get(dest)
            if option is None and ast.unparse(node) in {"args.resume", "opt.resume"}:
                option = AskedOption("--resume", "resume", is_flag=False, default=None)
            if option is not None and option.default is None:
                asked.append(option)
        return next((option for option in asked if option.goes_on), asked[0] if asked else None)

    def _is_given(self, option: AskedOption) -> bool:
        return any(word == option.name or word.startswith(f"{option.name}=") for word in self.args)

    def path(self, call: ast.Call) -> str | None:
        """Return the pattern of the path that a save writes to; None where it is not plain."""
        of_torch = ast.unparse(call.func) == "torch.save"
        at = 1 if of_torch else 0
        node = call.args[at] if len(call.args) > at else None
        node = next((k.value for k in call.keywords if k.arg in {"f", "path"}), node)
        texts = list(self._texts(node)) if node is not None else []
        pattern = "".join(texts)
        is_file = any(word in pattern.rpartition("/")[2].lower() for word in _OF_CHECKPOINTS)
        return pattern if is_file and not pattern.startswith("*") else None

    def _texts(self, node: ast.expr, depth: int = 0) -> Iterator[str]:
        """Yield the parts of a path; what is not plain is a wildcard."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            for part in node.values:
                inner = part.value if isinstance(part, ast.FormattedValue) else part
                yield from self._texts(inner, depth + 1)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
            yield from self._texts(node.left, depth + 1)
            yield "/" if isinstance(node.op, ast.Div) else ""
            yield from self._texts(node.right, depth + 1)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("path.join", "Path")):
            for number, part in enumerate(node.args):
                yield "/" if number else ""
                yield from self._texts(part, depth + 1)
        elif isinstance(node, ast.Name) and node.id in self._constants and depth < 4:  # noqa: PLR2004
            yield from self._texts(self._constants[node.id], depth + 1)
        elif isinstance(node, ast.Name) and (default := self._default_of(node)) is not None:
            yield default
        elif isinstance(node, ast.Attribute) and node.attr in self.options:
            yield self._value(self.options[node.attr])
        else:
            yield "*"

    def _default_of(self, name: ast.Name) -> str | None:
        """Return the default of a parameter of the function in which a name stands."""
        inside = (one for one in self._above(name) if isinstance(one, ast.FunctionDef))
        if (function := next(inside, None)) is None:
            return None
        own = function.args
        for parameter, default in zip(reversed(own.args), reversed(own.defaults), strict=False):
            if parameter.arg == name.id and isinstance(default, ast.Constant):
                return str(default.value) if default.value else None
        return None

    def _value(self, option: AskedOption) -> str:
        """Return what an option has on the command line, else its default, else a wildcard."""
        for number, word in enumerate(self.args):
            if word.startswith(f"{option.name}="):
                return word.partition("=")[2]
            if word == option.name and number + 1 < len(self.args):
                return self.args[number + 1]
        return option.default or "*"
