"""Export as safetensors, in Hugging Face's layout. No torch.

One file `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index. Each file is
written tensor by tensor.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.checkpoint.exchange import headers
from hpctrain.checkpoint.exchange.export import Written, compare
from hpctrain.checkpoint.exchange.place import flush, placing
from hpctrain.checkpoint.format.shard import encode_header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.export import OnBytes
    from hpctrain.checkpoint.exchange.tensors import Tensor

STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
STATE_KEY = "hpctrain"
"""In the first file of an export of everything: the rest of the manifest. Names are ours then."""
GB = 10**9


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
    on_bytes: OnBytes = lambda _: None,
) -> Written:
    """Write, flush, read back and compare; only then do the files get their names.

    Args:
        directory: Where to; made where it is missing.
        tensors: Under the names that they shall have.
        max_shard_bytes: A file has no more of tensors, unless it has just one.
        state: The rest of a checkpoint that is exported as a whole.
        on_bytes: Told of bytes written and of bytes compared.

    Raises:
        UsageError: one of the files is there already.
        CheckpointError: there is no room, the disk refused, or what was read back is not the same.
    """
    files = _files(tensors, max_shard_bytes, state)
    index = _index(files) if len(files) > 1 else None
    names = [file.name for file in files] + ([INDEX] if index else [])
    need = sum(file.size for file in files) + len(index or b"")
    with placing(directory, names, need) as place:
        for file in files:
            _write(place.temporary(file.name), file, on_bytes)
        if index:
            path = place.temporary(INDEX)
            path.write_bytes(index)
            flush(path)
        verified = 0
        for file in files:
            got = {one.name: one for one in headers.read(place.temporary(file.name)).tensors}
            verified += compare(file.tensors, got, on_bytes)
        paths = place.finish()
    sizes = [(path, path.stat().st_size) for path in paths]
    return Written(sizes, len(tensors), sum(one.nbytes for one in tensors), verified)


def _files(
    tensors: Sequence[Tensor], max_bytes: int, state: dict[str, object] | None
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
        name = (
            f"{STEM}-{number:05d}-of-{total:05d}.safetensors"
            if total > 1
            else f"{STEM}.safetensors"
        )
        about = {"format": "pt"}
        if state is not None and number == 1:
            about[STATE_KEY] = json.dumps(state)
        files.append(_File(name, group, _header(group, about)))
    return files


def _header(tensors: Sequence[Tensor], about: dict[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": about}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    return encode_header(entries)


def _index(files: Sequence[_File]) -> bytes:
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    where = {tensor.name: file.name for file in files for tensor in file.tensors}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def _write(path: Path, file: _File, on_bytes: OnBytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "wb", buffering=0) as out:  # noqa: PTH123 - a descriptor
        _put(out.fileno(), memoryview(file.header))
        for tensor in file.tensors:
            content = tensor.read()
            _put(out.fileno(), content.data)
            on_bytes(tensor.nbytes)
    flush(path)


def _put(descriptor: int, content: memoryview) -> None:
    """All of it: a call may take less than it was given, 2 GiB at most."""
    done = 0
    while done < len(content):
        done += os.write(descriptor, content[done:])
