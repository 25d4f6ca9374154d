"""Headers of safetensors files: read with distrust, since anybody may have written them."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.exchange.tensors import Tensor
from hpctrain.checkpoint.format.shard import DTYPES
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.checkpoint.exchange.tensors import Bytes

MAX_HEADER = 100_000_000
"""As safetensors itself has it: a longer one is no header."""
READ_BYTES = 64 << 20


@dataclass
class Header:
    """What a file holds."""

    tensors: list[Tensor]
    metadata: dict[str, str] = field(default_factory=dict)


def read(path: Path) -> Header:
    """The header of a file, checked to fit the file.

    Raises:
        CheckpointError: the file is cut, or no safetensors file.
    """
    try:
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
        raise CheckpointError(f"{path} is no safetensors file: {error}") from None
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


def _tensor(path: Path, base: int, name: str, entry: dict[str, Any]) -> Tensor:
    dtype, shape, (low, high) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, which is not known here")
    if not all(type(one) is int and one >= 0 for one in (*shape, low, high)):
        raise ValueError(f"{name} has a shape or an offset that is no whole number")
    if math.prod(shape) * DTYPES[dtype] != high - low:
        raise ValueError(f"{name} takes {high - low:,} bytes, which is not {dtype}{shape}")

    def content() -> Bytes:
        return _read(path, base + low, high - low)

    return Tensor(name, dtype, tuple(shape), content)


def _read(path: Path, position: int, count: int) -> Bytes:
    content = np.empty(count, np.uint8)
    memory, done = content.data, 0
    try:
        with path.open("rb", buffering=0) as file:
            while done < count:
                part = memory[done : done + READ_BYTES]
                got = os.preadv(file.fileno(), [part], position + done)
                if not got:
                    raise CheckpointError(f"{path} ends at byte {position + done:,}: it was cut")
                done += got
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return content
