"""The frozen sample of format 3, of many ranks: read by a reader of its own, and by hpctrain."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.store import find, verify
from hpctrain.errors import TornCheckpoint
from hpctrain.ledger.run.layout import RunDir
from tests.support import checkpoints as support
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


def test_tensors_in_another_order_fail_the_manifests_proof_for_the_table_counts_them():
    """As a tool would write it that reads JSON and writes it with its keys sorted."""
    raw = json.loads((STEP / manifest.MANIFEST_NAME).read_bytes())
    raw["tensors"] = dict(sorted(raw["tensors"].items(), reverse=True))
    content = (json.dumps(raw, indent=1) + "\n").encode()

    with pytest.raises(TornCheckpoint, match="own digest does not match"):
        manifest.parse(content)


def test_the_other_reader_reads_what_this_version_writes(tmp_path):
    run = support.new_run(tmp_path)
    (step,) = support.save(run, support.next_attempt(run), 1000)

    read = format_3_reader.tensors_of(step)

    assert {name: tensor.tobytes() for name, tensor in read.items()} == support.contents(1000)


# ---- for readers that know nothing of hpctrain --------------------------------------------------


def test_plain_safetensors_opens_the_shards():
    with safetensors.safe_open(STEP / "shard-00001.safetensors", "np") as file:
        keys = set(file.keys())
        assert file.get_tensor("model.layer.weight@4-2").tolist() == [[1.5], [2.25], [3.0], [3.75]]
    assert {"model.layer.weight", "optim.embed.weight.exp_avg@flat-10"} <= keys


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_puts_tensors_in_boxes_together():
    state = {"model.embed.weight": torch.zeros(6, 4, dtype=torch.bfloat16)}

    load(state, storage_reader=HuggingFaceStorageReader(str(STEP)), no_dist=True)

    bits = KNOWN["model.embed.weight"].astype(np.uint32) << 16
    assert np.array_equal(state["model.embed.weight"].float().numpy(), bits.view(np.float32))
