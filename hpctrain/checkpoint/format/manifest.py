"""MANIFEST.json, the list that proves a checkpoint whole, and the names and digests it stands on.

The manifest is written last. Its last entry is the digest of all bytes before that entry, so every
byte counts, also white space and the order in which the chunk table counts the tensors. A key that
this version does not know is ignored; one that a reader must know needs a higher FORMAT. Each
field is looked at once, where it is read, and what passes is safe to count with, to show, and to
ask memory for.

The directories of a run's checkpoints:

    step-0000001000               committed (or torn, if its files are not what its manifest says)
    step-0000001000.staged-0003   being written by attempt 3
    step-0000001000.set-aside-1   found damaged and moved away, with its reason inside
    step-0000001000.deleting-1    on its way out; its bytes may be half gone

Only the first form is ever looked at for loading. A name counts only if it is exactly what this
module would write, so that no copy (`step-0000001000.bak`) and no half-typed name is taken for a
checkpoint.

The digest is xxh3_64 everywhere, which costs less than reading the bytes. What is read in parts (a
shard) has one for each block, so that a reader proves just the bytes that it takes; what is read as
a whole (the chunk table, the manifest) has one.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import xxhash

from hpctrain.checkpoint.format import packing
from hpctrain.core.base import clock
from hpctrain.core.base.files import proves_absence, read_plain
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, FileSystemFault, OtherFormat, TornCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT = 4
OLDEST = 3
"""Is read alike: it holds none of the types and dtypes that came with 4. 2 is hpctrain 0.1.0's, and
what came before was never released."""
KIND = "__hpctrain__"
"""The key of a form in `extra` and `data` that came with format 4: checkpoint-format.md."""
MANIFEST_NAME = "MANIFEST.json"
TABLE_NAME = "chunks.table"
PINNED_NAME = "PINNED"
"""Made by `checkpoints pin`; not part of what the manifest proves."""

MAX_STEP = 10**10 - 1
_STEP = re.compile(r"step-([0-9]{10})")  # not \d, which takes digits of every script
STAGED, SET_ASIDE, DELETING = "staged", "set-aside", "deleting"
_ASIDE = re.compile(rf"step-([0-9]{{10}})\.({STAGED}|{SET_ASIDE}|{DELETING})-([0-9]+)")

MOST_BYTES = 1 << 30
"""Of a manifest; millions of tensors take less."""
MOST_BLOCK_BYTES = 64 << 20
"""A reader has memory for one block at least, in each of its threads."""
MOST = 2**53
"""Larger whole numbers are not exact in every reader of JSON."""
MOST_ELEMENTS = 2**58
"""So that their bytes, and sums of those, are numbers of 64 bits."""
MOST_DIMENSIONS = 32
LAST_TIME = 250_000_000_000.0
"""A little before the year 9900: what comes later no calendar can show."""
_TENSOR = re.compile(r"([A-Z0-9_]{1,16})\[((?:[0-9]{1,19}(?:,[0-9]{1,19})*,?)?)\]")

PREFIX = "xxh3_64:"
BLOCKS_PREFIX = "xxh3_64-blocks:"
BLOCK_BYTES = 256 << 10
"""Of a chunk: small enough that a piece of it is read with few bytes around it, and that a block
is still in the cache when it is written or used after its digest was taken."""


def step_name(step: int) -> str:
    """The name of the committed checkpoint of a step, e.g. ``step-0000001000``.

    Raises:
        ValueError: the step is negative or has more than ten digits.
    """
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step {step} is not within 0..{MAX_STEP}")
    return f"step-{step:010d}"


def parse_step(name: str) -> int | None:
    """The step of a committed checkpoint's name; None for every other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def aside_name(step: int, kind: str, number: int) -> str:
    """The name of what is not committed, e.g. ``step-0000001000.staged-0003``.

    Args:
        step: As in `step_name`.
        kind: STAGED, whose number is the attempt; SET_ASIDE or DELETING, which are counted.
        number: From 1 on.

    Raises:
        ValueError: the step or the number is out of range.
    """
    if number < 1:
        raise ValueError(f"{number} is not a number counted from 1")
    return f"{step_name(step)}.{kind}-{number:0{4 if kind == STAGED else 1}d}"


def parse_aside(name: str, kind: str) -> tuple[int, int] | None:
    """Step and number of a name that `aside_name` gives to this kind; None for every other name."""
    match = _ASIDE.fullmatch(name)
    if match is None or match[2] != kind or int(match[3]) < 1:
        return None
    step, number = int(match[1]), int(match[3])
    return (step, number) if aside_name(step, kind, number) == name else None


def count(value: object, most: int = MOST) -> bool:
    """Whether it is a whole number from 0 on."""
    return type(value) is int and 0 <= value <= most


def _number(value: object) -> bool:
    """Whether it is a number; NaN and infinities are, which a loss may be."""
    return type(value) is float or (type(value) is int and -MOST <= value <= MOST)


def _text(value: object) -> bool:
    return type(value) is str


def _dictionary(value: object) -> bool:
    return type(value) is dict


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "run_id": _text,
    "name": _text,
    "step": lambda value: count(value, MAX_STEP),
    "attempt": count,
    "attempt_token": _text,
    "created": lambda value: _number(value) and 0 <= value <= LAST_TIME,
    "world_size": count,
    "mesh": lambda value: _dictionary(value) and all(map(count, value.values())),
    "engine": _text,
    "block_bytes": lambda value: count(value, MOST_BLOCK_BYTES) and value > 0,
    "data": _dictionary,
    "rng": lambda value: value is None or _dictionary(value),
    "versions": _dictionary,
    "extra": _dictionary,
    "files": lambda value: type(value) in {list, dict},
    "tensors": _dictionary,
    "own": lambda value: type(value) is list,
    "metrics": lambda value: _dictionary(value) and all(map(_number, value.values())),
    "self_digest": _text,
}


def _require(raw: dict[str, Any]) -> None:
    """Refuse a manifest with a field that is not what it must be."""
    for name, fits in _CHECKS.items():
        if name in raw and not fits(raw[name]):
            raise ValueError(f"{name} is {shown(raw[name])}")


def file_of(raw: Any) -> tuple[str, int, str]:
    """Name, bytes and digest of one file.

    Raises:
        ValueError: they are not.
    """
    if type(raw) is not dict:
        raise ValueError(f"{shown(raw)} stands for a file")
    name, size, digest = raw.get("name"), raw.get("size"), raw.get("digest")
    # One condition for what is right: a manifest has a file for each rank.
    if type(name) is str and type(digest) is str and type(size) is int and 0 <= size <= MOST:
        return name, size, digest
    if not (isinstance(name, str) and isinstance(digest, str)):
        what = f"{shown(name)} for its name, {shown(digest)} for its digest"
        raise ValueError(f"a file has {what}")  # noqa: TRY004 - one kind for all of them
    raise ValueError(f"file {shown(name)} has {shown(size)} for its size")


def _tensor_of(name: str, text: Any) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of one tensor; whether there is such a dtype its reader knows."""
    form = _form(text) if isinstance(text, str) else None
    if form is None or not name:
        raise ValueError(f"tensor {shown(name)} has {shown(text)} for its dtype and shape")
    return form


@lru_cache(maxsize=1024)
def _form(text: str) -> tuple[str, tuple[int, ...]] | None:
    match = _TENSOR.fullmatch(text)
    if match is None:
        return None
    shape = tuple(int(size) for size in match[2].split(",") if size)
    if len(shape) > MOST_DIMENSIONS or 0 in shape or math.prod(shape) > MOST_ELEMENTS:
        require_shape(shape)
    return match[1], shape


def require_shape(shape: tuple[Any, ...]) -> None:
    """Refuse sizes that no tensor has.

    Raises:
        ValueError: they are too many, too large, or no whole numbers.
    """
    if len(shape) > MOST_DIMENSIONS or not all(count(size, MOST_ELEMENTS) for size in shape):
        raise ValueError(f"{shown(shape)} is no tensor's shape")
    # Also where one of them is 0: those beside it are multiplied too.
    if math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"{shown(shape)} is too large for a tensor")


def shown(value: object) -> str:
    """A value for a message, in one line that no terminal obeys, and not without end."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004


def bytes_digest(content: bytes) -> str:
    """The digest of some bytes, e.g. ``xxh3_64:2d06800538d394c2``."""
    return PREFIX + xxhash.xxh3_64_hexdigest(content)


def block_digest(block: memoryview | bytes) -> int:
    """The digest of one block as an unsigned number of 64 bits."""
    value: int = xxhash.xxh3_64_intdigest(block)
    return value


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
    created: float = field(default_factory=clock.now)
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

    def __getstate__(self) -> dict[str, Any]:
        """As few bytes as its file: rank 0 sends the chosen one to all ranks."""
        return vars(self) | {"packed": _packed(self), "files": None, "tensors": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        packed = state.pop("packed")
        vars(self).update(state)
        self.files = _files(packed["files"])
        self.tensors = _tensors(packed["tensors"], packed.get("own", []))


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
        file.write(body + sealed_by(manifest.self_digest))
        file.flush()
        points.reach("manifest.flush", path=path, fd=file.fileno(), step=manifest.step)
        os.fsync(file.fileno())


def plain(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says beside its files and tensors, as JSON has it; see `of_plain`.

    Raises:
        CheckpointError: it holds something that would not come back from JSON as it is.
    """
    raw = asdict(replace(manifest, files=[], tensors=[]))
    _require_string_keys(raw, "manifest")
    try:
        json.dumps(raw)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"manifest of step {manifest.step}: {error}") from error
    return raw


def of_plain(raw: dict[str, Any]) -> Manifest:
    """The manifest without files and tensors of which `plain` gave this.

    Raises:
        TornCheckpoint: it is of something else.
    """
    try:
        _require({key: value for key, value in raw.items() if key not in {"files", "tensors"}})
        return Manifest(**raw)
    except (TypeError, ValueError, KeyError) as error:
        raise TornCheckpoint(f"manifest is not as hpctrain writes it: {error}") from error


def load(path: Path) -> Manifest:
    """Read a manifest, every byte of which is as it was written.

    Raises:
        TornCheckpoint: missing, cut or damaged; the message is the reason alone.
        OtherFormat: it has a format of another hpctrain.
        FileSystemFault: it cannot be read, and nobody knows what is in it.
    """
    try:
        return parse(_read(path))
    except OtherFormat as error:
        raise OtherFormat(f"{path.parent.name}: {error}") from None


def parse(content: bytes) -> Manifest:
    """The manifest that these bytes of its file hold.

    Raises:
        TornCheckpoint: see `load`.
        OtherFormat: see `load`.
    """
    raw = _parsed(content)
    version = raw.get("format")
    if not isinstance(version, int) or version < OLDEST - 1:
        raise TornCheckpoint(f"manifest has format {version!r}, which no hpctrain writes")
    end = len(content) - len(sealed_by(bytes_digest(b"")))
    is_proved = content[end:] == sealed_by(bytes_digest(content[:end]))
    is_sealed = content[end:] == sealed_by(str(raw.get("self_digest")))
    # One flipped bit makes a 2 of a 3: a seal that does not hold comes before the number.
    if not OLDEST <= version <= FORMAT and (is_proved or not is_sealed):
        raise OtherFormat(f"manifest has format {version}, {_who_reads(version)}")
    if is_proved:
        return _built(raw)
    if is_sealed:
        raise TornCheckpoint("manifest's own digest does not match")
    if not content.endswith(b"}\n"):
        raise TornCheckpoint(f"manifest is cut: it ends after {len(content):,} bytes")
    raise TornCheckpoint("manifest's bytes are not as they were written")


def _who_reads(version: int) -> str:
    if version > FORMAT:
        return f"this hpctrain reads up to {FORMAT}; use a newer hpctrain"
    return (
        "which hpctrain 0.1.0 can read and this one cannot: `hpctrain checkpoints export` of 0.1.0 "
        "writes what `hpctrain checkpoints import` of this one reads"
    )


def _read(path: Path) -> bytes:
    try:
        points.reach("read.manifest", path=path, step=parse_step(path.parent.name))
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
    field_names = {f.name for f in fields(Manifest)}
    values = {key: value for key, value in raw.items() if key in field_names}
    try:
        _require(values | {key: raw[key] for key in raw.keys() & {"own"}})
        values["files"] = _files(raw["files"])
        values["tensors"] = _tensors(raw["tensors"], raw.get("own", []))
        manifest = Manifest(**values)
    except (KeyError, TypeError) as error:
        raise TornCheckpoint(f"manifest lacks something: {error}") from error
    except ValueError as error:
        raise TornCheckpoint(f"manifest is not as hpctrain writes it: {error}") from error
    problem = files_problem(manifest.files)
    if problem:
        raise TornCheckpoint(problem)
    return manifest


def _files(raw: Any) -> list[FileEntry]:
    if type(raw) is list:
        return [FileEntry(*file_of(file)) for file in raw]
    shards, others = packing.unpack_files(raw, BLOCKS_PREFIX)
    for size in {size for _, size, _ in shards}:
        if not count(size):
            raise ValueError(f"a shard has {shown(size)} for its size")
    return [FileEntry(*file) for file in (*shards, *map(file_of, others))]


def _tensors(written: dict[str, Any], own: list[Any]) -> list[TensorEntry]:
    entries = [TensorEntry(name, *_tensor_of(name, text)) for name, text in written.items()]
    for tensors, ranks in packing.unpack_tensors(own):
        alike = [(name.split("*", 1), _tensor_of(name, text)) for name, text in tensors.items()]
        entries += [
            TensorEntry(f"{head}{rank:05d}{tail}", dtype, shape)
            for rank in ranks
            for (head, tail), (dtype, shape) in alike
        ]
    if own and len({entry.name for entry in entries}) != len(entries):
        raise ValueError("a tensor of a rank stands there twice")
    return entries


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
    raw = asdict(replace(manifest, files=[], tensors=[]))
    del raw["self_digest"]
    raw |= _packed(manifest)
    _require_string_keys(raw, "manifest")
    try:
        _require(raw)
        for tensors in (raw["tensors"], *(rule["tensors"] for rule in raw.get("own", []))):
            for name, text in tensors.items():
                _tensor_of(name, text)
    except ValueError as error:  # it would be committed, and never loaded
        raise CheckpointError(f"manifest of step {manifest.step}: {error}") from error
    try:
        text = json.dumps(raw, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"manifest of step {manifest.step} cannot be written as JSON: {error}"
        ) from error
    return text.removesuffix("\n}").encode("ascii")


def _packed(manifest: Manifest) -> dict[str, Any]:
    """Files and tensors in as few bytes as their number asks for."""
    files = [(entry.name, entry.size, entry.digest) for entry in manifest.files]
    tensors = [(entry.name, entry.text) for entry in manifest.tensors]
    packed = packing.pack_files(files, BLOCKS_PREFIX)
    written, own = packing.pack_tensors(tensors)
    raw = {"files": packed or [vars(entry) for entry in manifest.files], "tensors": dict(written)}
    return raw | ({"own": own} if own else {})


def sealed_by(digest: str) -> bytes:
    """The end of a JSON file that proves itself: the digest of all bytes before this entry."""
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
