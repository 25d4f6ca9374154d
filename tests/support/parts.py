"""What ranks would report of their files, without a file: for tests of tables alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.format import shard, table
from hpctrain.checkpoint.format.table import assemble, part_of
from tests.support import checkpoints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.shard import ShardPiece
    from hpctrain.checkpoint.format.table import RankPart

BLOCK_BYTES = 64


def whole(name: str, dtype: str, *shape: int) -> ShardPiece:
    """All of a tensor."""
    return shard.ShardPiece(name, dtype, shape, (0,) * len(shape), shape)


def part(rank: int, pieces: Sequence[ShardPiece]) -> RankPart:
    """One rank's part, with digests made up; nothing where it has no pieces."""
    if not pieces:
        return part_of([], None)
    sizes = [piece.nbytes for piece in pieces]
    offsets = len(shard.header(pieces)) + np.cumsum([0, *sizes], dtype=np.int64)
    blocks = sum(shard.blocks_of(size, BLOCK_BYTES) for size in sizes)
    digests = np.random.default_rng(rank).integers(0, 2**64, blocks, np.uint64)
    name = shard.file_name(rank)
    report = shard.ShardReport(name, int(offsets[-1]), "xxh3_64-blocks:0", offsets[:-1], digests)
    return part_of(pieces, report)


def made(ranks: Sequence[Sequence[ShardPiece]]) -> tuple[table.ChunkTable, Manifest]:
    """Table and manifest of a checkpoint of these ranks."""
    parts = [part(rank, pieces) for rank, pieces in enumerate(ranks)]
    files, tensors, chunks = assemble(parts, BLOCK_BYTES)
    listed = checkpoints.manifest(1000, [], block_bytes=BLOCK_BYTES)
    listed.files = [*files, table.entry_of(chunks.dump())]
    listed.tensors = tensors
    return chunks, listed
