"""MANIFEST.json: the list that proves a checkpoint whole, written last, and proof of itself.

Its last entry is the digest of all bytes before that entry, so every byte counts, also white space
and the order in which the chunk table counts the tensors. A key that this version does not know is
ignored; one that a reader must know needs a higher FORMAT.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hpctrain.base.files import read_plain
from hpctrain.checkpoint.format import fields as fields_of
from hpctrain.checkpoint.format import names
from hpctrain.checkpoint.format.digest import BLOCK_BYTES, BLOCKS_PREFIX, PREFIX, bytes_digest
from hpctrain.checkpoint.format.patience import proves_absence
from hpctrain.errors import CheckpointError, FileSystemFault, NewerFormat, TornCheckpoint
from hpctrain.testing import points

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 2
MANIFEST_NAME = "MANIFEST.json"
TABLE_NAME = "chunks.table"
MOST_BYTES = 1 << 30
"""Of a manifest; millions of tensors take less."""
PINNED_NAME = "PINNED"
"""Made by `checkpoints pin`; not part of what the manifest proves."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint, as the rank that wrote it saw it."""

    name: str
    size: int
    """Bytes."""
    digest: str
    """``xxh3_64:`` or, of a shard, ``xxh3_64-blocks:`` and 16 hexadecimal digits."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint as a whole; where its parts lie stands in the chunk table."""

    name: str
    dtype: str
    """In safetensors' words: F32, BF16, I64, ..."""
    shape: tuple[int, ...]

    @property
    def text(self) -> str:
        """Dtype and shape as the manifest has them, e.g. ``F32[1024,512]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(kw_only=True)
class Manifest:
    """Everything about a checkpoint but the tensors.

    Its dictionaries hold what JSON holds: keys are strings, tuples come back as lists.
    """

    format: int = FORMAT
    run_id: str
    name: str
    """The run's name when this was written."""
    step: int
    """Optimizer updates applied."""
    attempt: int = 0
    """Filled in by `commit.publish`."""
    attempt_token: str = ""
    """Filled in by `commit.publish`."""
    created: float = field(default_factory=time.time)
    """Seconds since the epoch; for people, never for choosing."""
    world_size: int
    mesh: dict[str, Any]
    """Axis name to size."""
    engine: str
    files: list[FileEntry] = field(default_factory=list)
    block_bytes: int = BLOCK_BYTES
    """Bytes of a chunk that have a digest of their own."""
    tensors: list[TensorEntry] = field(default_factory=list)
    """In the order in which the chunk table counts them."""
    data: dict[str, Any] = field(default_factory=dict)
    """Where the data stands: samples_consumed, seed, ..."""
    rng: dict[str, Any] | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """What the program logged last before this step."""
    self_digest: str = ""
    """Filled in by `dump`."""

    @property
    def size(self) -> int:
        """Bytes of all files that it names."""
        return sum(entry.size for entry in self.files)


def dump(manifest: Manifest, path: Path) -> None:
    """Write a manifest where none is, flushed to disk; its own digest is filled in.

    Raises:
        CheckpointError: it holds something that would not come back from JSON as it is.
        OSError: the file is there already, or cannot be written.
    """
    body = _body(manifest)
    manifest.self_digest = bytes_digest(body)
    points.reach("manifest.write", path=path, step=manifest.step)
    with path.open("xb") as file:
        file.write(body + _seal(manifest.self_digest))
        file.flush()
        points.reach("manifest.flush", path=path, fd=file.fileno(), step=manifest.step)
        os.fsync(file.fileno())


def load(path: Path) -> Manifest:
    """Read a manifest, every byte of which is as it was written.

    Raises:
        TornCheckpoint: missing, cut or damaged; the message is the reason alone.
        NewerFormat: a newer hpctrain has written it.
        FileSystemFault: it cannot be read, and nobody knows what is in it.
    """
    try:
        return parse(_read(path))
    except NewerFormat as error:
        raise NewerFormat(f"{path.parent.name}: {error}") from None


def parse(content: bytes) -> Manifest:
    """The manifest that these bytes of its file hold.

    Raises:
        TornCheckpoint: see `load`.
        NewerFormat: see `load`.
    """
    raw = _parsed(content)
    version = raw.get("format")
    if not isinstance(version, int) or version < 1:
        raise TornCheckpoint(f"manifest has format {version!r}, which no hpctrain writes")
    if version < FORMAT:
        raise TornCheckpoint(
            f"manifest has format {version}, which was never released; read it with "
            "`hpctrain checkpoints import`"
        )
    end = len(content) - len(_seal(bytes_digest(b"")))
    is_proved = content[end:] == _seal(bytes_digest(content[:end]))
    is_sealed = content[end:] == _seal(str(raw.get("self_digest")))
    # One flipped bit makes a 3 of a 2: a seal that does not hold comes before the number.
    if version > FORMAT and (is_proved or not is_sealed):
        raise NewerFormat(
            f"manifest has format {version}, this hpctrain reads up to {FORMAT}; use a newer "
            "hpctrain"
        )
    if is_proved:
        return _built(raw)
    if is_sealed:
        raise TornCheckpoint("manifest's own digest does not match")
    if not content.endswith(b"}\n"):
        raise TornCheckpoint(f"manifest is cut: it ends after {len(content):,} bytes")
    raise TornCheckpoint("manifest's bytes are not as they were written")


def _read(path: Path) -> bytes:
    try:
        points.reach("read.manifest", path=path, step=names.parse_step(path.parent.name))
        return read_plain(path, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise TornCheckpoint("manifest is missing") from None
    except OSError as error:
        if proves_absence(error):
            raise TornCheckpoint(f"manifest cannot be read: {error}") from error
        raise FileSystemFault(f"manifest cannot be read: {error}") from error


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(content.decode("ascii"))
    except (ValueError, RecursionError) as error:
        at_end = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
        if at_end or not content.endswith(b"}\n"):
            raise TornCheckpoint(
                f"manifest is cut: it ends after {len(content):,} bytes, "
                f"in line {content.count(10) + 1}"
            ) from None
        raise TornCheckpoint(f"manifest is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise TornCheckpoint(f"manifest is not JSON of ours: a {type(raw).__name__}, not an object")
    return raw


def _built(raw: dict[str, Any]) -> Manifest:
    known = {f.name for f in fields(Manifest)}
    values = {key: value for key, value in raw.items() if key in known}
    try:
        fields_of.require(values)
        values["files"] = [FileEntry(*fields_of.file_of(file)) for file in raw["files"]]
        values["tensors"] = [
            TensorEntry(name, *fields_of.tensor_of(name, text))
            for name, text in raw["tensors"].items()
        ]
        manifest = Manifest(**values)
    except (KeyError, TypeError) as error:
        raise TornCheckpoint(f"manifest lacks something: {error}") from error
    except ValueError as error:
        raise TornCheckpoint(f"manifest is not as hpctrain writes it: {error}") from error
    problem = files_problem(manifest.files)
    if problem:
        raise TornCheckpoint(problem)
    return manifest


def files_problem(files: list[FileEntry]) -> str | None:
    """What is wrong with a list of files as such, or None: names are plain, digests are known."""
    if not files:
        return "manifest names no files"
    seen: set[str] = set()
    for entry in files:
        # A manifest must not be able to name a file outside of its own directory.
        reserved = entry.name in {"", ".", "..", MANIFEST_NAME, PINNED_NAME}
        if reserved or "/" in entry.name or "\0" in entry.name:
            return f"manifest names {entry.name!r}, which is no shard's name"
        if entry.name in seen:
            return f"manifest names {entry.name} twice"
        if not entry.digest.startswith((PREFIX, BLOCKS_PREFIX)):
            return f"manifest has digest {entry.digest!r} for {entry.name}, known is {PREFIX}"
        seen.add(entry.name)
    return None


def _body(manifest: Manifest) -> bytes:
    """Everything before the last entry; refused where JSON would give back something else."""
    raw = asdict(manifest)
    del raw["self_digest"]
    raw["tensors"] = {entry.name: entry.text for entry in manifest.tensors}
    _require_string_keys(raw, "manifest")
    try:
        fields_of.require(raw)
        for entry in manifest.tensors:
            fields_of.tensor_of(entry.name, entry.text)
    except ValueError as error:  # it would be committed, and never loaded
        raise CheckpointError(f"manifest of step {manifest.step}: {error}") from error
    try:
        text = json.dumps(raw, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"manifest of step {manifest.step} cannot be written as JSON: {error}"
        ) from error
    return text.removesuffix("\n}").encode("ascii")


def _seal(digest: str) -> bytes:
    """The last entry and the end of the file."""
    return f',\n "self_digest": {json.dumps(digest)}\n}}\n'.encode("ascii")


def _require_string_keys(value: Any, where: str) -> None:
    # JSON turns the key 30 into "30" without a word: a scheduler's milestones would be lost.
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{where} has the key {key!r}, which JSON would make a string; "
                    f"store it as a list of pairs"
                )
            _require_string_keys(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _require_string_keys(inner, f"{where}[{index}]")
