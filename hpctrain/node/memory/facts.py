"""What a copy in memory says beside its bytes, so that all ranks' copies make a checkpoint.

The same that ranks tell of their files of a checkpoint on disk (`checkpoint.format.layout`), as
JSON: what comes from another node is never unpickled. tests/unit/memory/test_stock.py holds the
promises.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.format import index
from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format.layout import FileLayout, RankPart, assemble, placed
from hpctrain.checkpoint.format.manifest import FileEntry
from hpctrain.checkpoint.format.shard import file_name
from hpctrain.checkpoint.format.table import entry_of
from hpctrain.errors import TornCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.checkpoint.format.index import ChunkIndex
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.shard import ShardPiece

_NARROW = frozenset({"own", "dtype", "ranks", "dims", "flat", "unit"})


def part_facts(pieces: Sequence[ShardPiece], rank: int) -> dict[str, Any]:
    """Where a rank's parts lie in their tensors."""
    where = placed(pieces, rank)
    if where.layout is None:
        return {}
    columns = {
        field.name: getattr(where.layout, field.name).tolist()
        for field in fields(FileLayout)
        if field.name != "names"
    }
    layout = {"names": list(where.layout.names), **columns}
    return {"layout": layout, "numbers": where.numbers.tolist()}


def part_of(rank: int, answer: Sequence[Any]) -> RankPart:
    """Return a rank's part of a checkpoint.

    `answer` has size, digest and header bytes of its copy, and its facts.

    Raises:
        TornCheckpoint: it is something else.
    """
    try:
        size, digest, head, facts = answer
        part = facts["part"]
        if not part:
            return RankPart(None)
        columns: dict[str, Any] = {
            name: np.array(column, np.uint8 if name in _NARROW else np.int64)
            for name, column in part["layout"].items()
            if name != "names"
        }
        layout = FileLayout(names=tuple(part["layout"]["names"]), **columns)
        return RankPart(
            file=FileEntry(file_name(rank), int(size), str(digest)),
            head=int(head),
            key=layout.key,
            numbers=np.array(part["numbers"], np.int64),
            layout=layout,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TornCheckpoint(f"what rank {rank} says of its copy is not whole: {error}") from error


def parts_of(answers: Mapping[int, Sequence[Any]]) -> tuple[Manifest, list[RankPart]]:
    """The manifest of a checkpoint without files and tensors, and the parts that fill them in.

    Raises:
        CheckpointError: what the copies say is not whole.
    """
    parts = [part_of(rank, answers[rank]) for rank in sorted(answers)]
    return manifests.of_plain(answers[0][3].get("manifest") or {}), parts


def joined(answers: Mapping[int, Sequence[Any]]) -> tuple[Manifest, bytes]:
    """The manifest of a checkpoint and its chunk table, from what all ranks' copies say.

    Raises:
        CheckpointError: the copies do not make up the tensors.
    """
    manifest, parts = parts_of(answers)
    files, manifest.tensors, chunks = assemble(parts, manifest.block_bytes)
    content = chunks.dump()
    manifest.files = [*files, entry_of(content)]
    return manifest, content


def index_of(manifest: Manifest, table: bytes) -> ChunkIndex:
    """The chunk table that `joined` made.

    Raises:
        TornCheckpoint: it is another.
    """
    return index.parse(table, manifest)
