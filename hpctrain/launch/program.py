"""Find out what stands behind `--`, and read its source; nothing of the user's is imported or run.

A Python script or module runs in the rank itself, forked with torch imported; other programs are
started by their rank (`agent/foreign.py`); a launcher's command gives its program (`launchers.py`).
A file's first bytes decide, not its name. A leading `python` is removed.

`refuse_absent` refuses imports that the ranks' Python lacks, read through the program's own files
by `imports_of`.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base.files import NotText, absolute, read_source
from hpctrain.core.settings.layers import nearest
from hpctrain.core.settings.spec import Entry
from hpctrain.errors import ChecksFailed, NotFound, UsageError
from hpctrain.launch.launchers import MODULES, AskedCount, inside, launchers, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_PYTHON = re.compile(r"python[0-9.]*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
SHELLS = frozenset({"bash", "sh", "dash", "ksh", "zsh"})
_WITHOUT_EFFECT = frozenset({"-u", "-q"})
"""Options of Python that change nothing for a rank: its output is written line by line anyway."""
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class NamedProgram:
    """What the ranks are to run.

    `env` and `asked` are what launchers would have set and were given, with the words that said so;
    `notes` are for the user.
    """

    entry: Entry
    env: dict[str, tuple[str, str]] = field(default_factory=dict)
    asked: list[AskedCount] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_program(
    command: Sequence[str], cwd: Path, environ: Mapping[str, str], *, inside: bool = False
) -> NamedProgram:
    """Find out what is to run.

    `command` stands behind `--` and is not empty. `inside`: the ranks run in an image, whose
    commands and installed modules are not known here.

    Raises:
        NotFound: there is no such file, module or command.
        UsageError: it is there, and cannot run.
    """
    named = NamedProgram(Entry(kind="recipe"))
    words, local_rank, is_final = list(command), "", False
    while not is_final:
        launched = unwrap(words)
        if launched is not None:
            named.notes.extend([*launched.notes, *_unread_config(words, environ)])
            words, is_final, local_rank = launched.command, launched.is_final, launched.local_rank
            named.env.update(launched.env)
            named.asked.extend(launched.asked)
        elif (rest := _without_python(words, cwd, environ, inside=inside)) is not None:
            is_final = unwrap(rest) is None
            if is_final:
                what = " ".join(rest[:2]) if rest[0] == "-m" else rest[0]
                named.notes.append(
                    f"{words[0]} is left out: the ranks are Python already, and run {what}"
                )
            words = rest
        else:
            is_final = True
    if words[0] == "-m":
        entry = _module(words[1:], cwd, inside=inside)
    elif inside and "/" not in words[0] and not (cwd / words[0]).exists():
        entry = Entry(kind="program", path=words[0], args=words[1:])
    else:
        entry = _file(words, cwd, environ)
    entry = replace(entry, cwd=str(cwd), local_rank=local_rank)
    named.notes.extend(_inner_launcher(entry))
    return replace(named, entry=entry)


def is_python(word: str) -> bool:
    """Whether a command is a Python interpreter, by its name."""
    return _PYTHON.fullmatch(Path(word).name) is not None


def _without_python(
    words: list[str], cwd: Path, environ: Mapping[str, str], *, inside: bool
) -> list[str] | None:
    """The script or `-m MODULE` that this run's own interpreter is asked to run, with arguments.

    None where it is another interpreter, or is asked for something that a rank that runs already
    cannot be (`-O`, `-X dev`): then it is started like any other program.
    """
    if not is_python(words[0]):
        return None
    if not (inside and "/" not in words[0]) and not _is_ours(words[0], cwd, environ):
        return None
    rest = words[1:]
    while rest and rest[0] in _WITHOUT_EFFECT:
        rest = rest[1:]
    if not rest or rest[0] == "-":
        raise UsageError(f"-- {' '.join(words)}: name the script behind it, e.g. -- train.py")
    if rest[0] == "-m" or not rest[0].startswith("-"):
        return rest
    return None


def _is_ours(word: str, cwd: Path, environ: Mapping[str, str]) -> bool:
    """Whether a command means the interpreter of this environment, under any of its names."""
    path = str(cwd / word) if "/" in word else shutil.which(word, path=environ.get("PATH", ""))
    if path is None:
        return True  # as in a shell that has not activated what hpctrain runs in
    theirs, ours = Path(path), Path(sys.executable)
    same_folder = os.path.realpath(theirs.parent) == os.path.realpath(ours.parent)
    return same_folder and os.path.realpath(theirs) == os.path.realpath(ours)


def _unread_config(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What `accelerate config` wrote, which `accelerate launch` reads unasked."""
    name = words[1] if words[0] == "-m" else Path(words[0]).name
    if name not in {"accelerate", "accelerate-launch", "accelerate.commands.launch"}:
        return []
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    folder = Path(environ.get("HF_HOME") or f"{cache}/huggingface", "accelerate")
    there = [path for path in sorted(folder.glob("default_config.*")) if path.is_file()]
    read = "accelerate launch would read {}, and hpctrain does not: give what stands there as "
    instead = "options before the script (--mixed_precision bf16), or with --env"
    return [read.format(path) + instead for path in there[-1:]]


# ---- modules


def _module(words: Sequence[str], cwd: Path, *, inside: bool) -> Entry:
    if not words:
        raise UsageError("-- -m: name the module, e.g. -- -m package.train")
    from hpctrain.launch.snapshot import import_path

    name, args = words[0], list(words[1:])
    try:
        path = str(_find_module(name, [str(cwd), *import_path()]))
    except NotFound:
        if not inside:
            raise
        path = ""  # the image's
    return Entry(kind="module", module=name, path=path, args=args, python_path=[str(cwd)])


def _find_module(name: str, folders: Sequence[str]) -> Path:
    """The file that `python -m NAME` would run, without importing the packages above it."""
    if _MODULE.fullmatch(name) is None:
        hint = f"; a file is named without -m: -- {name}" if name.endswith(".py") else ""
        raise UsageError(f"-- -m {name}: {name!r} is not the name of a module{hint}")
    spec, places, walked = None, list(folders), []
    for part in name.split("."):
        walked.append(part)
        spec = _find(part, places, top=len(walked) == 1)
        if spec is None:
            shown = ".".join(walked)
            raise NotFound(f"-- -m {name}: no module {shown} in {_shown(places)}")
        places = list(spec.submodule_search_locations or [])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find("__main__", places, top=False)
        if spec is None:
            raise UsageError(
                f"-- -m {name}: {name} is a package without a __main__.py, and cannot be run; "
                f"name a module in it, e.g. -- -m {name}.train"
            )
    if spec is None or not spec.has_location or spec.origin is None:
        raise UsageError(f"-- -m {name}: {name} is part of Python itself, and no file")
    return Path(spec.origin).absolute()


def _find(part: str, places: Sequence[str], *, top: bool) -> ModuleSpec | None:
    """A part of a module's name. Finders of editable installs know top-level names only."""
    spec = PathFinder.find_spec(part, places)
    if spec is None and top:
        with suppress(ImportError, ValueError, AttributeError):
            spec = find_spec(part)
    return spec


def _shown(places: Sequence[str]) -> str:
    return f"{places[0]} and what can be imported" if len(places) > 1 else ", ".join(places)


# ---- files


def _file(words: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> Entry:
    word, *args = words
    path = _locate(word, cwd, environ)
    if path.name in SHELLS and args and not args[0].startswith(("-", "/")):
        _locate(args[0], cwd, environ)  # an absolute one may be in a container alone
    kind = "program" if _is_program(word, path) or _is_of_others(path, cwd, environ) else "script"
    return Entry(kind=kind, path=str(path), args=args)


def _locate(word: str, cwd: Path, environ: Mapping[str, str]) -> Path:
    """The file that a word means: one of this folder, else a command on PATH."""
    path = absolute(cwd, word)
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # a name that no file can have
        raise NotFound(f"script {word} cannot be there: {error.strerror}") from None
    if is_folder:
        raise UsageError(f"{word} is a folder; name the script behind --, e.g. -- {word}/train.py")
    if not is_there:
        on_path = None if "/" in word else shutil.which(word, path=environ.get("PATH", ""))
        if on_path is not None:
            return Path(on_path).absolute()
        raise NotFound(f"script {word} is not there; {_hint(path)}")
    if not stat.S_ISREG(path.stat().st_mode):
        raise UsageError(f"{word} is neither a script nor a program: it is no regular file")
    if not os.access(path, os.R_OK) and not os.access(path, os.X_OK):
        raise UsageError(f"script {word} cannot be read; check its permissions")
    return path


def _inner_launcher(entry: Entry) -> list[str]:
    """Whether a program is, or calls, a launcher: each rank would start ranks of its own."""
    if entry.kind != "program":
        return []
    path, words = Path(entry.path), [word for word in entry.args if not word.startswith("-")]
    is_shell = path.name in SHELLS
    if is_shell and any(re.fullmatch("-[a-z]*c", word) for word in entry.args):
        call = inside(words[0]) if words else None
        return [] if call is None else [_nested(f"{path.name} -c", call[0])]
    script = Path(entry.cwd, words[0]) if is_shell and words else path
    with suppress(OSError, ValueError):
        if script.is_file() and (is_shell or script.read_bytes()[:2] == b"#!"):
            call = inside(script.read_text(errors="replace"))
            if call is not None:
                return [_nested(f"{script.name} line {call[1]}", call[0])]
    if is_shell:
        return []
    pairs = zip(words, [*words[1:], ""], strict=False)
    named = (name for one, after in pairs for name in (Path(one).name, f"{one} {after}"))
    nested = next((name for name in named if name in launchers() or name in MODULES), "")
    return [_nested(path.name, nested)] if nested else []


def _nested(where: str, launcher: str) -> str:
    return (
        f"{where} calls {launcher}, which would start ranks of its own in each rank: call the "
        "program itself there, or start one rank per node for it"
    )


def _hint(path: Path) -> str:
    folder = path.parent
    near = nearest(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else []
    return f"did you mean {near[0]}?" if near else f"looked in {folder}"


def _is_program(word: str, path: Path) -> bool:
    """Whether a file is to be executed; False for Python that a rank runs itself."""
    can_run = os.access(path, os.X_OK)
    if not os.access(path, os.R_OK):
        return can_run
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    what = _by_first_bytes(head)
    if what in {"", "Python"}:
        if why := _not_python(path):
            way = "; a script of another language begins with #!" if not what else ""
            raise UsageError(f"{word} is no Python: {why}{way}")
        return False
    if not can_run:
        by_hand = "" if what == "a program" else f", or name what runs it: -- bash {word}"
        raise UsageError(f"{word} is {what}, and not executable: chmod +x {word}{by_hand}")
    return True


def _is_of_others(path: Path, cwd: Path, environ: Mapping[str, str]) -> bool:
    """Whether it is a command that another environment installed, such as conda or poetry."""
    with path.open("rb") as file:
        head = file.readline(_HEAD_BYTES)
    python = os.fsdecode(head[2:]).strip() if head.startswith(b"#!/") else ""
    is_beside = os.path.dirname(python) == os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    return is_beside and os.access(path, os.X_OK) and not _is_ours(python, cwd, environ)


def _by_first_bytes(head: bytes) -> str:
    """What a file is: "Python", "a program" or "a script for NAME"; "" where they do not tell."""
    if head.startswith(b"\x7fELF"):
        return "a program"
    if not head.startswith(b"#!"):
        return ""
    words = [Path(word).name for word in os.fsdecode(head.splitlines()[0][2:]).split()]
    names = [word for word in words if word != "env" and not word.startswith("-")]
    name = next((word for word in names if "=" not in word), "sh")
    return "Python" if is_python(name) else f"a script for {name}"


def _not_python(path: Path) -> str:
    """What Python finds wrong with a file; "" for nothing."""
    import zipfile

    if zipfile.is_zipfile(path):
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(path.read_bytes(), path.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        return str(error) or type(error).__name__
    return ""


MOST_BYTES = 256 << 10
"""Of a program that is looked at: about 6,000 lines, which take a third of a second at most."""
PYTHON_KINDS = frozenset({"script", "module"})
AT_SUBMIT = 40
"""Of a program's own files, so many are read before it is queued."""
MOST_FILES = 300
"""Of a program's own that are read: one that generates code may have thousands."""
_GUARDS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def seen_saves(entry: Entry) -> list[str]:
    """Return the pattern of what a program is seen to save, if it does not load by itself."""
    if entry.kind not in PYTHON_KINDS or not entry.path:
        return []
    from hpctrain.launch.begins_anew import PLACE, begins_anew

    try:
        text = read_source(Path(entry.path))
    except NotText:
        return []
    anew = begins_anew(text, entry.args) if len(text) <= MOST_BYTES else None
    return [] if anew is None or anew.pattern == PLACE else [anew.pattern]


def hears_requests(entry: Entry) -> bool:
    """Whether the program is known to use hpctrain, so that `hpctrain cancel --save` reaches it."""
    if entry.kind not in PYTHON_KINDS or not entry.path:
        return entry.kind == "recipe"
    try:
        return "hpctrain" in read_source(Path(entry.path))
    except NotText:
        return False


# ---- what it imports


@dataclass(frozen=True)
class WantedImport:
    """A module that is imported.

    `is_sure`: it is imported as soon as the program starts; else inside a function, or under a
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

    `others` do not lie beside the program; `missing` are of its own folder and not there.
    `is_whole`: all of its own files were read.
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

    `more` are folders that the ranks' PYTHONPATH has besides. If the job loads modules or runs
    lines of its own first (`brought`), these may bring it: then it is a note.

    Raises:
        ChecksFailed: it would end at once, with what to do.
    """
    if entry.kind not in PYTHON_KINDS or not entry.path:
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

    Its own modules lie in `folders`, the first first. At most `most` files are read.
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
        is_bare = top.is_dir() and not (top / "__init__.py").exists()
        if is_bare and not any(top.glob("*.py")):
            continue  # a folder of data that has a module's name
        parts: list[Path | None] = [top]
        for name in rest:
            above = parts[-1]
            if above is None or not above.is_dir():
                return parts if above is not None and above.suffix != ".py" else [*parts, None]
            parts.append(_inside(above, name))
        # An installed package comes before a folder that only has its name.
        return None if None in parts and is_bare else parts
    return None


def _inside(folder: Path, name: str) -> Path | None:
    """The file or folder of a module in a folder."""
    names = (f"{name}.py", f"{name}.pyc", name, f"{name}.*.so", f"{name}.so")
    places = (path for one in names for path in folder.glob(one))
    return next((path for path in places if path.suffix or path.is_dir()), None)
