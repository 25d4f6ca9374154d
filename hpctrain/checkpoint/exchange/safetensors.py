"""Safetensors files and Hugging Face folders: import, export, and what lies beside the weights.

Headers, indices and configs are read with distrust. No torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.exchange.contents import Contents, NestedValue, Tensor, carried, same
from hpctrain.checkpoint.exchange.export import Written, compare, flush, placing
from hpctrain.checkpoint.format.shard import DTYPES, SAFETENSORS, encode_header
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Bytes
    from hpctrain.checkpoint.exchange.export import OnBytes


STEM = "model"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = STEM + INDEX_SUFFIX
WHOLE = f"{STEM}.safetensors"
STATE_KEY = "hpctrain"
"""In the first file of an export of everything: the rest of the manifest. Names are ours then."""
MAX_HEADER = 100_000_000
"""As safetensors itself has it: a longer one is no header."""
GB = 10**9
MAX_AXES, MAX_SIZE = 64, 2**63
SHOWN = 200
"""Most characters of foreign text in an error of one line."""


@dataclass(frozen=True)
class StoredTensor(Tensor):
    """A tensor in a file: whole, or some of its rows.

    Attributes:
        position: Of its first byte in the file.
    """

    path: Path
    position: int

    @classmethod
    def at(
        cls, path: Path, position: int, name: str, dtype: str, shape: tuple[int, ...]
    ) -> StoredTensor:
        """One that the header says lies there."""
        count = math.prod(shape) * DTYPES[dtype]
        return cls(name, dtype, shape, partial(_read, path, position, count), path, position)

    def start(self, count: int) -> Bytes:
        """The bytes of so many of its first values, or of all where it has fewer.

        Raises:
            CheckpointError: see `rows`.
        """
        most = min(count * DTYPES[self.dtype], self.nbytes)
        return _read(self.path, self.position, most)

    def rows(self, first: int, count: int) -> Bytes:
        """The bytes of so many of its rows, along its first axis, and nothing else of the file.

        Raises:
            CheckpointError: the file cannot be read, or was cut since.
        """
        row = math.prod(self.shape[1:]) * DTYPES[self.dtype]
        return _read(self.path, self.position + first * row, count * row)


@dataclass
class Header:
    """What a file holds."""

    tensors: list[StoredTensor]
    metadata: dict[str, str] = field(default_factory=dict)


def read_header(path: Path) -> Header:
    """The header of a file, checked to fit the file.

    Raises:
        CheckpointError: the file is cut, or no safetensors file.
    """
    try:
        if not path.is_file():  # a FIFO would keep us waiting
            raise CheckpointError(f"{path} is no file")
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if length < 2 or length > min(MAX_HEADER, size - 8):  # noqa: PLR2004 - "{}"
                raise CheckpointError(
                    f"{path} is cut or no safetensors file: its header takes {length:,} bytes, the "
                    f"file has {size:,}"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        raw = json.loads(text, object_pairs_hook=_once)
        metadata = raw.pop("__metadata__", {})
        tensors = [_tensor(path, 8 + length, name, entry) for name, entry in raw.items()]
        spans = sorted(entry["data_offsets"] for entry in raw.values())
        metadata = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {_short(error)}") from None
    end = 0
    for low, high in spans:
        if low != end:
            raise CheckpointError(
                f"{path} is no safetensors file: its tensors overlap or leave gaps"
            )
        end = high
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path} is cut or damaged: its header counts {8 + length + end:,} bytes, the file has "
            f"{size:,}"
        )
    return Header(tensors, metadata)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name stands twice in its header")
    return names


def _short(text: object) -> str:
    line = " ".join(ascii(str(text))[1:-1].split())
    return line if len(line) <= SHOWN else line[:SHOWN] + "..."


def _tensor(path: Path, base: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    dtype, shape, (low, high) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, which is not known here")
    if not all(type(number) is int and number >= 0 for number in (*shape, low, high)):
        raise ValueError(f"{name} has a shape or an offset that is no whole number")
    if len(shape) > MAX_AXES or max((*shape, low, high)) >= MAX_SIZE:
        raise ValueError(f"{name} has a shape or an offset that no tensor has")
    if math.prod(shape) * DTYPES[dtype] != high - low:
        raise ValueError(f"{name} takes {high - low:,} bytes, which is not {dtype}{shape}")
    return StoredTensor.at(path, base + low, name, dtype, tuple(shape))


def _read(path: Path, position: int, count: int) -> Bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            content = np.empty(count, np.uint8)
            done = file.readinto(content.data)  # not by numpy: it takes a failed read for an end
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if done < count:
        raise CheckpointError(f"{path} ends at byte {position + done:,}: it was cut")
    return content


@dataclass(frozen=True)
class _File:
    name: str
    tensors: list[Tensor]
    header: bytes

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def write(
    directory: Path,
    tensors: Sequence[Tensor],
    *,
    max_shard_bytes: int = 5 * GB,
    state: dict[str, object] | None = None,
    beside: Mapping[str, bytes] | None = None,
    stem: str = STEM,
    on_bytes: OnBytes = lambda _: None,
) -> Written:
    """Write, flush, read back and compare; only then give the files their names.

    `tensors` have their final names. A file holds at most `max_shard_bytes` of tensors, unless it
    has just one. `state` is the rest of a checkpoint that is exported whole. `beside` are other
    files of the folder, by name. `stem` begins the files' names. `on_bytes` gets the bytes written
    and the bytes compared.

    Raises:
        UsageError: one of the files is there already.
        CheckpointError: there is no room, the disk refused, or what was read back is not the same.
    """
    files = _split_files(tensors, max_shard_bytes, state, stem)
    others = dict(beside or {})
    if len(files) > 1:
        others[INDEX] = _index_bytes(files)
    names = [*(file.name for file in files), *others]
    need = sum(file.size for file in files) + sum(map(len, others.values()))
    with placing(directory, names, need) as place:
        for file in files:
            _write(place(file.name), file, on_bytes)
        for name, content in others.items():
            path = place(name)
            path.write_bytes(content)
            flush(path)
        verified = 0
        for file in files:
            got = {tensor.name: tensor for tensor in read_header(place(file.name)).tensors}
            verified += compare(file.tensors, got, on_bytes)
    sizes = [(directory / name, (directory / name).stat().st_size) for name in names]
    return Written(sizes, len(tensors), sum(tensor.nbytes for tensor in tensors), verified)


def _split_files(
    tensors: Sequence[Tensor], max_bytes: int, state: dict[str, object] | None, stem: str
) -> list[_File]:
    groups: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    total = len(groups)
    files = []
    for number, group in enumerate(groups, start=1):
        part = f"-{number:05d}-of-{total:05d}" if total > 1 else ""
        name = f"{stem}{part}.safetensors"
        about = {"format": "pt"}
        if state is not None and number == 1:
            about[STATE_KEY] = json.dumps(state)
        files.append(_File(name, group, _header(group, about)))
    return files


def _header(tensors: Sequence[Tensor], about: dict[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": about}
    position = 0
    for tensor in tensors:
        if tensor.dtype not in SAFETENSORS:
            raise CheckpointError(
                f"{tensor.name} is {tensor.text}, and safetensors has no such dtype; export it "
                "with --to torch"
            )
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    return encode_header(entries)


def _index_bytes(files: Sequence[_File]) -> bytes:
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    where = {tensor.name: file.name for file in files for tensor in file.tensors}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def _write(path: Path, file: _File, on_bytes: OnBytes) -> None:
    with path.open("xb") as out:
        out.write(file.header)
        for tensor in file.tensors:
            out.write(tensor.read().data)
            on_bytes(tensor.nbytes)
    flush(path)


def read(source: Path) -> Contents:
    """What the files hold.

    Raises:
        CheckpointError: they are cut, do not belong together, or are none.
    """
    contents = Contents("safetensors", source, [])
    tensors: dict[str, Tensor] = {}
    for path in files(source):
        header = read_header(path)
        if "DCP_SHARDING_INFO" in header.metadata:
            raise CheckpointError(
                f"{path} is one rank's part of a sharded checkpoint, not a whole one; put them "
                "together first (torch's consolidate_safetensors_files), or import the whole "
                "directory of a run's checkpoint"
            )
        if STATE_KEY in header.metadata:
            _take_state(contents, header.metadata[STATE_KEY])
        for tensor in header.tensors:
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                raise CheckpointError(f"{path} holds {_short(tensor.name)}, as another file does")
    _require_indexed(source, set(tensors))
    contents.leaves = [NestedValue((name,), tensor) for name, tensor in tensors.items()]
    return contents


def _take_state(contents: Contents, text: str) -> None:
    """Our own export of everything has the rest of the manifest in it."""
    try:
        state = json.loads(text)
        contents.step = int(state["step"])
        contents.state = carried(state, str(contents.source))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{contents.source}: its {STATE_KEY} is not ours: {error}") from None
    contents.full_names = True


def files(source: Path) -> list[Path]:
    """The files that a source is made of.

    Raises:
        CheckpointError: there are none, or an index names others.
    """
    if source.is_file():
        return _listed(source) if source.name.endswith(INDEX_SUFFIX) else [source]
    index = _index(source)
    if index is not None:
        return _listed(index)
    whole = source / WHOLE  # others may lie beside it, as consolidated.safetensors
    files = [whole] if whole.is_file() else sorted(source.glob("[!.]*.safetensors"))
    if not files:
        raise CheckpointError(f"{source} has no *.safetensors in it")
    return files


def _index(source: Path) -> Path | None:
    if source.is_file():
        return source if source.name.endswith(INDEX_SUFFIX) else None
    indexes = sorted(source.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise CheckpointError(f"{source} has {len(indexes)} indices; name the one that is meant")
    if indexes and (source / WHOLE).is_file() and WHOLE not in _weight_map(indexes[0]).values():
        raise CheckpointError(
            f"{source} has {WHOLE} and {indexes[0].name}, which names other files; move one of "
            "them away, or name the one that is meant"
        )
    return indexes[0] if indexes else None


def _listed(index: Path) -> list[Path]:
    names = dict.fromkeys(_weight_map(index).values())
    for name in names:
        # An index must not be able to name a file outside of its own directory.
        if "/" in name or "\0" in name or name in {"", ".", ".."}:
            raise CheckpointError(
                f"{index} names '{_short(name)}', which is no file of its directory"
            )
        if not os.path.isfile(index.parent / name):  # noqa: PTH113 - Path's raises on long names
            raise CheckpointError(f"{index} names {_short(name)}, which is missing")
    return [index.parent / name for name in names]


def _require_indexed(source: Path, names: set[str]) -> None:
    """What the index names and what the files hold is the same."""
    index = _index(source)
    if index is None:
        return
    named = set(_weight_map(index))
    for name in sorted(named - names)[:1]:
        raise CheckpointError(f"{index} names {_short(name)}, which none of its files holds")
    for name in sorted(names - named)[:1]:
        raise CheckpointError(f"{index} does not name {_short(name)}, which one of its files holds")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        with index.open("rb") as file:
            listed = json.loads(file.read(MAX_HEADER))["weight_map"]
        return {str(name): str(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is no index of safetensors files: {_short(error)}"
        ) from None


CONFIG = "config.json"
MAX_CONFIG = 16 << 20
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Data alone: a folder's Python files stay behind, since `from_pretrained` may run them."""
MAX_COPIED = 256 << 20
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEAD = "lm_head.weight"
BASE = "base_weights"
"""Of a manifest's `extra`: what adapters stand on, and their config."""
ADAPTER = "adapter_model"
_LORA = re.compile(r"\.(lora_\w+)\.default(?=\.|$)")
_SAVED = re.compile(r"\.modules_to_save\.default\.")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UsageError: it has none, or something else under that name.
    """
    path = folder / CONFIG
    try:
        if not path.is_file():
            raise UsageError(f"{folder} has no {CONFIG}: it is no folder of Hugging Face's")
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} is no table of a model's sizes")
    return config


def beside(folder: Path, tensors: Sequence[Tensor]) -> dict[str, bytes]:
    """Return the files beside an export's weights by name, from the weights' original folder.

    Raises:
        UsageError: it is no such folder, or a file of it cannot be read.
    """
    config = read_config(folder)
    floats = {DTYPE_NAMES[one.dtype] for one in tensors if one.dtype in DTYPE_NAMES}
    config.pop("torch_dtype", None)  # as older ones call it
    if len(floats) == 1:
        config["dtype"] = floats.pop()
    files = {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    for name in COPIED:
        path = folder / name
        try:
            if path.is_file():
                with path.open("rb") as file:
                    files[name] = file.read(MAX_COPIED + 1)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        if len(files.get(name, b"")) > MAX_COPIED:
            raise UsageError(f"{path} is larger than any tokenizer's file; take it out of --like")
    return files


def untied(folder: Path, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The weights without a head that is the embedding, as transformers writes them."""
    config = read_config(folder)
    (head, *_) = [*(one for one in tensors if one.name == HEAD), None]
    if config.get("tie_word_embeddings") is not True or head is None:
        return list(tensors)
    alike = (one for one in tensors if one is not head and one.text == head.text)
    is_tied = any(same(one.read(), head.read()) for one in alike if "embed" in one.name)
    return [one for one in tensors if one is not head or not is_tied]


def adapters(
    extra: Mapping[str, Any], tensors: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, bytes]]:
    """Return a checkpoint's adapters under peft's names, and the config file beside them.

    `extra` is the manifest's, with BASE. `tensors` have their names in the wrapped model.
    """
    base = extra[BASE]
    config = base["adapter_config"] | {
        "base_model_name_or_path": base["source"],
        "inference_mode": True,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    named = [_SAVED.sub(".", _LORA.sub(r".\1", one.name)) for one in tensors]
    renamed = [replace(one, name=name) for one, name in zip(tensors, named, strict=True)]
    return renamed, {"adapter_config.json": text.encode()}
