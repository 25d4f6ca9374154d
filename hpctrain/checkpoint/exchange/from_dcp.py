"""Import from a directory of torch.distributed.checkpoint, of any number of ranks."""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.checkpoint.exchange.contents import (
    MODEL,
    PREFIXES,
    Contents,
    NestedValue,
    Tensor,
)
from hpctrain.checkpoint.exchange.untrusted import (
    DTYPE_NAMES,
    Inert,
    load,
    raw,
    unpickled,
)
from hpctrain.checkpoint.format.manifest import count, require_shape
from hpctrain.checkpoint.format.shard import DTYPES
from hpctrain.checkpoint.format.table import boxes_meet
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Bytes

METADATA = ".metadata"
_CORE = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"


class _Size(tuple[int, ...]):
    """Stands for torch.Size."""

    __slots__ = ()


class _Index(Inert):
    """Stands for MetadataIndex, the key of each stored item."""

    fqn: str
    offset: _Size | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.fqn)


class _Metadata(Inert):
    state_dict_metadata: Any = None
    planner_data: Any = None
    storage_data: Any = None


class _TensorEntry(Inert):
    properties: Any = None
    size: Any = None
    chunks: Any = None


class _Properties(Inert):
    dtype: Any = None

    def __setstate__(self, state: object) -> None:
        """The dtype comes first of a tuple."""
        if isinstance(state, tuple) and state:
            self.dtype = state[0]


class _Stored(Inert):
    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None


_NAMES: dict[tuple[str, str], Any] = {
    (_CORE, "Metadata"): _Metadata,
    (_CORE, "TensorStorageMetadata"): _TensorEntry,
    (_CORE, "BytesStorageMetadata"): Inert,
    (_CORE, "ChunkStorageMetadata"): Inert,
    (_CORE, "TensorProperties"): _Properties,
    (_OLD, "TensorProperties"): _Properties,
    (_CORE, "MetadataIndex"): _Index,
    (_CORE, "StorageMeta"): Inert,
    (_CORE, "_MEM_FORMAT_ENCODING"): Inert,
    (_OLD, "MEM_FORMAT_ENCODING"): Inert,
    (_FILES, "_StorageInfo"): _Stored,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): Inert,
    ("pathlib", "PosixPath"): Inert,
    ("pathlib", "Path"): Inert,
    ("collections", "OrderedDict"): dict,
} | {("torch", name): name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)}


@dataclass
class _Directory:
    """A checkpoint's directory and where each item of it lies."""

    path: Path
    stored: dict[str, list[tuple[tuple[int, ...], _Stored]]] = field(default_factory=dict)


def read(source: Path) -> Contents:
    """What the directory holds; tensors are read when they are asked for.

    Raises:
        CheckpointError: it is cut, or wants to run something.
    """
    metadata = unpickled(source / METADATA, _NAMES)
    try:
        return _contents(source, metadata)
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{source / METADATA} is not torch DCP's: {error}") from error


def _contents(source: Path, metadata: Any) -> Contents:
    if not isinstance(metadata, _Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(
            f"{source / METADATA} is not torch DCP's, or of a newer version of it"
        )
    directory = _Directory(source)
    for index, stored in metadata.storage_data.items():
        if not isinstance(index, _Index) or not isinstance(stored, _Stored):
            raise _odd(source)
        numbers = (stored.offset, stored.length)
        if not isinstance(stored.relative_path, str) or not isinstance(index.fqn, str):
            raise _odd(source)
        if not all(count(one) for one in numbers):
            raise _odd(source)
        place = (tuple(index.offset or ()), stored)
        directory.stored.setdefault(index.fqn, []).append(place)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    # The order in which the program named its state; the entries are ordered by rank.
    order = {name: number for number, name in enumerate(paths)}
    entries = metadata.state_dict_metadata.items()
    leaves = []
    for name, entry in sorted(entries, key=lambda item: order.get(item[0], len(order))):
        path = paths.get(name, (name,))
        if not isinstance(path, tuple) or not path or not isinstance(name, str):
            raise _odd(source)
        if not all(isinstance(key, str | int) for key in path):
            raise CheckpointError(f"{source / METADATA} has {path!r} for the place of {name}")
        if isinstance(entry, _TensorEntry):
            leaves.append(NestedValue(path, _tensor(directory, name, entry)))
        else:
            leaves.append(NestedValue(path, None, _value(directory, name)))
    contents = Contents("dcp", source, leaves)
    names = [leaf.tensor.name for leaf in leaves if leaf.tensor is not None]
    contents.full_names = (
        all(len(leaf.path) == 1 for leaf in leaves)
        and all(name.startswith(PREFIXES) for name in names)
        and not all(name.startswith(MODEL) for name in names)
    )
    return contents


def _odd(source: Path) -> CheckpointError:
    return CheckpointError(f"{source / METADATA} names items as torch's own writer does not")


def _tensor(directory: _Directory, name: str, entry: _TensorEntry) -> Tensor:
    dtype = DTYPE_NAMES.get(entry.properties.dtype)
    shape = tuple(entry.size)
    require_shape(shape)
    if dtype is None:
        raise CheckpointError(
            f"{directory.path}: {name} is {entry.properties.dtype}, which cannot be stored"
        )
    boxes = _boxes(directory, name, entry, shape, dtype)

    def content() -> Bytes:
        whole = np.empty((*shape, DTYPES[dtype]), np.uint8)
        for begin, extent, stored in boxes:
            part = _loaded(directory, name, stored)
            if not isinstance(part, torch.Tensor) or (
                DTYPE_NAMES.get(str(part.dtype).removeprefix("torch.")),
                tuple(part.shape),
            ) != (dtype, extent):
                raise CheckpointError(
                    f"{directory.path / stored.relative_path}: what lies there is not the part of "
                    f"{name} that {METADATA} says"
                )
            at = tuple(slice(low, low + count) for low, count in zip(begin, extent, strict=True))
            whole[at] = raw(part).reshape(*extent, DTYPES[dtype])
        return whole.reshape(-1)

    return Tensor(name, dtype, shape, content)


def _boxes(
    directory: _Directory, name: str, entry: _TensorEntry, shape: tuple[int, ...], dtype: str
) -> list[tuple[tuple[int, ...], tuple[int, ...], _Stored]]:
    """Where each part goes and lies: all of the tensor, each element once."""
    where = dict(directory.stored.get(name, []))
    by_begin = {}
    for chunk in entry.chunks:
        begin, extent = tuple(chunk.offsets), tuple(chunk.sizes)
        if len(begin) != len(shape) or not all(
            0 <= low <= low + count <= size
            for low, count, size in zip(begin, extent, shape, strict=True)
        ):
            raise CheckpointError(f"{directory.path}: a part of {name} does not lie in it")
        require_shape(begin)
        if math.prod(extent) * DTYPES[dtype] > getattr(where.get(begin), "length", 2**53):
            raise CheckpointError(
                f"{directory.path}: the part of {name} at {begin} is larger than what was written"
            )
        if math.prod(extent) and begin not in where:
            raise CheckpointError(f"{directory.path}: nobody wrote the part of {name} at {begin}")
        if math.prod(extent):
            by_begin[begin] = (begin, extent, where[begin])
    boxes = list(by_begin.values())
    low = np.array([begin for begin, _, _ in boxes], np.int64).reshape(len(boxes), len(shape))
    high = low + np.array([extent for _, extent, _ in boxes], np.int64).reshape(low.shape)
    together = sum(math.prod(extent) for _, extent, _ in boxes)
    if together != math.prod(shape) or boxes_meet(low, high):
        raise CheckpointError(f"{directory.path}: the parts of {name} do not make up {shape}")
    return boxes


def _value(directory: _Directory, name: str) -> Callable[[], Any]:
    def value() -> Any:
        places = directory.stored.get(name, [])
        if len(places) != 1:
            raise CheckpointError(f"{directory.path}: {name} was written {len(places)} times")
        return _loaded(directory, name, places[0][1])

    return value


def _loaded(directory: _Directory, name: str, stored: _Stored) -> Any:
    file = str(stored.relative_path)
    if "/" in file or "\0" in file or file in {"", ".", ".."}:
        raise CheckpointError(
            f"{directory.path}: {name} lies in {file!r}, outside of the directory"
        )
    if stored.transform_descriptors:
        raise CheckpointError(
            f"{directory.path}: {name} is stored as {stored.transform_descriptors}, which is not "
            "read here; save it without"
        )
    path = directory.path / file
    content = b""
    try:
        with path.open("rb") as handle:
            end = os.fstat(handle.fileno()).st_size  # before memory is asked for
            if stored.offset + stored.length <= end:
                content = os.pread(handle.fileno(), stored.length, stored.offset)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) != stored.length:
        raise CheckpointError(f"{path} is cut: {name} lies behind its end")
    return load(io.BytesIO(content), where=f"{path} ({name})")
