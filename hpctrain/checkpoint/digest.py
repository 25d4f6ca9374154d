"""One digest for all that a checkpoint holds: xxh3_64, which costs less than reading the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PREFIX = "xxh3_64:"
BLOCK_BYTES = 1 << 20


def bytes_digest(content: bytes) -> str:
    """The digest of some bytes, e.g. ``xxh3_64:2d06800538d394c2``."""
    return PREFIX + xxhash.xxh3_64_hexdigest(content)


def file_digest(path: Path, *, on_bytes: Callable[[int], object] | None = None) -> str:
    """The digest of a file's bytes, read in blocks: memory stays small whatever its size.

    Args:
        path: The file.
        on_bytes: Told after each block how many bytes were read in it.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = xxhash.xxh3_64()
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
            if on_bytes is not None:
                on_bytes(count)
    return PREFIX + hasher.hexdigest()
