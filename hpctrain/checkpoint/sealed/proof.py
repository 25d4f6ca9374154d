"""What a file's own format says of it, before anybody has sealed it.

A zip archive (`torch.save`, `numpy.savez`) has its directory at its end and a CRC of each member:
one that a kill has cut has no end, and one with a hole in it the wrong sums. A safetensors file
names its length, and has no sums: it can say that it is cut, not that it is whole. Nothing is
unpickled. tests/unit/checkpoint/sealed/test_proof.py holds the promises.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

from hpctrain.core.base.files import plain_descriptor

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import BufferedReader
    from pathlib import Path

_ZIP = b"PK\x03\x04"
_SAFETENSORS = ".safetensors"
_LENGTH = struct.Struct("<Q")
MOST_HEADER_BYTES = 100 << 20
"""As the safetensors library has it."""
READ_BYTES = 1 << 20
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
        return file.read(len(_ZIP)) == _ZIP and _zip_problem(file, on_bytes) is None


def cut(path: Path, on_bytes: Callable[[int], object] | None = None) -> str | None:
    """Return why a file cannot be complete, by its own format; None if nothing shows that.

    Raises:
        OSError: it cannot be read.
    """
    with _open(path) as file:
        if file.read(len(_ZIP)) == _ZIP:
            return _zip_problem(file, on_bytes)
        if path.name.endswith(_SAFETENSORS):
            return _safetensors_problem(file)
    return None


def _open(path: Path) -> BufferedReader:
    descriptor = plain_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW)
    return open(descriptor, "rb")  # noqa: PTH123 - a descriptor has no path


def _zip_problem(file: BufferedReader, on_bytes: Callable[[int], object] | None) -> str | None:
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
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
