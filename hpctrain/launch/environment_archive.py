"""Pack a Python environment into one file beside the runs, once for all runs that need the same.

Archives lie in `.environments-UID` in the folder of all runs, readable for their owner only. One is
there with its facts (`KEY.json`) or not at all. A lock lets two submits pack it once. Archives that
were unused for `UNUSED_DAYS` go when another is packed. `staging_for` never refuses a run; it says
why nothing is packed.

`env` is the prefix of the ranks' interpreter; `base` is what a virtual environment needs of its own
interpreter. Folders of `.pth` files and PYTHONPATH are read where they lie. The key is a digest of
names, sizes and times; bytecode is packed and does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base import clock
from hpctrain.core.base.files import write_private
from hpctrain.core.base.locks import held
from hpctrain.core.base.text import count, size
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run.staging import (
    EnvironmentArchive,
    Staging,
    archive_from,
    is_staged,
    places_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpctrain.core.settings.spec import Spec

    ShowProgress = Callable[[str, int], contextlib.AbstractContextManager[Callable[[int], None]]]
    "Called with what is done and of how many bytes; what it gives takes the bytes done."


UNUSED_DAYS = 30
LOCK_S = 1800.0
"""Another submit may be packing the same for so long."""
PIECE = 1 << 20
_ZSTD = ["zstd", "-q", "-3", "-T0", "-c"]


def staging_for(
    spec: Spec, runs: Path, progress: ShowProgress | None = None
) -> tuple[Staging | None, list[str]]:
    """What the run's next job is to stage, packed; None where nothing is asked for.

    `progress` shows how far the packing is, which may take minutes.

    Returns:
        It, and what the user should know.
    """
    if not is_staged(spec.settings) or get_cluster(spec.cluster).on_this_machine:
        return None, []
    local = (spec.preset or {}).get("storage", {}).get("local", "")
    places = places_of(spec.settings, local)
    try:
        python = interpreter(spec.python)
        folder = runs / f".environments-{os.geteuid()}"
        archive, packed = archive_of(python, folder, chosen(), progress)
    except (HpctrainError, OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        why = f"the environment was not packed: {error}"
        return Staging(None, why, places), [f"environment.stage: {why}; nodes read it"]
    notes = [f"environment.stage: {_result_text(archive, packed)}"]
    if outside := read_in_place(python):
        notes.append(f"environment.stage: read from where they lie: {', '.join(outside)}")
    return Staging(archive, "", places), notes


def chosen() -> str:
    """How is packed: "none" where this machine has no zstd."""
    return "zstd" if shutil.which("zstd") else "none"


def archive_of(
    python: Interpreter, folder: Path, compress: str, progress: ShowProgress | None = None
) -> tuple[EnvironmentArchive, float | None]:
    """The archive of an environment as it is now, packed where there is none yet.

    Returns:
        It, and the seconds that packing took; None where it was there.

    Raises:
        HpctrainError: something has changed meanwhile, or a tool has failed.
        OSError: something cannot be read or written.
    """
    files = files_of(python)
    key = key_of(python, files, compress)
    _make_folder(folder)
    if ready := _found(folder, key):
        return ready, None
    with held(folder / f"{key}.lock", LOCK_S):
        if ready := _found(folder, key):
            return ready, None
        began = clock.monotonic()
        _prune(folder, keep=key)
        total = sum(file.size_bytes for file in files)
        show = (
            progress("packing the environment:", total) if progress else nullcontext(lambda _: None)
        )
        with show as on_bytes:
            made = _packed(python, files, folder, key, compress, on_bytes=on_bytes)
        return made, clock.monotonic() - began


def _result_text(archive: EnvironmentArchive, packed_s: float | None) -> str:
    how = f"packed in {packed_s:.0f} s" if packed_s is not None else "was packed before"
    what = f"{archive.prefix} ({count(archive.files, 'file')}, {size(archive.unpacked_bytes)})"
    return f"{what} {how} as {archive.path} ({size(archive.size_bytes)})"


def _make_folder(folder: Path) -> None:
    """This user's alone: what lies there is run by jobs."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise HpctrainError(f"{folder} is not this user's alone")


def _found(folder: Path, key: str) -> EnvironmentArchive | None:
    """The archive of a key, which counts as used now."""
    facts = folder / f"{key}.json"
    try:
        archive = archive_from(facts.read_bytes())
        if (folder / f"{key}.tar").stat().st_size != archive.size_bytes:
            return None
        os.utime(facts)
    except (OSError, ValueError):  # none, or one that a crash has torn: it is packed anew
        return None
    return archive


def _packed(
    python: Interpreter,
    files: Sequence[EnvironmentFile],
    folder: Path,
    key: str,
    compress: str,
    *,
    on_bytes: Callable[[int], None],
) -> EnvironmentArchive:
    path, new = folder / f"{key}.tar", folder / f"{key}.new"
    try:
        sha256, nbytes = _write(files, new, compress, on_bytes)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    is_inside = python.executable.parent == python.prefix / "bin"
    archive = EnvironmentArchive(
        key=key,
        path=str(path),
        sha256=sha256,
        size_bytes=nbytes,
        unpacked_bytes=unpacked_bytes(files),
        files=sum(file.kind == "file" and not file.is_bytecode for file in files),
        compress=compress,
        prefix=str(python.prefix),
        python=f"bin/{python.executable.name if is_inside else 'python3'}",
    )
    write_private(folder / f"{key}.json", json.dumps(asdict(archive), indent=1) + "\n")
    return archive


def _write(
    files: Sequence[EnvironmentFile],
    path: Path,
    compress: str,
    on_bytes: Callable[[int], None],
) -> tuple[str, int]:
    """Pack; the digest and the size of the file, which is on the disk by then."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w+b") as out:
        with (
            nullcontext(out) if compress == "none" else _compressed(out) as stream,
            tarfile.open(
                fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=PIECE
            ) as tar,
        ):
            for file in files:
                _add(tar, file)
                on_bytes(file.size_bytes)
        out.flush()
        os.fsync(descriptor)
        out.seek(0)
        return hashlib.file_digest(out, "sha256").hexdigest(), out.tell()


@contextlib.contextmanager
def _compressed(out: BinaryIO) -> Iterator[IO[bytes]]:
    """What to write into; at its end everything has come to the file."""
    process = subprocess.Popen(_ZSTD, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE)
    assert process.stdin is not None  # noqa: S101 - for mypy: it was asked for
    assert process.stderr is not None  # noqa: S101
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            yield process.stdin
    finally:
        said = process.stderr.read().decode(errors="replace").strip()
        process.stderr.close()
        code = process.wait()
    if code != 0:
        raise HpctrainError(f"zstd has ended with {code}{said and f': {said}'}")


def _add(tar: tarfile.TarFile, file: EnvironmentFile) -> None:
    info = tarfile.TarInfo(file.name)
    info.mode = file.mode
    if file.kind == "folder":
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    elif file.kind == "link":
        info.type, info.linkname = tarfile.SYMTYPE, file.target
        tar.addfile(info)
    else:
        with open(file.path, "rb") as content:  # noqa: PTH123 - thousands of them
            status = os.fstat(content.fileno())
            now = status.st_size, status.st_mtime_ns
            if now != (file.size_bytes, file.mtime_ns) and not file.is_bytecode:
                raise HpctrainError(f"{file.path} has changed while it was packed")
            info.size, info.mtime = status.st_size, int(status.st_mtime)
            tar.addfile(info, content)


def _prune(folder: Path, *, keep: str) -> None:
    """Remove what nothing has used for long, and what killed submits have left."""
    oldest = clock.now() - UNUSED_DAYS * 86400
    for path in folder.iterdir():
        is_old = path.suffix in {".json", ".new"} and path.stat().st_mtime < oldest
        if not is_old or path.stem == keep:
            continue
        path.unlink()  # its facts first: from now on nobody takes the archive
        (folder / f"{path.stem}.tar").unlink(missing_ok=True)


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

    `base_prefix` of a virtual environment is that of the Python which made it; `purelib` is the
    folder of packages.
    """

    prefix: Path
    base_prefix: Path
    version: str
    purelib: Path
    executable: Path


@dataclass(frozen=True, order=True)
class EnvironmentFile:
    """One name in an archive.

    `name` is in the archive, `path` where it lies now; `kind` is "file", "folder" or "link".
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
    if python.prefix != python.base_prefix and not _is_systems(python.base_prefix):
        files += _base_files(python)
        inside = f"../../{BASE}/bin/python{python.version}"
        files = [_led_to_base(file, inside) for file in files]
    return sorted(files)


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
        outside = [one for one in lines if one.startswith("/") and Path(one).is_dir()]
        folders += [one for one in outside if not Path(one).is_relative_to(python.prefix)]
    return folders


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
