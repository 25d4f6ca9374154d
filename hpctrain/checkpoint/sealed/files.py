"""SEAL.json, and the files of a program's own checkpoint: list, digests, copies, checksums.

    <run>/sealed/
        seal-000007                   committed: SEAL.json and, of a copy, the bytes in `files`
        seal-000007.forgotten         the run went back behind it
        staged-0003-1f0c9a52          being written by attempt 3
        deleting-1f0c9a52             on its way out

Seals are counted, not named by their step: a step is sealed again after a start from an older one.
SEAL.json proves itself by a digest of all bytes before its last entry. It may name files anywhere,
but what it names lies below the path that it seals.

Others may write where a program saves, and what it loads is often run (a pickle). So only ordinary
files of this user's are sealed, and no link is followed below the path that is sealed. Of a run
that its group shares, files may be anybody's. A zip archive (`torch.save`, `numpy.savez`) proves
every byte by CRCs; a safetensors file can only show that it is cut. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import struct
import zipfile
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from hpctrain.checkpoint.format.manifest import (
    LAST_TIME,
    MAX_STEP,
    PREFIX,
    bytes_digest,
    count,
    file_of,
    sealed_by,
    shown,
)
from hpctrain.checkpoint.store.commit import remove_tree
from hpctrain.core.base.files import (
    ROOT,
    flush_directory,
    plain_descriptor,
    proves_absence,
    read_plain,
)
from hpctrain.errors import CheckpointError, FileSystemFault, OtherFormat, TornCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedReader


FORMAT = 1
SEAL_NAME = "SEAL.json"
FILES_NAME = "files"
MOST_BYTES = 256 << 20
MOST_FILES = 1_000_000
LONGEST = 4096
"""Bytes of a path that Linux takes."""
LAST_NS = 2**63
_SEAL = re.compile(r"seal-([0-9]{6,9})")
_DIGEST = re.compile(re.escape(PREFIX) + r"[0-9a-f]{16}")

Writer = Literal["program", "agent"]


@dataclass(frozen=True)
class SealedFile:
    """One file of a sealed checkpoint.

    Attributes:
        name: Relative to the sealed folder, with slashes; of a sealed file its own name.
        digest: ``xxh3_64:`` and 16 hexadecimal digits, of all its bytes.
        mtime_ns: When it was last changed, by its file system. Tells that a file need not be looked
            at again; proves nothing.
    """

    name: str
    size: int
    digest: str
    mtime_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Seal:
    """What SEAL.json says.

    Attributes:
        path: The file or folder that was sealed; absolute.
        is_folder: Which of the two it is.
        step: Updates applied; None where nobody knows.
        attempt: The attempt that sealed it.
        created: Seconds since the epoch; for people, never for choosing.
        by: The program, which called `run.sealed`, or the agent of node 0.
        is_copy: The seal has the bytes too, since the program writes over them with its next save.
    """

    format: int = FORMAT
    path: str
    is_folder: bool
    step: int | None
    attempt: int
    created: float
    by: Writer
    is_copy: bool
    files: tuple[SealedFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def seal_name(number: int) -> str:
    """The name of a committed seal's folder, e.g. ``seal-000007``."""
    return f"seal-{number:06d}"


def parse_seal(name: str) -> int | None:
    """The number of a committed seal's folder; None for every other name."""
    match = _SEAL.fullmatch(name)
    if match is None or seal_name(int(match[1])) != name or int(match[1]) < 1:
        return None
    return int(match[1])


def dump(seal: Seal) -> bytes:
    """The content of its SEAL.json."""
    body = json.dumps(asdict(seal), indent=1).removesuffix("\n}").encode("ascii")
    return body + sealed_by(bytes_digest(body))


def load(path: Path) -> Seal:
    """Read a SEAL.json, every byte of which is as it was written.

    Raises:
        TornCheckpoint: missing, cut, damaged, or not ours; the message is the reason alone.
        OtherFormat: a newer hpctrain has written it.
        FileSystemFault: it cannot be read, and nobody knows what is in it.
    """
    try:
        return parse(read_plain(path, MOST_BYTES))
    except OSError as error:
        if proves_absence(error):
            raise TornCheckpoint(f"{SEAL_NAME} is missing") from None
        raise FileSystemFault(f"{path} cannot be read: {error.strerror}") from error


def parse(content: bytes) -> Seal:
    """The seal that these bytes hold.

    Raises:
        TornCheckpoint: see `load`.
        OtherFormat: see `load`.
    """
    end = len(content) - len(sealed_by(bytes_digest(b"")))
    if end <= 0 or content[end:] != sealed_by(bytes_digest(content[:end])):
        raise TornCheckpoint(f"{SEAL_NAME}'s own digest does not match: it is cut or damaged")
    try:
        raw = json.loads(content.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise TornCheckpoint(f"{SEAL_NAME} is not JSON: {type(error).__name__}") from None
    if not isinstance(raw, dict):
        raise TornCheckpoint(f"{SEAL_NAME} holds {shown(raw)}, not an object")
    version = raw.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise OtherFormat(
            f"{SEAL_NAME} has format {version}, this hpctrain reads up to {FORMAT}; use a newer "
            "hpctrain"
        )
    try:
        return _built(raw)
    except (KeyError, TypeError, ValueError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise TornCheckpoint(f"{SEAL_NAME} is not as hpctrain writes it: {why}") from None


def _built(raw: dict[str, Any]) -> Seal:
    values = {f.name: raw[f.name] for f in fields(Seal)}
    for name, fits in _CHECKS.items():
        if not fits(values[name]):
            raise ValueError(f"{name} is {shown(values[name])}")
    if len(values["files"]) > MOST_FILES:
        raise ValueError(f"it names {len(values['files']):,} files")
    files = [_file(file) for file in values["files"]]
    names = {file.name for file in files}
    if not files or len(names) < len(files):
        raise ValueError("it names no files, or one twice")
    if not values["is_folder"] and names != {values["path"].rpartition("/")[2]}:
        raise ValueError(f"it seals the file {shown(values['path'])} and names {shown(names)}")
    return Seal(**{**values, "files": tuple(files)})


def _file(raw: Any) -> SealedFile:
    name, size, digest = file_of(raw)
    parts = name.split("/")
    if "\0" in name or len(name) > LONGEST or {"", ".", ".."} & set(parts):
        raise ValueError(f"it names {shown(name)}, which is no file below the sealed path")
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{shown(name)} has digest {shown(digest)}")
    mtime_ns = raw.get("mtime_ns", 0)
    if not count(mtime_ns, LAST_NS):
        raise ValueError(f"{shown(name)} has mtime_ns {shown(mtime_ns)}")
    return SealedFile(name, size, digest, mtime_ns)


def _path(value: Any) -> bool:
    if not isinstance(value, str) or not value.startswith("/") or len(value) > LONGEST:
        return False
    return "\0" not in value and not {"", ".", ".."} & set(value[1:].split("/"))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: count(value) and value == FORMAT,
    "path": _path,
    "is_folder": lambda value: isinstance(value, bool),
    "step": lambda value: value is None or count(value, MAX_STEP),
    "attempt": count,
    "created": lambda value: type(value) in {int, float} and 0 <= value <= LAST_TIME,
    "by": lambda value: value in ("program", "agent"),
    "is_copy": lambda value: isinstance(value, bool),
    "files": lambda value: isinstance(value, list),
}

COPY_BYTES = 64 << 20
READ_BYTES = 1 << 20
_NO_RANGE = frozenset(
    {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EIO}
)
"""copy_file_range(2) cannot do it here; reading and writing may, or says what is wrong."""


@dataclass(frozen=True)
class UnitFile:
    """One file of what is to be sealed, by its name below the unit's root and without its bytes."""

    name: str
    size: int
    mtime_ns: int


def root_of(path: Path, *, is_folder: bool) -> Path:
    """The folder to which a unit's file names are relative."""
    return path if is_folder else path.parent


def unit_files(path: Path, *, anybodys: bool = False) -> list[UnitFile]:
    """List every file of a checkpoint (a file or a folder) by name; open none.

    With `anybodys`, files of other users are accepted.

    Raises:
        CheckpointError: there is nothing, or something that is not sealed: a link, a FIFO, another
            user's file.
        OSError: the file system did not answer.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        return [_unit_file(path, path.name, status, anybodys=anybodys)]
    files = sorted(_below(path, "", anybodys=anybodys), key=lambda file: file.name)
    if not files:
        raise CheckpointError(f"{path} is an empty folder; there is nothing to seal")
    if len(files) > MOST_FILES:
        raise CheckpointError(f"{path} has {len(files):,} files; {MOST_FILES:,} can be sealed")
    return files


def _below(folder: Path, prefix: str, *, anybodys: bool) -> Iterator[UnitFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            name = prefix + entry.name
            if stat.S_ISDIR(status.st_mode):
                yield from _below(Path(entry.path), f"{name}/", anybodys=anybodys)
            else:
                yield _unit_file(Path(entry.path), name, status, anybodys=anybodys)


def _unit_file(path: Path, name: str, status: os.stat_result, *, anybodys: bool) -> UnitFile:
    if stat.S_ISLNK(status.st_mode):
        raise CheckpointError(f"{path} is a link; only ordinary files are registered")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no ordinary file; only such are registered")
    if not anybodys and status.st_uid not in {os.geteuid(), ROOT}:
        raise CheckpointError(
            f"{path} belongs to user {status.st_uid}; only your own are registered"
        )
    return UnitFile(name, status.st_size, max(0, status.st_mtime_ns))


def sealed_file(
    path: Path, file: UnitFile, copy: Path | None, on_bytes: Callable[[int], object] | None = None
) -> SealedFile:
    """Return the digest of a listed file; flush what was read to disk.

    With `copy`, copy the file there; the digest is then of the copy's bytes.

    Raises:
        CheckpointError: it was changed since it was listed.
        OSError: it cannot be read, or the copy not be written.
    """
    with _open(path) as source:
        if copy is None:
            digest = _digest(source.fileno(), on_bytes)
            os.fsync(source.fileno())
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copied(source.fileno(), copy, on_bytes)
            digest = digest_of(copy, on_bytes)
        status = os.fstat(source.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise CheckpointError(
            f"{path} was changed while it was registered; seal what is written out"
        )
    return SealedFile(file.name, file.size, digest, file.mtime_ns)


def _open(path: Path) -> BufferedReader:
    descriptor = plain_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW)
    return open(descriptor, "rb")  # noqa: PTH123 - a descriptor has no path


def digest_of(path: Path, on_bytes: Callable[[int], object] | None = None) -> str:
    """The digest of an ordinary file's bytes; no link is followed.

    Raises:
        OSError: it cannot be read.
    """
    with _open(path) as file:
        return _digest(file.fileno(), on_bytes)


def _digest(descriptor: int, on_bytes: Callable[[int], object] | None) -> str:
    hasher = xxhash.xxh3_64()
    part = memoryview(bytearray(READ_BYTES))
    os.lseek(descriptor, 0, os.SEEK_SET)
    while size := os.readv(descriptor, [part]):
        hasher.update(part[:size])
        if on_bytes is not None:
            on_bytes(size)
    return PREFIX + hasher.hexdigest()


def _copied(source: int, copy: Path, on_bytes: Callable[[int], object] | None = None) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    target = os.open(copy, flags, 0o666)
    try:
        _copy_bytes(source, target, on_bytes or (lambda _: None))
        os.fsync(target)
    finally:
        os.close(target)


def _copy_bytes(source: int, target: int, on_bytes: Callable[[int], object]) -> None:
    """Copy by the file system if it can (it may share the blocks); call `on_bytes` with 0 per part.

    `on_bytes` may raise to end the copy.
    """
    try:
        while os.copy_file_range(source, target, COPY_BYTES):
            on_bytes(0)
    except OSError as error:
        if error.errno not in _NO_RANGE:
            raise
    else:
        # Some file systems say that nothing is left of a file of theirs that is not empty.
        if os.fstat(target).st_size == os.fstat(source).st_size:
            return
    os.lseek(source, 0, os.SEEK_SET)
    os.ftruncate(target, 0)
    os.lseek(target, 0, os.SEEK_SET)
    with (
        open(source, "rb", buffering=0, closefd=False) as reader,
        open(target, "wb", buffering=0, closefd=False) as writer,
    ):
        while part := reader.read(READ_BYTES):
            on_bytes(0)
            writer.write(part)


def flush_tree(root: Path) -> None:
    """Make the names in a folder, and in those below it, survive a power loss."""
    for folder, _, _ in os.walk(root, topdown=False):
        flush_directory(Path(folder))


def put_back(copy: Path, path: Path, on_bytes: Callable[[int], object] | None = None) -> None:
    """Put a copy where it came from: readers find nothing there, or all of it.

    The copy stays. Whatever lies in the way must have been moved first. What `on_bytes` raises ends
    it; it gets no bytes, since they were read before.

    Raises:
        OSError: it cannot be written; what was begun is removed.
    """
    staged = path.with_name(f".{path.name}.putting-back")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_tree(staged)
    try:
        if copy.is_dir():
            for file in unit_files(copy, anybodys=True):
                _put(copy / file.name, staged / file.name, on_bytes)
            flush_tree(staged)
        else:
            _put(copy, staged, on_bytes)
        staged.rename(path)
        flush_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(staged)
        raise


def _put(source: Path, target: Path, on_bytes: Callable[[int], object] | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _open(source) as file:
        _copied(file.fileno(), target, on_bytes)


_ZIP = b"PK\x03\x04"
_SAFETENSORS = ".safetensors"
_LENGTH = struct.Struct("<Q")
MOST_HEADER_BYTES = 100 << 20
"""As the safetensors library has it."""
_NOT_A_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    LookupError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
)
"""What the standard library raises on bytes that are no whole archive."""


def proves_itself(path: Path, on_bytes: Callable[[int], object] | None = None) -> bool:
    """Whether a file's own checksums prove every byte of it; every byte is read.

    Raises:
        OSError: it cannot be read.
    """
    with _open(path) as file:
        return file.read(len(_ZIP)) == _ZIP and not _zip_problem(file, on_bytes, proof=True)


def cut(path: Path, on_bytes: Callable[[int], object] | None = None) -> str | None:
    """Return why a file cannot be complete, by its own format; None if nothing shows that.

    Raises:
        OSError: it cannot be read.
    """
    with _open(path) as file:
        if file.read(len(_ZIP)) == _ZIP:
            return _zip_problem(file, on_bytes, proof=False)
        if path.name.endswith(_SAFETENSORS):
            return _safetensors_problem(file)
    return None


def _zip_problem(
    file: BufferedReader, on_bytes: Callable[[int], object] | None, *, proof: bool
) -> str | None:
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                # torch.serialization.set_crc32_options(False) leaves out every CRC.
                if not member.CRC and member.file_size:
                    if proof:
                        return f"{member.filename} has no CRC"
                    continue
                with archive.open(member) as content:
                    while part := content.read(READ_BYTES):
                        if on_bytes is not None:
                            on_bytes(len(part))
    except _NOT_A_ZIP as error:
        return f"not a whole zip archive: {error}"
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a directory that points before the first byte
            raise
        return "not a whole zip archive"
    return None


def _safetensors_problem(file: BufferedReader) -> str | None:
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return f"safetensors of {size} bytes"
    (length,) = _LENGTH.unpack(head)
    if length > min(MOST_HEADER_BYTES, size - _LENGTH.size):
        return "safetensors whose header is cut"
    try:
        header = json.loads(file.read(length))
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
        whole = _LENGTH.size + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "safetensors whose header is damaged"
    return None if whole == size else f"safetensors of {size:,} bytes, its header says {whole:,}"
