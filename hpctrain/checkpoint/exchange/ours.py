"""A committed checkpoint of ours as named tensors, each verified while it is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.exchange.tensors import Tensor
from hpctrain.checkpoint.format.reader import Source, Target
from hpctrain.checkpoint.format.shard import DTYPES, Piece
from hpctrain.checkpoint.store import find
from hpctrain.errors import NotFound, TornCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.checkpoint.exchange.tensors import Bytes
    from hpctrain.checkpoint.format.manifest import Manifest, TensorEntry
    from hpctrain.run.layout import RunDir

MODEL, OPTIM, TRACKED, RNG = "model.", "optim.", "tracked.", "rng."
PREFIXES = (MODEL, OPTIM, TRACKED, RNG)


def found(run: RunDir, step: int) -> tuple[Path, Manifest]:
    """Where a step's checkpoint lies, and its manifest.

    Raises:
        NotFound: there is none of that step.
        TornCheckpoint: it is torn.
    """
    there = find.steps(run)
    if step not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise NotFound(f"{run.name} has no checkpoint of step {step}; there are: {listed}")
    one = find.look(run, step)
    if one.problem is not None or one.manifest is None:
        raise TornCheckpoint(f"step {step} of {run.name} is torn: {one.problem}")
    return one.path, one.manifest


def tensors(path: Path, manifest: Manifest) -> list[Tensor]:
    """All tensors of a checkpoint, in its order; also of a staged one whose files are written.

    Raises:
        TornCheckpoint: its chunk table is damaged.
    """
    source = Source.open(path, manifest)
    return [_tensor(source, entry) for entry in manifest.tensors]


def _tensor(source: Source, entry: TensorEntry) -> Tensor:
    def read() -> Bytes:
        content = np.empty(math.prod(entry.shape) * DTYPES[entry.dtype], np.uint8)
        whole = (0,) * len(entry.shape)
        source.read(
            [Target(Piece(entry.name, entry.dtype, entry.shape, whole, entry.shape), content.data)]
        )
        return content

    return Tensor(entry.name, entry.dtype, entry.shape, read)
