"""What is seen in the source of the program that is submitted, without running any of it.

`lint_notes`: what `hpctrain lint` says of it, and whether it saves checkpoints and does not go on
from them. `refuse_absent`: whether the ranks' Python has what it imports, before a job waits for
hours for it. `imports_of` reads the imports, through the program's own files; `hpctrain check`
imports those of others. tests/unit/submit/test_program_lint.py and test_imports.py hold the
promises.
"""

from __future__ import annotations

import ast
import os
import shlex
import sys
import warnings
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import ChecksFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.lint.rule import LintFinding
    from hpctrain.settings.schema import Settings
    from hpctrain.settings.spec import Entry

MOST_BYTES = 256 << 10
"""Of a program that is looked at: about 6,000 lines, which take a third of a second at most."""
MOST_SHOWN = 2
"""Errors that are shown whole."""
GOES_ON = "HT608"
"""Lint's rule on programs that begin anew; where the command line is known it is asked with it."""
_PYTHON = frozenset({"script", "module"})
AT_SUBMIT = 40
"""Of a program's own files, so many are read before it is queued."""
MOST_FILES = 300
"""Of a program's own that are read: one that generates code may have thousands."""
_GUARDS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_ENDINGS = (".py", ".pyc")


def lint_notes(entry: Entry, settings: Settings, cwd: Path) -> list[str]:
    """A few lines on what would hang or go wrong; none where nothing does, or nobody wants any.

    Args:
        entry: What the ranks run; looked at where it is a file of Python.
        settings: With `run.lint`, and the CPUs of a rank.
        cwd: Where `submit` was called: paths are shown as seen from there.
    """
    if not settings.run.lint or entry.kind not in _PYTHON or not entry.path:
        return []
    from hpctrain.lint.check import RuleChoice, check_text
    from hpctrain.lint.folder import LintFolder
    from hpctrain.lint.source import NotText, read_source

    path = Path(entry.path)
    name = os.path.relpath(path, cwd) if path.is_relative_to(cwd) else str(path)
    try:
        text = read_source(path)
    except NotText as error:
        return [f"lint has passed over {name}: it {error}"]
    if len(text) > MOST_BYTES:
        return [f"lint has passed over {name}, which is long: hpctrain lint {shlex.quote(name)}"]
    without = RuleChoice(ignore=(GOES_ON,))
    folder = LintFolder(path.parent, is_whole=False)
    cpus = settings.slurm.cpus_per_rank or None
    notes = _told(check_text(text, name, without, cpus=cpus, folder=folder), name)
    if not settings.run.resume_args and not settings.checkpoint.sealed:
        from hpctrain.lint.begins_anew import begins_anew

        anew = begins_anew(text, entry.args)
        notes += [anew.note(name)] if anew else []
    return notes


def hears_requests(entry: Entry) -> bool:
    """Whether the program is known to use hpctrain, so that `hpctrain cancel --save` reaches it."""
    if entry.kind not in _PYTHON or not entry.path:
        return entry.kind == "recipe"
    from hpctrain.lint.source import NotText, read_source

    try:
        return "hpctrain" in read_source(Path(entry.path))
    except NotText:
        return False


def _told(findings: list[LintFinding], name: str) -> list[str]:
    """The first errors whole, the others as numbers."""
    from hpctrain.base.text import count

    errors = [one for one in findings if one.rule.level == "error"]
    warnings = sum(one.rule.level == "warning" for one in findings)
    if not errors and not warnings:
        return []
    notes = [
        f"lint: {name}:{one.line} {one.rule.code} {one.message}" for one in errors[:MOST_SHOWN]
    ]
    more = len(errors) - len(notes)
    parts = [count(more, "more error")] if more else []
    parts += [count(warnings, "warning")] if warnings else []
    said = f"{' and '.join(parts)} in {name}: " if parts else ""
    return [*notes, f"lint: {said}hpctrain lint {shlex.quote(name)} tells why and what instead"]


# ---- what it imports


@dataclass(frozen=True)
class WantedImport:
    """A module that is imported.

    Attributes:
        module: Its whole name.
        names: What is taken from it.
        path: The file that wants it.
        line: There.
        is_sure: It is imported as soon as the program starts; else inside a function, or under a
            condition.
    """

    module: str
    names: tuple[str, ...]
    path: str
    line: int
    is_sure: bool


@dataclass
class ProgramImports:
    """What a program imports.

    Attributes:
        others: Modules that do not lie beside the program.
        missing: Modules of the program's own folder that are not there.
        files: How many files were read.
        is_whole: Whether all of its own files were.
    """

    others: list[WantedImport] = field(default_factory=list)
    missing: list[WantedImport] = field(default_factory=list)
    files: int = 0
    is_whole: bool = True

    @property
    def knows_hpctrain(self) -> bool:
        """Whether it is one that calls hpctrain itself."""
        return any(one.module.partition(".")[0] == "hpctrain" for one in self.others)


def own_folders(entry: Entry) -> list[Path]:
    """Where a program's own modules lie."""
    beside = [] if entry.kind == "module" else [str(Path(entry.path).parent)]
    return [Path(one) for one in dict.fromkeys([*beside, *entry.python_path])]


def refuse_absent(entry: Entry, more: Sequence[str], *, brought: bool) -> list[str]:
    """Refuse a program that imports, as soon as it starts, what this Python has nowhere.

    A program that changes its `sys.path` is not judged.

    Args:
        entry: What the ranks run, with this Python.
        more: Folders that their PYTHONPATH has besides.
        brought: The job loads modules or runs lines of its own first, which may bring it: then it
            is a note.

    Raises:
        ChecksFailed: it would end at once, with what to do.
    """
    if entry.kind not in _PYTHON or not entry.path:
        return []
    folders = own_folders(entry)
    places = [str(folder) for folder in (*folders, *more)]
    wanted = imports_of(Path(entry.path), folders, most=AT_SUBMIT).others
    judged = [one for one in wanted if one.is_sure and not _is_there(one.module, places)]
    absent = [one for one in judged if not _finds_its_own(entry.path, one.path)]
    if not absent:
        return []
    first, top = absent[0], absent[0].module.partition(".")[0]
    others = sorted({one.module.partition(".")[0] for one in absent} - {top})
    also = f" (nor {', '.join(others)})" if others else ""
    message = f"{first.path}:{first.line} imports {top}, which {sys.executable} does not have{also}"
    if brought:
        return [f"{message}: every rank ends there unless the job's modules or setup bring it"]
    raise ChecksFailed(
        f"{message}: every rank would end there. Install it: {sys.executable} -m pip install "
        f"{' '.join([top, *others])}; or name its folder: --env PYTHONPATH=FOLDER"
    )


def _is_there(module: str, places: Sequence[str]) -> bool:
    """Whether a module's first part can be found; finders may know what no folder has."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or PathFinder.find_spec(top, places) is not None:
        return True
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError, AttributeError):
        return True  # a finder that is broken: nobody can say


def _finds_its_own(*paths: str) -> bool:
    """Whether one of these files says itself where modules lie."""
    return any(
        b"sys.path" in (text := Path(p).read_bytes()) or b"addsitedir" in text for p in paths
    )


def imports_of(path: Path, folders: Sequence[Path], most: int = MOST_FILES) -> ProgramImports:
    """Follow a program's imports through its own files.

    Args:
        path: The program.
        folders: Where its own modules lie, the first first.
        most: So many files are read.
    """
    imports = ProgramImports()
    waiting, seen = [path], {path}
    while waiting:
        if imports.files == most:
            imports.is_whole = False
            break
        file = waiting.pop()
        imports.files += 1
        for wanted in _read(file, folders):
            parts = _own(wanted.module, folders)
            if parts is None:
                imports.others.append(wanted)
                continue
            own = [one for one in parts if one is not None]
            if len(own) < len(parts):
                imports.missing.append(wanted)
            beneath = [_inside(own[-1], name) for name in wanted.names] if own else []
            for place in [*own, *(sub for sub in beneath if sub is not None)]:
                source = place / "__init__.py" if place.is_dir() else place
                if source.suffix == ".py" and source.is_file() and source not in seen:
                    seen.add(source)
                    waiting.append(source)
    return imports


def _read(path: Path, folders: Sequence[Path]) -> Iterator[WantedImport]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the program's own text is checked by submit, and a module's by who imports it
    yield from _in(tree.body, path, _package(path, folders), sure=True)


def _in(body: list[ast.stmt], path: Path, package: str, *, sure: bool) -> Iterator[WantedImport]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield WantedImport(alias.name, (), str(path), node.lineno, sure)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            if module and module != "__future__":
                names = tuple(alias.name for alias in node.names if alias.name != "*")
                yield WantedImport(module, names, str(path), node.lineno, sure)
        elif isinstance(node, ast.Try) and any(_is_guard(one) for one in node.handlers):
            yield from _in(node.finalbody, path, package, sure=sure)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _in(node.orelse, path, package, sure=sure)
        else:
            inner = sure and isinstance(node, ast.With | ast.Try | ast.ClassDef)
            for block in _blocks(node):
                yield from _in(block, path, package, sure=inner)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statements inside one."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield handler.body


def _is_guard(handler: ast.ExceptHandler) -> bool:
    """Whether the program can do without what cannot be imported."""
    if handler.type is None:
        return True
    return any(isinstance(node, ast.Name) and node.id in _GUARDS for node in ast.walk(handler.type))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module's whole name, "" where it has none here."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return ""
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _package(path: Path, folders: Sequence[Path]) -> str:
    """The package that a file is part of, "" for none."""
    for folder in folders:
        if path.is_relative_to(folder):
            return ".".join(path.relative_to(folder).parent.parts)
    return ""


def _own(module: str, folders: Sequence[Path]) -> list[Path | None] | None:
    """Files of each part of a module's name, None for a missing one; None where it is others'."""
    first, *rest = module.split(".")
    for folder in folders:
        top = _inside(folder, first)
        if top is None:
            continue
        if top.is_dir() and not (top / "__init__.py").exists() and not any(top.glob("*.py")):
            continue  # a folder of data that has a module's name
        parts: list[Path | None] = [top]
        for name in rest:
            above = parts[-1]
            if above is None or not above.is_dir():
                return parts if above is not None and above.suffix != ".py" else [*parts, None]
            parts.append(_inside(above, name))
        if None in parts and not (top / "__init__.py").exists():
            return None  # an installed package comes before a folder that only has its name
        return parts
    return None


def _inside(folder: Path, name: str) -> Path | None:
    """The file or folder of a module in a folder."""
    if not folder.is_dir():
        return None
    for ending in _ENDINGS:
        if (folder / f"{name}{ending}").is_file():
            return folder / f"{name}{ending}"
    if (folder / name).is_dir():
        return folder / name
    return next(iter(folder.glob(f"{name}.*.so")), None) or next(
        iter(folder.glob(f"{name}.so")), None
    )
