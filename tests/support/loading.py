"""All bytes of a checkpoint, read and proved as a rank would do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.format.shard import ShardPiece

if TYPE_CHECKING:
    from hpctrain.checkpoint.store.find import FoundCheckpoint


def loaded(found: FoundCheckpoint) -> dict[str, bytes]:
    """Every tensor's bytes, by its name.

    Raises:
        TornCheckpoint: the product's reader found damage.
    """
    assert found.manifest is not None
    source = CheckpointSource.open(found.path, found.manifest)
    values, targets = {}, []
    for entry in found.manifest.tensors:
        begin = (0,) * len(entry.shape)
        piece = ShardPiece(entry.name, entry.dtype, entry.shape, begin, entry.shape)
        values[entry.name] = np.full(piece.nbytes, 255, np.uint8)
        targets.append(Target(piece, values[entry.name]))
    source.read(targets)
    return {name: value.tobytes() for name, value in values.items()}
