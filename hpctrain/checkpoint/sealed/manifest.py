"""SEAL.json, the list that proves a program's own checkpoint whole, and the names of seals.

    <run>/sealed/
        seal-000007                   committed: SEAL.json and, of a copy, the bytes in `files`
        seal-000007.forgotten         the run went back behind it
        staged-0003-1f0c9a52          being written by attempt 3
        deleting-1f0c9a52             on its way out

Seals are counted, not named by their step: a step is sealed again after a start from an older one,
and of some files nobody knows the step. The higher number is the newer one.

SEAL.json proves itself as MANIFEST.json does, by a digest of all bytes before its last entry. It
may name files anywhere, since programs save where they please; but what it names lies below the
path that it seals. The promises are held by tests/unit/checkpoint/sealed/test_seal_manifest.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.checkpoint.format.manifest import (
    LAST_TIME,
    MAX_STEP,
    PREFIX,
    bytes_digest,
    count,
    file_of,
    shown,
)
from hpctrain.checkpoint.format.patience import proves_absence
from hpctrain.core.base.files import read_plain
from hpctrain.errors import FileSystemFault, OtherFormat, TornCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
        size: Bytes.
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
        files: Every file of it.
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
    return body + _end(bytes_digest(body))


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
    end = len(content) - len(_end(bytes_digest(b"")))
    if end <= 0 or content[end:] != _end(bytes_digest(content[:end])):
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


def _end(digest: str) -> bytes:
    return f',\n "self_digest": {json.dumps(digest)}\n}}\n'.encode("ascii")


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
