"""Which modules a program imports, without running any of it.

Its own modules are read as well, and never imported: whatever stands in them would run. Tried are
those of others, which `import_probe` imports. tests/unit/check/test_imports.py holds the promises.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MOST_FILES = 300
"""Of a program's own that are read: one that generates code may have thousands."""
_GUARDS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_ENDINGS = (".py", ".pyc")


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


def imports_of(path: Path, folders: Sequence[Path]) -> ProgramImports:
    """Follow a program's imports through its own files.

    Args:
        path: The program.
        folders: Where its own modules lie, the first first.
    """
    imports = ProgramImports()
    waiting, seen = [path], {path}
    while waiting:
        if imports.files == MOST_FILES:
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
