"""What ranks would report of their files, without a file: for tests of tables alone."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

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


def made_2(ranks: Sequence[Sequence[ShardPiece]]) -> tuple[table.ChunkTable, Manifest]:
    """Table and manifest of a checkpoint of format 2, as an older hpctrain wrote it."""
    chunks, listed = made(ranks)
    rows = chunks.whole()
    columns = {field.name: getattr(rows, field.name) for field in fields(table.ChunkTable)}
    columns["digests"] = np.random.default_rng(0).integers(0, 2**64, len(rows.digests), np.uint64)
    old = table.ChunkTable(**columns)
    proofs = [8 * (1 + int(rows.file_blocks[rows.rows_in(at)[0]])) for at in set(rows.file)]
    shards = [
        replace(entry, size=entry.size - proof)
        for entry, proof in zip(listed.files[:-1], proofs, strict=True)
    ]
    files = [*shards, table.entry_of(dump_2(old))]
    return old, replace(listed, format=2, files=files)


def dump_2(chunks: table.ChunkTable) -> bytes:
    """A table of format 2 as it lies on disk."""
    return table.encode_columns({name: getattr(chunks, name) for name in table.COLUMNS})
