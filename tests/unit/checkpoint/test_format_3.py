"""The frozen sample of format 3, of many ranks: read by a reader of its own, and by hpctrain."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.store import find, verify
from hpctrain.run.layout import RunDir
from tests.support import format_3_reader

SAMPLE = RunDir(Path(__file__).parents[2] / "data" / "checkpoint-format-3")
STEP = SAMPLE.checkpoints / "step-0000001000"
RANKS = 67
KNOWN = {
    "tracked.scheduler.ema": np.array([math.pi, math.inf, -0.0]),
    "model.layer.counts": np.array([-1, 2**40, 7]),
    "model.layer.weight": np.arange(24, dtype=np.float32).reshape(8, 3) / 4 - 2,
    "optim.embed.weight.exp_avg": np.arange(24, dtype=np.float32).reshape(6, 4) / 1024,
    "optim.embed.weight.step": np.array(1000, np.float32),
    "model.embed.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
    "model.none": np.zeros((0, 3), np.float32),
    "model.layer.mask": np.array([True, False, False, True, True]),
    "model.rows": np.arange(130, dtype=np.int32).reshape(65, 2),
    **{
        f"rng.rank-{rank:05d}.torch": np.arange(rank, rank + 8, dtype=np.uint8)
        for rank in range(RANKS)
    },
}
KNOWN["model.embed.weight"] = (KNOWN["model.embed.weight"].view(np.uint32) >> 16).astype(np.uint16)


def test_a_reader_that_knows_the_document_alone_gets_every_tensor():
    read = format_3_reader.tensors_of(STEP)

    assert list(read) == list(KNOWN)
    assert {name: tensor.tobytes() for name, tensor in read.items()} == {
        name: known.tobytes() for name, known in KNOWN.items()
    }


def test_hpctrain_chooses_it_reads_every_tensor_and_finds_it_whole():
    choice = find.choose(SAMPLE)
    about = choice.checkpoint.manifest
    targets = {
        entry.name: Target(
            ShardPiece(entry.name, entry.dtype, entry.shape, (0,) * len(entry.shape), entry.shape),
            bytearray(KNOWN[entry.name].nbytes),
        )
        for entry in about.tensors
    }

    CheckpointSource.open(STEP, about).read(list(targets.values()))

    assert choice.skipped == []
    assert {name: bytes(target.buffer) for name, target in targets.items()} == {
        name: known.tobytes() for name, known in KNOWN.items()
    }
    assert verify.verify(choice.checkpoint) == []


def test_it_is_written_again_as_it_was(tmp_path):
    written = tmp_path / manifest.MANIFEST_NAME

    manifest.dump(manifest.load(STEP / manifest.MANIFEST_NAME), written)

    assert written.read_bytes() == (STEP / manifest.MANIFEST_NAME).read_bytes()


def test_any_flipped_bit_is_found(tmp_path):
    """By hpctrain and by the other reader; in some bytes of each file."""
    run = RunDir(tmp_path)
    step = run.checkpoints / STEP.name
    shutil.copytree(STEP, step)
    for path in sorted(step.iterdir()):
        content = path.read_bytes()
        for at in range(0, len(content), 31 if path.suffix == ".json" else 701):
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            looked = find.look(run, 1000)
            assert looked.problem is not None or verify.verify(looked) != [], (path.name, at)
            with pytest.raises((AssertionError, ValueError)):
                format_3_reader.tensors_of(step)
        path.write_bytes(content)
    assert verify.verify(find.look(run, 1000)) == []
