from __future__ import annotations

import math
from pathlib import Path

from hpctrain.checkpoint import find, manifest, verify
from hpctrain.rundir.layout import RunDir

SAMPLE = RunDir(Path(__file__).parents[1] / "data" / "checkpoint-format-1")


def test_a_checkpoint_of_format_1_is_still_chosen_and_found_whole():
    choice = find.choose(SAMPLE)

    assert choice.skipped == []
    assert choice.found.step == 1000
    assert verify.verify(choice.found) == []


def test_everything_in_a_manifest_of_format_1_is_still_understood():
    read = find.look(SAMPLE, 1000).manifest

    assert (read.format, read.run_id, read.name) == (1, "5f0c9a1e7d3b4c68", "checkpoint-format-1")
    assert (read.step, read.attempt, len(read.attempt_token)) == (1000, 1, 16)
    assert (read.world_size, read.mesh, read.engine) == (1, {"dp_shard": 1}, "fsdp2")
    assert [entry.name for entry in read.files] == [".metadata", "__0_0.distcp"]
    assert read.data == {"samples_consumed": 32000, "seed": 1234}
    assert read.rng == {"python": [3, [1, 2, 3], None]}
    assert read.versions["torch"].startswith("2.13.0")
    assert read.extra == {"scheduler": {"best": math.inf, "last_epoch": 1000}}


def test_what_this_version_writes_is_byte_for_byte_format_1(tmp_path):
    sample = find.step_path(SAMPLE, 1000) / manifest.MANIFEST_NAME
    written = tmp_path / manifest.MANIFEST_NAME

    manifest.dump(manifest.load(sample), written)

    assert written.read_bytes() == sample.read_bytes()
