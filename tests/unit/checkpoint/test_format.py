"""The frozen sample of format 2: it is read by a reader of its own, and by hpctrain."""

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
from hpctrain.checkpoint.format.reader import CheckpointSource, Target, whole_table
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.store import find, verify
from hpctrain.errors import TornCheckpoint
from hpctrain.run.layout import RunDir
from tests.support import checkpoints as support
from tests.support import format_2_reader, format_3_reader

SAMPLE = RunDir(Path(__file__).parents[2] / "data" / "checkpoint-format-2")
STEP = SAMPLE.checkpoints / "step-0000001000"
SHARDS = ["shard-00000.safetensors", "shard-00001.safetensors"]
BF16_BITS = [
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130,
    0x4140, 0x4150, 0x4160, 0x4170, 0x4180, 0x4188, 0x4190, 0x4198, 0x41A0, 0x41A8, 0x41B0, 0x41B8,
]  # fmt: skip
"""0 to 23."""
KNOWN = {
    "tracked.scheduler.ema": np.array([math.pi, math.inf, -0.0]),
    "model.layer.counts": np.array([-1, 2**40, 7]),
    "model.layer.weight": np.arange(24, dtype=np.float32).reshape(8, 3) / 4 - 2,
    "optim.embed.weight.exp_avg": np.arange(24, dtype=np.float32).reshape(6, 4) / 1024,
    "optim.embed.weight.step": np.array(1000, np.float32),
    "model.embed.weight": np.array(BF16_BITS, np.uint16).reshape(6, 4),
    "model.none": np.zeros((0, 3), np.float32),
    "model.layer.mask": np.array([True, False, False, True, True]),
    "rng.rank-00000.torch": np.arange(200, dtype=np.uint8),
    "rng.rank-00001.torch": np.arange(199, -1, -1, dtype=np.uint8),
}
TEXTS = {
    "tracked.scheduler.ema": "F64[3]",
    "model.layer.counts": "I64[3]",
    "model.layer.weight": "F32[8,3]",
    "optim.embed.weight.exp_avg": "F32[6,4]",
    "optim.embed.weight.step": "F32[]",
    "model.embed.weight": "BF16[6,4]",
    "model.none": "F32[0,3]",
    "model.layer.mask": "BOOL[5]",
    "rng.rank-00000.torch": "U8[200]",
    "rng.rank-00001.torch": "U8[200]",
}


def same(read, known):
    assert (read.dtype, read.shape, read.tobytes()) == (known.dtype, known.shape, known.tobytes())


def test_a_reader_that_knows_the_document_alone_gets_every_tensor():
    read = format_2_reader.tensors_of(STEP)

    assert list(read) == list(KNOWN)
    for name, known in KNOWN.items():
        same(read[name], known)


def test_hpctrain_reads_every_tensor_of_the_sample():
    found = find.look(SAMPLE, 1000)
    chunks = whole_table(STEP, found.manifest)
    targets = {
        entry.name: Target(
            ShardPiece(entry.name, entry.dtype, entry.shape, (0,) * len(entry.shape), entry.shape),
            bytearray(KNOWN[entry.name].nbytes),
        )
        for entry in found.manifest.tensors
    }

    CheckpointSource(STEP, found.manifest, chunks).read(list(targets.values()))

    assert {name: bytes(target.buffer) for name, target in targets.items()} == {
        name: known.tobytes() for name, known in KNOWN.items()
    }


def test_the_sample_is_chosen_and_found_whole():
    choice = find.choose(SAMPLE)

    assert choice.skipped == []
    assert choice.checkpoint.step == 1000
    assert verify.verify(choice.checkpoint) == []


def test_any_flipped_bit_of_the_sample_is_found(tmp_path):
    """In every 19th byte, by hpctrain and by the other reader."""
    run = RunDir(tmp_path)
    step = run.checkpoints / STEP.name
    shutil.copytree(STEP, step)
    for path in sorted(step.iterdir()):
        content = path.read_bytes()
        for at in range(0, len(content), 19):
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            found = find.look(run, 1000)
            assert found.problem is not None or verify.verify(found) != [], (path.name, at)
            with pytest.raises((AssertionError, ValueError)):
                format_2_reader.tensors_of(step)
        path.write_bytes(content)
    assert verify.verify(find.look(run, 1000)) == []


def test_tensors_in_another_order_fail_the_manifests_proof_for_the_table_counts_them():
    """As a tool would write it that reads JSON and writes it with its keys sorted."""
    raw = json.loads((STEP / manifest.MANIFEST_NAME).read_bytes())
    raw["tensors"] = dict(sorted(raw["tensors"].items()))
    content = (json.dumps(raw, indent=1) + "\n").encode()

    with pytest.raises(TornCheckpoint, match="own digest does not match"):
        manifest.parse(content)


def test_everything_in_a_manifest_of_format_2_is_still_understood():
    read = find.look(SAMPLE, 1000).manifest

    assert (read.format, read.run_id, read.name) == (2, "5f0c9a1e7d3b4c68", "checkpoint-format-2")
    assert (read.step, read.attempt, len(read.attempt_token)) == (1000, 1, 16)
    assert read.created == 1785000000.25
    assert (read.world_size, read.mesh, read.engine) == (2, {"dp_shard": 2}, "fsdp2")
    assert [entry.name for entry in read.files] == [*SHARDS, "chunks.table"]
    assert read.size == sum((STEP / entry.name).stat().st_size for entry in read.files)
    assert read.block_bytes == 64
    assert {entry.name: entry.text for entry in read.tensors} == TEXTS
    assert read.data == {"samples_consumed": 32000, "seed": 1234}
    assert read.rng == {"ranks": 2}
    assert read.versions == {"hpctrain": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
    assert read.extra == {
        "scheduler": {
            "best": math.inf,
            "betas": {"__tuple__": [0.9, 1e-05]},
            "milestones": {"__items__": [[30, 0.1], [60, 0.01]]},
            "ema": {"__tensor__": "tracked.scheduler.ema", "shape": [3], "dtype": "float64"},
            "name": "Größe",
        }
    }
    assert read.metrics == {"loss": 2.5, "grad_norm": math.inf}


# ---- what this version writes -------------------------------------------------------------------


def test_a_manifest_of_format_2_is_written_again_as_it_was(tmp_path):
    written = tmp_path / manifest.MANIFEST_NAME

    manifest.dump(manifest.load(STEP / manifest.MANIFEST_NAME), written)

    assert written.read_bytes() == (STEP / manifest.MANIFEST_NAME).read_bytes()


def test_the_other_reader_reads_what_this_version_writes(tmp_path):
    run = support.new_run(tmp_path)
    attempt = support.next_attempt(run)
    (step,) = support.save(run, attempt, 1000)

    read = format_3_reader.tensors_of(step)

    assert {name: tensor.tobytes() for name, tensor in read.items()} == support.contents(1000)


# ---- for readers that know nothing of hpctrain --------------------------------------------------


def test_plain_safetensors_opens_the_shards():
    with safetensors.safe_open(STEP / SHARDS[1], "np") as file:
        keys = set(file.keys())
        assert file.get_tensor("model.layer.weight@4-2").tolist() == [[1.5], [2.25], [3.0], [3.75]]
    assert keys == {
        "model.layer.weight",
        "model.layer.weight@4-2",
        "optim.embed.weight.exp_avg@flat-10",
        "model.embed.weight",
        "rng.rank-00001.torch",
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_puts_tensors_in_boxes_together(tmp_path):
    for name in SHARDS:
        shutil.copy(STEP / name, tmp_path)
    state = {"model.embed.weight": torch.zeros(6, 4, dtype=torch.bfloat16)}

    load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)

    assert state["model.embed.weight"].tolist() == torch.arange(24).reshape(6, 4).tolist()
