"""What a Python environment consists of: which files are packed, under which names, and their key.

An archive has two folders. `env` is the prefix of the interpreter that runs the ranks. `base` is
there for a virtual environment whose own interpreter is not the system's: what that needs to start
and its standard library, without the packages that it has beside them. What lies outside of both is
read from where it lies: folders that `.pth` files name, as of editable installs, and PYTHONPATH.

The key is a digest of names, sizes and times, not of bytes: it costs one look at each file.
Bytecode is packed, and does not count: Python writes it whenever it likes.

tests/unit/submit/test_environment_files.py holds the promises.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORMAT = 1
"""Counts on where archives are laid out in another way."""
ENV, BASE = "env", "base"
BLOCK = 4096
_ASK = (
    "import json, sys, sysconfig; print(json.dumps([sys.prefix, sys.base_prefix, "
    "'%d.%d' % sys.version_info[:2], sysconfig.get_path('purelib')]))"
)
_ASK_S = 60
_SYSTEM = ("/bin", "/lib", "/lib64", "/usr")
"""What lies below is part of a node's own system."""
_NOT_OF_CONDA = frozenset({"envs", "pkgs"})


@dataclass(frozen=True)
class Interpreter:
    """Where a Python has its files.

    Attributes:
        prefix: The environment's folder.
        base_prefix: The same, but of a virtual environment that of the Python which made it.
        version: "3.11".
        purelib: Its folder of packages.
        executable: As it is started.
    """

    prefix: Path
    base_prefix: Path
    version: str
    purelib: Path
    executable: Path

    @property
    def is_virtual(self) -> bool:
        """Whether its standard library lies elsewhere."""
        return self.prefix != self.base_prefix


@dataclass(frozen=True, order=True)
class EnvironmentFile:
    """One name in an archive.

    Attributes:
        name: In the archive.
        path: Where it lies now.
        kind: "file", "folder" or "link".
        size_bytes: Of a file.
        mtime_ns: Of a file.
        mode: Permissions.
        target: Of a link.
    """

    name: str
    path: str
    kind: str
    size_bytes: int = 0
    mtime_ns: int = 0
    mode: int = 0o755
    target: str = ""

    @property
    def is_bytecode(self) -> bool:
        """Whether Python can make it anew."""
        return self.name.endswith(".pyc")


def interpreter(python: str) -> Interpreter:
    """Ask a Python where its files lie.

    Raises:
        HpctrainError: it does not start, or is not one that can be packed.
    """
    try:
        answer = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=True
        ).stdout
        prefix, base_prefix, version, purelib = json.loads(answer)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise HpctrainError(f"{python} does not say where its files lie: {error}") from None
    paths = Path(prefix), Path(base_prefix), version, Path(purelib), Path(python)
    if _is_systems(paths[0]):
        raise HpctrainError(f"{prefix} is the system's own Python, which each node has")
    return Interpreter(*paths)


def files_of(python: Interpreter) -> list[EnvironmentFile]:
    """Everything that is packed, sorted by name.

    Raises:
        OSError: something cannot be looked at.
    """
    left_out = _NOT_OF_CONDA if (python.prefix / "conda-meta").is_dir() else frozenset()
    files = list(_walk(python.prefix, ENV, left_out=left_out))
    if has_base(python):
        files += _base_files(python)
        inside = f"../../{BASE}/bin/python{python.version}"
        files = [_led_to_base(file, inside) for file in files]
    return sorted(files)


def has_base(python: Interpreter) -> bool:
    """Whether the standard library is packed too."""
    return python.is_virtual and not _is_systems(python.base_prefix)


def interpreter_name(python: Interpreter) -> str:
    """The interpreter, relative to its environment."""
    if python.executable.parent == python.prefix / "bin":
        return f"bin/{python.executable.name}"
    return "bin/python3"


def key_of(python: Interpreter, files: Sequence[EnvironmentFile], compress: str) -> str:
    """By what an archive is known: 32 hexadecimal digits."""
    digest = hashlib.sha256(f"{FORMAT}\n{python.prefix}\n{compress}\n".encode())
    for file in files:
        if not file.is_bytecode and file.kind != "folder":
            facts = (file.name, file.kind, file.size_bytes, file.mtime_ns, file.mode, file.target)
            digest.update(json.dumps(facts).encode())
    return digest.hexdigest()[:32]


def unpacked_bytes(files: Sequence[EnvironmentFile]) -> int:
    """What they take on a disk that has blocks of 4 KiB."""
    blocks = (1 + (file.size_bytes + BLOCK - 1) // BLOCK for file in files)
    return BLOCK * sum(blocks)


def read_in_place(python: Interpreter) -> list[str]:
    """Folders outside that the environment's `.pth` files name, as editable installs do."""
    folders: list[str] = []
    for path in sorted(python.purelib.glob("*.pth")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:  # Python would not read it either
            continue
        folders += [line for line in lines if line.startswith("/") and _is_outside(line, python)]
    return folders


def _is_outside(line: str, python: Interpreter) -> bool:
    return not Path(line).is_relative_to(python.prefix) and Path(line).is_dir()


def _is_systems(prefix: Path) -> bool:
    return str(prefix) == "/" or any(prefix.is_relative_to(folder) for folder in _SYSTEM)


def _base_files(python: Interpreter) -> Iterator[EnvironmentFile]:
    """What the base needs to start, its headers, and its standard library."""
    base, library = python.base_prefix, f"python{python.version}"
    yield _folder(BASE)
    yield _folder(f"{BASE}/bin")
    yield _folder(f"{BASE}/lib")
    program = base / "bin" / library
    yield _file(str(program.resolve()), f"{BASE}/bin/{library}")
    for path in sorted((base / "lib").glob("*.so*")):
        yield from _entry(path, f"{BASE}/lib/{path.name}", base)
    packages = frozenset() if _sees_packages(python) else frozenset({"site-packages"})
    yield from _walk(base / "lib" / library, f"{BASE}/lib/{library}", left_out=packages, top=base)
    include = base / "include"
    if (include / library).is_dir():
        yield _folder(f"{BASE}/include")
        yield from _walk(include / library, f"{BASE}/include/{library}", top=base)


def _sees_packages(python: Interpreter) -> bool:
    """Whether the environment was made with --system-site-packages."""
    text = (python.prefix / "pyvenv.cfg").read_text(errors="replace")
    pairs = (line.partition("=") for line in text.splitlines())
    return any(
        key.strip() == "include-system-site-packages" and value.strip() == "true"
        for key, _, value in pairs
    )


def _led_to_base(file: EnvironmentFile, inside: str) -> EnvironmentFile:
    """The environment's links to its own interpreter lead to the one in the archive."""
    folder, _, name = file.name.rpartition("/")
    if file.kind != "link" or folder != f"{ENV}/bin" or not name.startswith("python"):
        return file
    if not file.target.startswith("/"):
        return file
    return EnvironmentFile(file.name, file.path, "link", target=inside)


def _walk(
    folder: Path, name: str, *, left_out: frozenset[str] = frozenset(), top: Path | None = None
) -> Iterator[EnvironmentFile]:
    """A folder with all that is in it, but for these names right below it."""
    yield _folder(name)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in left_out:
                continue
            inner = f"{name}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), inner, top=top or folder)
            else:
                yield from _entry(Path(entry.path), inner, top or folder)


def _entry(path: Path, name: str, top: Path) -> Iterator[EnvironmentFile]:
    """A file or a link; nothing for what is neither."""
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        yield _made(path, name, status)
    elif stat.S_ISLNK(status.st_mode):
        yield _link(path, name, top)


def _link(path: Path, name: str, top: Path) -> EnvironmentFile:
    """A link; to what lies outside, as some installers' to their cache, the file itself."""
    target = str(path.readlink())
    inside = Path(os.path.normpath(path.parent / target)).is_relative_to(top)
    if inside and target.startswith("/"):
        target = os.path.relpath(target, path.parent)
    elif not inside and not name.startswith(f"{ENV}/bin/") and path.is_file():
        return _file(str(path), name)
    return EnvironmentFile(name, str(path), "link", target=target)


def _file(path: str, name: str) -> EnvironmentFile:
    return _made(Path(path), name, Path(path).stat())


def _made(path: Path, name: str, status: os.stat_result) -> EnvironmentFile:
    mode = stat.S_IMODE(status.st_mode) & 0o777 | 0o600
    return EnvironmentFile(name, str(path), "file", status.st_size, status.st_mtime_ns, mode)


def _folder(name: str) -> EnvironmentFile:
    return EnvironmentFile(name, "", "folder")
