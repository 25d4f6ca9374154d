"""What ranks would report of their files, without a file: for tests of tables alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.checkpoint.format import shard, table
from hpctrain.checkpoint.format.layout import assemble, part_of
from tests.support import checkpoints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.checkpoint.format.index import ChunkIndex
    from hpctrain.checkpoint.format.layout import RankPart
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.shard import ShardPiece

BLOCK_BYTES = 64


def whole(name: str, dtype: str, *shape: int) -> ShardPiece:
    """All of a tensor."""
    return shard.ShardPiece(name, dtype, shape, (0,) * len(shape), shape)


def part(rank: int, pieces: Sequence[ShardPiece]) -> RankPart:
    """One rank's part, with digests made up; nothing where it has no pieces."""
    if not pieces:
        return part_of([], None)
    return part_of(pieces, checkpoints.unwritten(rank, pieces, BLOCK_BYTES))


def made(ranks: Sequence[Sequence[ShardPiece]]) -> tuple[ChunkIndex, Manifest]:
    """Index and manifest of a checkpoint of these ranks."""
    parts = [part(rank, pieces) for rank, pieces in enumerate(ranks)]
    files, tensors, chunks = assemble(parts, BLOCK_BYTES)
    listed = checkpoints.manifest(1000, [], block_bytes=BLOCK_BYTES)
    listed.files = [*files, table.entry_of(chunks.dump())]
    listed.tensors = tensors
    return chunks, listed
