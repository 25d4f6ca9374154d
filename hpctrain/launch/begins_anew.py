"""Programs that save checkpoints and do not resume from them by themselves, found in their source.

A run of such a program begins at step 0 after each preemption, for as long as anybody lets it. What
is looked for is that a program saves in its loop and that no load is reached before: none is there,
or each stands under a test that is false with the command line as it is given. It is a note of
`submit` and of `check`, with the words to add, and lint's HT608; a program that speaks with
hpctrain is not looked at. tests/unit/submit/test_begins_anew.py holds the promises;
docs/getting-started.md says how often it is right.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SAVED = ("checkpoint", "ckpt", "snapshot", "pretrained", "state", "model", "weights", "master")
"""With "save" in a function's name: what it saves."""
_LOADED = ("checkpoint", "ckpt", "snapshot", "state", "model", "weights", "pretrained", "last")
_BACK = ("load", "restore", "resume", "restart", "from_state", "from_checkpoint")
"""With one of `_LOADED` in a function's name: it goes back to what was saved."""
_AT_ONCE = ("resume", "restore")
"""Goes back whatever else its name says, if it is called once: `maybe_resume(...)`."""
_OF_FILES = frozenset({"is_config_file", "default_config_files", "fromfile_prefix_chars"})
"""Arguments of calls to argparse and its relatives: a file may set any option."""
_NO_LOAD = re.compile("(?:down|up|data)load")
_ELSEWHERE = ("url", "hub")
"""In the name of what loads: published weights, or the program's own module."""
_ASKED = ("resume", "ckpt", "checkpoint", "restore", "load", "continue", "init_from")
_OF_TRAINING = (*_SAVED, "ckpt", "optim", "param", "net", "epoch", "best", "last")
"""One of these stands in what `torch.save` is given by a program that trains; else it is data."""
_OF_DATA = ("corpus", "vocab", "dataset", "vector", "tokenizer", "processor")
_TRAINS = re.compile(r"backward|epoch|optimizer|\btrain")
_OF_CHECKPOINTS = (".pt", ".ckpt", ".tar", ".bin", ".safetensors", "ckpt", "checkpoint")
_ARGUMENTS = frozenset({"args", "opt", "opts", "FLAGS"})
"""Usual names of the parsed arguments, where another module has parsed them."""
_USUAL_OPTIONS = frozenset({"resume", "resume_from", "resume_path", "resume_from_checkpoint"})
"""Options that mean the same in every program: empty unless they are given."""
_FOLLOWED = 4
"""Calls and names that are followed, one from another."""
PLACE = "PATH"
"""Stands for a path that is not plain from the source."""
_IS_A_PATH = ("isfile", "isdir", "exists")
_UNKNOWN = object()
_FIELD = re.compile(r"%[-+ #0-9.]*[a-z]|\{[^{}]*\}")
"""What `%` or `format` fills in."""
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_ENDS = ast.Return | ast.Raise
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class AskedOption:
    """An option of the program."""

    name: str  # as one types it
    dest: str  # of the parsed arguments
    is_flag: bool  # it takes no value
    default: object  # its value where it is not given; _UNKNOWN where that is not plain
    spellings: tuple[str, ...]  # all names, as one types them

    @property
    def goes_on(self) -> bool:
        """Whether its name says that it resumes from something."""
        return any(word in self.dest.lower() for word in _ASKED)


@dataclass(frozen=True)
class BeginsAnew:
    """What was found."""

    pattern: str  # where it saves, as `checkpoint.sealed` takes it; PLACE where nobody can say
    save: ast.Call  # the first save
    option: AskedOption | None  # the option with which it loads; None where nothing in it does

    def note(self, name: str) -> str:
        """What to tell its user."""
        saves = f"{name} saves its checkpoints (line {self.save.lineno})"
        anew = "after a preemption it begins at its first step again."
        option = self.option
        if option is None or not option.goes_on:
            only = f"loads one only with {option.name}, which is not given" if option else ""
            return (
                f"{saves} and {only or 'loads none at its start'}: {anew} "
                "Load the newest one at the start, or have hpctrain save and load: give model and "
                "optimizer to run.track, and loop over run.steps (`hpctrain help getting-started`)"
            )
        words = option.name if option.is_flag else f"{option.name} {{checkpoint}}"
        return (
            f"{saves} and resumes from one only with {option.name}, which is not given: {anew} "
            f"Add: --checkpoint {shlex.quote(self.pattern)} --resume-args={shlex.quote(words)}"
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
    under: list[AskedOption] = []
    starts_from_weights = False
    for load in program.loads:
        options = program.left_out_by(load, saves)
        if options is None and not program.is_of_weights(load):
            return None
        starts_from_weights |= options is None
        under += options or ()
    option = next((option for option in under if option.goes_on), next(iter(under), None))
    if starts_from_weights and (option is None or not option.goes_on):
        return None
    pattern = next((p for call in saves if (p := program.path(call))), PLACE)
    return BeginsAnew(pattern, saves[0], option)


def _is_named(name: str, does: Sequence[str], what: Sequence[str]) -> bool:
    name = _NO_LOAD.sub("", name.lower())
    return any(word in name for word in does) and any(word in name for word in what)


def _may_go_back(name: str) -> bool:
    """Whether a call of that whole name goes back, if it is made once: `checkpointer.load()`."""
    last = name.rpartition(".")[2].lower()
    return any(word in last for word in _AT_ONCE) or (
        any(word in last for word in _BACK) and _is_named(name, _BACK, _LOADED)
    )


@dataclass
class _Program:
    """A program's saves, loads and options."""

    tree: ast.Module
    args: Sequence[str]
    saves: list[ast.Call] = field(default_factory=list)
    loads: list[ast.expr] = field(default_factory=list)
    options: dict[str, AskedOption] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parents: dict[ast.AST, ast.AST] = {
            below: node for node in ast.walk(self.tree) for below in ast.iter_child_nodes(node)
        }
        self._calls: dict[str, list[ast.Call]] = {}
        self._functions: dict[str, _Function] = {}
        self._names_set: dict[str, list[ast.Name]] = {}
        self._attributes_set: set[str] = set()
        self._arguments = set(_ARGUMENTS)
        self._is_set_elsewhere = False  # any option may have its value from a file
        may_load: list[ast.Call] = []
        sets_options: list[ast.Call] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._names_set.setdefault(node.id, []).append(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._attributes_set.add(node.attr)
            elif isinstance(node, _Function):
                self._functions[node.name] = node
            elif isinstance(node, ast.Call):
                self._take(node)
                may_load += [node] if _may_go_back(ast.unparse(node.func)) else []
                sets_options += [node] if self._sets_any_option(node) else []
        self.loads += [call for call in may_load if not self.is_repeated(call)]
        self.saves = [call for call in self.saves if self._is_of_training(call)]
        self.saves.sort(key=lambda call: call.lineno)
        self.loads = [node for node in self.loads if not self._is_no_checkpoint(node)]
        self._is_set_elsewhere = any(self._left_out(call) is None for call in sets_options)

    def _take(self, call: ast.Call) -> None:
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        self._calls.setdefault(last, []).append(call)
        if last in {"add_argument", "option"}:
            self._take_option(call)
        elif last == "set_defaults":
            self._attributes_set |= {keyword.arg or "" for keyword in call.keywords}
        elif last in {"parse_args", "parse_known_args"}:
            target = getattr(self._parents[call], "targets", [call])[0]
            self._arguments |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
        elif name in {"torch.save", "dcp.save"} or _is_named(last, ("save",), _SAVED):
            self.saves.append(call)
        elif name in {"torch.load", "dcp.load"} or _is_named(last, _BACK, _LOADED):
            self.loads.append(call)
        for keyword in call.keywords:
            is_none = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in {"resume_from_checkpoint", "ckpt_path"} and not is_none:
                self.loads.append(keyword.value)

    def _sets_any_option(self, call: ast.Call) -> bool:
        """Whether a call gives the parsed arguments values that only another file knows."""
        name = ast.unparse(call.func)
        names = {keyword.arg for keyword in call.keywords}
        if name.endswith("set_defaults"):
            return None in names
        if name == "setattr":
            is_plain = len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
            return not is_plain and ast.unparse(call.args[0]) in self._arguments
        is_of_all = "vars(" in name or "__dict__" in name
        return (name.endswith(".update") and is_of_all) or bool(names & _OF_FILES)

    def _is_of_training(self, call: ast.Call) -> bool:
        """Whether a save writes what training resumes from, and not pieces of a data set."""
        name = ast.unparse(call.func).lower()
        if self._is_of_hook(call):
            return False
        if name != "torch.save":
            return not any(word in name for word in _OF_DATA)
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = [one for node in given for one in ast.walk(node) if isinstance(one, ast.Name)]
        followed = [value for one in names if (value := self._first_value(one.id)) is not None]
        words = " ".join(ast.unparse(one) for one in (*given, *followed)).lower()
        return any(word in words for word in _OF_TRAINING)

    def _is_of_hook(self, node: ast.AST | None) -> bool:
        """Whether a library calls it, which resumes by itself."""
        while node is not None and not isinstance(node, ast.ClassDef):
            node = self._parents.get(node)
        return node is not None and any("Hook" in ast.unparse(one) for one in node.bases)

    def _is_no_checkpoint(self, node: ast.expr) -> bool:
        """Whether what looks like a load reads data, copies a model, or is judged by its body."""
        if not isinstance(node, ast.Call):
            return False
        name = ast.unparse(node.func).lower()
        parent = self._parents.get(node)
        target = ast.unparse(parent.targets[0]) if isinstance(parent, ast.Assign) else ""
        given = ast.unparse(node).lower()
        if name == "torch.load" and any(word in f"{target} {given}" for word in _OF_DATA):
            return True
        if any(word in name for word in _ELSEWHERE) or given.endswith("state_dict())"):
            return True
        own = self._functions.get(ast.unparse(node.func).rpartition(".")[2])
        if own is None or node not in self._calls_of(own):
            return False
        inside = [ast.unparse(one.func) for one in ast.walk(own) if isinstance(one, ast.Call)]
        reads = any(word in one for one in inside for word in ("load", "restore", "read"))
        return not reads or any(one in self.loads and one is not node for one in ast.walk(own))

    def _take_option(self, call: ast.Call) -> None:
        names = [one.value for one in call.args if isinstance(one, ast.Constant)]
        long = [n for n in names if isinstance(n, str) and n.startswith("-")]
        if not long:
            return
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        name = max(long, key=len)
        dest = given.get("dest")
        name_of_value = str(
            dest.value if isinstance(dest, ast.Constant) else name.lstrip("-").replace("-", "_")
        )
        action = given.get("action")
        stores = str(action.value) if isinstance(action, ast.Constant) else ""
        is_flag = stores.startswith("store_") or "is_flag" in given
        default = _plain(given["default"]) if "default" in given else None
        if is_flag and default is None:
            default = stores == "store_false"
        if "required" in given or "default_factory" in given:
            default = _UNKNOWN
        self.options[name_of_value] = AskedOption(
            name, name_of_value, is_flag, default, tuple(long)
        )

    def left_out_by(
        self, node: ast.expr, saves: Sequence[ast.Call], depth: int = 0
    ) -> list[AskedOption] | None:
        """Return the options of the tests that keep a load from being reached before the saves.

        Returns:
            None if it may be reached. The list is empty if no option has to do with it.
        """
        if self._is_after(node, saves):
            return []
        if isinstance(node, ast.Call) and (asked := self._asked_inside(node)) is not None:
            return [asked]
        if not isinstance(node, ast.Call) and self._truth(node) is False:
            return self._options_in(node)
        below: ast.AST = node
        while (parent := self._parents.get(below)) is not None:
            if (test := self._test_before(parent, below)) is not None:
                return self._options_in(test)
            if isinstance(parent, _Function):
                calls = self._calls_of(parent) if depth < _FOLLOWED else []
                each = [self.left_out_by(call, saves, depth + 1) for call in calls]
                if each and None not in each:
                    return [option for options in each for option in options or ()]
            below = parent
        return None

    def _left_out(self, below: ast.AST) -> ast.expr | None:
        """Return the innermost test that leaves a node out, in its function."""
        while (parent := self._parents.get(below)) is not None:
            if (test := self._test_before(parent, below)) is not None:
                return test
            below = parent
        return None

    def is_of_weights(self, load: ast.expr) -> bool:
        """Whether a load reads what a given option names that does not say that it resumes."""
        asked: list[ast.AST] = [*ast.walk(load)]
        below: ast.AST = load
        while (parent := self._parents.get(below)) is not None:
            if isinstance(parent, ast.If | ast.IfExp) and below is not parent.test:
                test = parent.test
                asked += test.values if isinstance(test, ast.BoolOp) else [test]
            below = parent
        options = [option for one in asked if (option := self._option_of(one)) is not None]
        return any(not (o.is_flag or o.goes_on) and self._is_given(o) for o in options)

    def _calls_of(self, function: _Function) -> list[ast.Call]:
        is_method = isinstance(self._parents[function], ast.ClassDef)
        calls = self._calls.get(function.name, [])
        return [call for call in calls if isinstance(call.func, ast.Attribute) is is_method]

    def _test_before(self, parent: ast.AST, node: ast.AST) -> ast.expr | None:
        """Return the test of `parent` that is known and leaves `node` out."""
        if isinstance(parent, ast.If | ast.IfExp):
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            truth = self._truth(parent.test) if node is not parent.test else None
            # A load instead of the one that resumes reads weights to start from.
            instead = truth is False and any(
                load in ast.walk(one) for one in body for load in self.loads
            )
            left_out = truth is not None and truth is not (node in body)
            return parent.test if left_out or (instead and node not in body) else None
        for statement in getattr(parent, "body", ()) if isinstance(node, ast.stmt) else ():
            if statement is node:
                break
            ends = isinstance(statement, ast.If) and isinstance(statement.body[-1], _ENDS)
            if isinstance(statement, ast.If) and ends and self._truth(statement.test):
                return statement.test
        return None

    def _truth(self, test: ast.AST) -> bool | None:
        """Whether a test holds with the command line as it is; None where nobody can say."""
        if isinstance(test, ast.BoolOp):
            each = [self._truth(one) for one in test.values]
            decides = isinstance(test.op, ast.Or)
            if decides in each:
                return decides
            return None if None in each else not decides
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self._truth(test.operand)
            return None if truth is None else not truth
        if isinstance(test, ast.Compare):
            return self._truth_of_comparison(test)
        if isinstance(test, ast.Call) and ast.unparse(test.func).endswith(_IS_A_PATH):
            return False if any(self._value(one) in ("", None) for one in test.args) else None
        value = self._value(test)
        return None if value is _UNKNOWN else bool(value)

    def _truth_of_comparison(self, test: ast.Compare) -> bool | None:
        compare = _COMPARED.get(type(test.ops[0])) if len(test.ops) == 1 else None
        values = self._value(test.left), self._value(test.comparators[0])
        if compare is None or _UNKNOWN in values:
            return None
        try:
            return bool(compare(*values))
        except TypeError:
            return None

    def _value(self, node: ast.AST, depth: int = 0) -> object:
        """Return what an expression is with the command line as it is, or _UNKNOWN."""
        if (option := self._option_of(node)) is not None:
            is_set = isinstance(node, ast.Attribute) and option.dest in self._attributes_set
            is_known = not (is_set or self._is_set_elsewhere or self._is_given(option))
            return option.default if is_known else _UNKNOWN
        if isinstance(node, ast.Name):
            set_to = self._value_before(node)
            if self.args and "exec" in self._calls:  # nanoGPT's way to take options
                return _UNKNOWN
            return self._value(set_to, depth + 1) if set_to and depth < _FOLLOWED else _UNKNOWN
        if isinstance(node, ast.List | ast.Tuple):
            values = [self._value(one, depth) for one in node.elts]
            return _UNKNOWN if _UNKNOWN in values else values
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "len" and node.args:
            value = self._value(node.args[0], depth)
            return len(value) if isinstance(value, str | list | tuple) else _UNKNOWN
        return _plain(node)

    def _set_before(self, node: ast.Name) -> list[ast.Name]:
        """Return where a name's value may come from: its function before it, else the module."""
        scope = self._scope(node)
        stores = self._names_set.get(node.id, [])
        own = [one for one in stores if self._scope(one) is scope]
        if own or (isinstance(scope, _Function) and node.id in _parameters(scope)):
            return [one for one in own if one.lineno < node.lineno]
        return [one for one in stores if isinstance(self._scope(one), ast.Module)]

    def _value_before(self, node: ast.Name) -> ast.expr | None:
        """Return what a name was set to, where that is one plain assignment."""
        stores = self._set_before(node)
        parent = self._parents[stores[0]] if len(stores) == 1 else None
        if isinstance(parent, ast.Assign) and parent.targets == stores:
            return parent.value
        return None

    def _first_value(self, name: str) -> ast.expr | None:
        for store in self._names_set.get(name, []):
            parent = self._parents[store]
            if isinstance(parent, ast.Assign):
                return parent.value
        return None

    def _option_of(self, node: ast.AST) -> AskedOption | None:
        """Return the option that an expression reads: `args.resume`, or a name without a value."""
        if isinstance(node, ast.Name):
            return None if self._set_before(node) else self.options.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if ast.unparse(node.value).rpartition(".")[2] not in self._arguments:
            return None
        if node.attr in _USUAL_OPTIONS and node.attr not in self.options:
            name = f"--{node.attr}"
            both = (name, name.replace("_", "-"))
            return AskedOption(name, node.attr, is_flag=False, default=None, spellings=both)
        return self.options.get(node.attr)

    def _options_in(self, test: ast.AST) -> list[AskedOption]:
        names = [one for one in ast.walk(test) if isinstance(one, ast.Name)]
        followed = [value for one in names if (value := self._value_before(one)) is not None]
        each = (self._option_of(one) for one in (*ast.walk(test), *followed))
        return [option for option in each if option is not None]

    def _asked_inside(self, call: ast.Call) -> AskedOption | None:
        """Return the option that a helper of another module asks, which has all of them."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if not any(isinstance(one, ast.Name) and one.id in self._arguments for one in given):
            return None
        if "auto" in ast.unparse(call.func) or ast.unparse(call.func) in self._functions:
            return None
        asks = (o for o in self.options.values() if "resume" in o.dest and not o.default)
        option = next(asks, None)
        return None if option is None or self._is_given(option) else option

    def is_repeated(self, node: ast.AST) -> bool:
        """Whether a call stands in a loop, or in a function that is called in one."""
        return next(self._loops(node), None) is not None

    def _loops(self, node: ast.AST, depth: int = 0) -> Iterator[ast.stmt | ast.expr]:
        """Yield the loop around a call, then what calls the function in which that stands."""
        while (parent := self._parents.get(node)) is not None:
            if isinstance(parent, ast.For | ast.While):
                yield parent
                yield from self._callers(parent)
                return
            if isinstance(parent, _Function):
                for call in self._calls_of(parent) if depth < _FOLLOWED - 1 else ():
                    yield from self._loops(call, depth + 1)
                return
            node = parent

    def _callers(self, node: ast.AST, depth: int = 0) -> Iterator[ast.expr]:
        scope = self._scope(node)
        if isinstance(scope, _Function) and depth < _FOLLOWED:
            for call in self._calls_of(scope):
                yield call
                yield from self._callers(call, depth + 1)

    def _scope(self, node: ast.AST) -> ast.AST:
        while (parent := self._parents.get(node)) is not None:
            node = parent
            if isinstance(node, _Function):
                break
        return node

    def _is_after(self, node: ast.expr, saves: Sequence[ast.Call]) -> bool:
        """Whether a load comes only when the loops that save have ended."""
        scope = self._scope(node)
        for save in saves:
            loops = [one for one in self._loops(save) if self._scope(one) is scope]
            ends = [one.end_lineno or one.lineno for one in loops]
            if not ends or max(ends) >= node.lineno:
                return False
        return True

    def _is_given(self, option: AskedOption) -> bool:
        """Whether an argument names it: all of it, how it begins, or a letter with its value."""
        heads = (word.partition("=")[0] for word in self.args if word.strip("-"))
        return any(
            one.startswith(head) if head.startswith("--") else head.startswith(one)
            for head in heads
            for one in option.spellings
        )

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
        elif (template := _template(node)) is not None:
            yield from (_FIELD.sub("*", part) for part in self._texts(template, depth + 1))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
            yield from self._texts(node.left, depth + 1)
            yield "/" if isinstance(node.op, ast.Div) else ""
            yield from self._texts(node.right, depth + 1)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("path.join", "Path")):
            for number, part in enumerate(node.args):
                yield "/" if number else ""
                yield from self._texts(part, depth + 1)
        elif isinstance(node, ast.Name):
            value = self._first_value(node.id) if depth < _FOLLOWED else None
            default = self._default_of(node) or "*"
            yield from [default] if value is None else self._texts(value, depth + 1)
        elif isinstance(node, ast.Attribute) and node.attr in self.options:
            yield self._text_of(self.options[node.attr])
        else:
            yield "*"

    def _default_of(self, name: ast.Name) -> str | None:
        """Return the default of a parameter of the function in which a name stands."""
        scope = self._scope(name)
        if isinstance(scope, _Function):
            own = zip(reversed(scope.args.args), reversed(scope.args.defaults), strict=False)
            for parameter, default in own:
                if parameter.arg == name.id and isinstance(default, ast.Constant):
                    return str(default.value) if default.value else None
        return None

    def _text_of(self, option: AskedOption) -> str:
        """Return what an option has on the command line, else its default, else a wildcard."""
        for number, word in enumerate(self.args):
            name, is_joined, value = word.partition("=")
            if name in option.spellings and is_joined:
                return value
            if name in option.spellings and number + 1 < len(self.args):
                return self.args[number + 1]
        return option.default if isinstance(option.default, str) and option.default else "*"


def _plain(node: ast.AST) -> object:
    """Return the value of a literal, or _UNKNOWN."""
    try:
        return ast.literal_eval(node) if isinstance(node, ast.expr) else _UNKNOWN
    except (ValueError, TypeError, RecursionError):
        return _UNKNOWN


def _template(node: ast.AST) -> ast.expr | None:
    """Return the text that `%` or `format` fills, if a node is one of these."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return node.left
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr == "format" else None
    return None


def _parameters(function: _Function) -> list[str]:
    given = function.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
