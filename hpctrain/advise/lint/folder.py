"""The files of a checked folder: which collectives their functions make, and what they name.

Of each module a summary is kept and its syntax tree forgotten, so that a large folder takes little
memory. Links to folders are not followed, so that no circle of them is walked.
tests/unit/lint/test_folder.py and test_files.py hold the promises.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.lint.collectives import CollectiveCall, CollectiveCalls, always_comes_to
from hpctrain.advise.lint.syntax import NotPython, ProgramSyntax
from hpctrain.core.base.files import NotText, read_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PASSED_OVER = frozenset(
    {"__pycache__", "build", "dist", "env", "node_modules", "site-packages", "venv", "virtualenv"}
)
_LAUNCHERS = (".py", ".sh", ".sbatch", ".slurm", ".bash", ".yml", ".yaml")
_NAMING = re.compile(r"deepspeed|ds_config|\bconfig(?:_params)?\s*=", re.IGNORECASE)
_JSON = re.compile(r"(?<![\w.-])([\w.-]{1,255}\.json)\b")
_LOADS = re.compile(r"_?(?:load|restore|resume)\w{0,40}?(?:checkpoint|ckpt|snapshot)")
_MOST_LAUNCHERS = 5_000
"""Files that are searched for names of configurations: a limit for folders such as a home."""
_MOST_CALLS = 5
"""Functions through which a collective is followed."""


@dataclass
class ModuleSummary:
    """What other modules need to know of one."""

    path: Path
    imports: dict[str, str] = field(default_factory=dict)
    starred: list[str] = field(default_factory=list)
    direct: dict[str, CollectiveCall | None] = field(default_factory=dict)
    """The collective of each function, as far as it was looked for."""
    calls: dict[str, list[tuple[str, int, bool]]] = field(default_factory=dict)
    """Of each function the functions that it calls, their lines, and whether it always does."""
    mentions_set_epoch: bool = False
    loads_checkpoints: bool = False
    """Whether a function of it says by its name that it loads one."""


class LintFolder:
    """A folder, or the folder of one file, whose files are checked together."""

    def __init__(self, root: str | Path, *, is_whole: bool = True) -> None:
        """Begin with a folder of which nothing is read yet.

        Unless `is_whole`, only files directly in it belong together.
        """
        self.root = Path(root).absolute()
        self.is_whole = is_whole
        self._modules: dict[Path, ModuleSummary | None] = {}
        self._places: dict[Path, Path | None] = {}

    def collective_of(self, path: str | Path, dotted: str, depth: int = 0) -> CollectiveCall | None:
        """Return the collective that a function of the folder makes.

        `dotted` is its name as the file `path`, which calls it, imports it. `depth` functions were
        followed so far.
        """
        module, names = self._module_of(Path(path).absolute(), dotted)
        if module is None or len(names) != 1 or depth > _MOST_CALLS:
            return None
        return self._made_in(module, names[0], depth)

    def module_of(self, path: str | Path, dotted: str) -> ModuleSummary | None:
        """Return the module of the folder from which a file imports a name."""
        return self._module_of(Path(path).absolute(), dotted)[0]

    def learn(self, syntax: ProgramSyntax) -> None:
        """Keep the summary of a program that was read anyway."""
        path = Path(syntax.path).absolute()
        if path not in self._modules:
            self._modules[path] = _summary(path, syntax)

    def _made_in(self, module: ModuleSummary, name: str, depth: int) -> CollectiveCall | None:
        if name in module.direct:
            return module.direct[name]
        result: CollectiveCall | None = None
        module.direct[name] = None  # under way: a function may call itself through others
        origins = [(module.imports[name], 0, True)] if name in module.imports else []
        origins += [(f"{origin}.{name}", 0, True) for origin in module.starred]
        for dotted, line, certain in module.calls.get(name, origins):
            if "." in dotted:
                inner = self.collective_of(module.path, dotted, depth + 1)
            else:
                inner = self._made_in(module, dotted, depth + 1)
            if inner is not None and (result is None or not result.is_certain):
                result = CollectiveCall(
                    inner.name, line=line or inner.line, is_certain=certain and inner.is_certain
                )
        module.direct[name] = result
        return result

    def _module_of(self, path: Path, dotted: str) -> tuple[ModuleSummary | None, list[str]]:
        """Return the module that a name begins with, and the names behind it."""
        if not dotted or dotted.endswith("."):
            return None, []
        level = len(dotted) - len(dotted.lstrip("."))
        parts = dotted.lstrip(".").split(".")
        bases = [path.parents[level - 1]] if 0 < level <= len(path.parents) else []
        if not level:  # the file's own folder, and those around it
            around = [one for one in path.parent.parents if one.is_relative_to(self.root)]
            bases = [path.parent, *around, self.root / "src"]
        for base in bases:
            for number in range(len(parts), 0, -1):
                place = self._place(base.joinpath(*parts[:number]))
                if place is not None:
                    return self._module(place), parts[number:]
        return None, []

    def _place(self, stem: Path) -> Path | None:
        """Return the file of a module inside the folder."""
        if stem not in self._places:
            candidates = (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
            inside = stem.is_relative_to(self.root)
            result = (one for one in candidates if inside and one.is_file())
            self._places[stem] = next(result, None)
        return self._places[stem]

    def _module(self, path: Path) -> ModuleSummary | None:
        if path not in self._modules:
            try:
                self._modules[path] = _summary(path, ProgramSyntax(read_source(path), str(path)))
            except (NotPython, NotText, RecursionError):
                self._modules[path] = None
        return self._modules[path]

    def names(self, path: str | Path) -> bool:
        """Return whether a program or launcher of the folder gives this JSON file to DeepSpeed."""
        return Path(path).name in self._named

    @cached_property
    def _named(self) -> frozenset[str]:
        files = walk_files(self.root, is_whole=self.is_whole)
        launchers = islice((one for one in files if one.name.endswith(_LAUNCHERS)), _MOST_LAUNCHERS)
        return frozenset(name for path in launchers for name in _named_in(path))


def walk_files(
    folder: Path, say: Callable[[str], None] = lambda _: None, *, is_whole: bool = True
) -> Iterator[Path]:
    """Yield the files of a folder in order; unless `is_whole`, only those directly in it."""

    def passed_over(error: OSError) -> None:
        say(f"{error.filename} is passed over: {error.strerror}")

    for root, folders, files in os.walk(folder, onerror=passed_over):
        inner = [one for one in folders if not one.startswith(".") and one not in PASSED_OVER]
        folders[:] = sorted(inner) if is_whole else []
        yield from (Path(root, name) for name in sorted(files))


def _summary(path: Path, syntax: ProgramSyntax) -> ModuleSummary:
    """Summarize a module: its functions, and what each calls."""
    module = ModuleSummary(path, syntax.imports, syntax.starred)
    module.mentions_set_epoch = "set_epoch" in syntax.text
    module.loads_checkpoints = any(_LOADS.match(name) for name in syntax.functions)
    direct = CollectiveCalls(syntax).direct
    for name, scopes in syntax.functions.items():
        plain = [one for one in scopes if not one.owner and one.outer is syntax.scopes[0]]
        if len(plain) != 1:
            continue
        calls = module.calls.setdefault(name, [])
        for call in plain[0].of(ast.Call):
            made = direct.get(call)
            certain = always_comes_to(syntax, call, direct) and (made is None or made.is_certain)
            earlier = module.direct.get(name)
            if made is not None and (earlier is None or not earlier.is_certain):
                module.direct[name] = CollectiveCall(
                    made.name, line=call.lineno, is_certain=certain
                )
            dotted = syntax.dotted(call.func)
            if dotted and (dotted in syntax.functions or syntax.is_imported(call.func)):
                calls.append((dotted, call.lineno, certain))
    return module


def _named_in(path: Path) -> set[str]:
    """Return names of JSON files on lines that speak of DeepSpeed."""
    try:
        text = read_source(path)
    except NotText:
        return set()
    if "deepspeed" not in text.lower() or ".json" not in text:
        return set()
    lines = text.replace("\\\n", " ").split("\n")
    return {name for line in lines if _NAMING.search(line) for name in _JSON.findall(line)}
