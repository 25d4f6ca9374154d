"""One digest for all that a checkpoint holds: xxh3_64, which costs less than reading the bytes.

What is read in parts (a shard) has a digest for each block, so that a reader proves just the bytes
that it takes; what is read as a whole (the chunk table, the manifest) has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from hpctrain.base.files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PREFIX = "xxh3_64:"
BLOCKS_PREFIX = "xxh3_64-blocks:"
BLOCK_BYTES = 256 << 10
"""Of a chunk: small enough that a piece of it is read with few bytes around it, and that a block
is still in the cache when it is written or used after its digest was taken."""
READ_BYTES = 1 << 20


def bytes_digest(content: bytes) -> str:
    """The digest of some bytes, e.g. ``xxh3_64:2d06800538d394c2``."""
    return PREFIX + xxhash.xxh3_64_hexdigest(content)


def file_digest(path: Path, *, on_bytes: Callable[[int], object] | None = None) -> str:
    """The digest of a file's bytes, read in parts: memory stays small whatever its size.

    Args:
        path: The file.
        on_bytes: Told after each part how many bytes were read in it.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = xxhash.xxh3_64()
    part = memoryview(bytearray(READ_BYTES))
    with open_plain(path) as file:
        while count := file.readinto(part):
            hasher.update(part[:count])
            if on_bytes is not None:
                on_bytes(count)
    return PREFIX + hasher.hexdigest()


def block_digest(block: memoryview | bytes) -> int:
    """The digest of one block as an unsigned number of 64 bits."""
    value: int = xxhash.xxh3_64_intdigest(block)
    return value
