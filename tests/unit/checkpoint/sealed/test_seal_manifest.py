"""SEAL.json proves itself, and names nothing outside of what it seals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.checkpoint.sealed import files as manifest
from hpctrain.checkpoint.sealed.files import Seal, SealedFile, parse_seal
from hpctrain.errors import FileSystemFault, OtherFormat, TornCheckpoint
from tests.support.sealed import choose, seal

FILE = SealedFile("deep/model.bin", 7, "xxh3_64:00000000000000ff", 12)
FOLDER = Seal(
    path="/out/checkpoint-50",
    is_folder=True,
    step=50,
    attempt=3,
    created=1.5,
    by="program",
    is_copy=False,
    files=(FILE,),
)


def test_it_comes_back_as_it_was_written():
    assert manifest.parse(manifest.dump(FOLDER)) == FOLDER
    assert manifest.parse(manifest.dump(replace(FOLDER, step=None))).step is None


def test_every_byte_of_it_counts():
    content = manifest.dump(FOLDER)
    for at in range(len(content)):
        for changed in (content[:at], content[:at] + b"X" + content[at + 1 :]):
            if changed != content:
                with pytest.raises(TornCheckpoint):
                    manifest.parse(changed)


@pytest.mark.parametrize("name", ["../model.bin", "/etc/passwd", "a//b", "./a", "a/..", "", "a\0b"])
def test_a_file_lies_below_what_is_sealed(name):
    content = manifest.dump(replace(FOLDER, files=(replace(FILE, name=name),)))

    with pytest.raises(TornCheckpoint, match="no file below"):
        manifest.parse(content)


@pytest.mark.parametrize(
    "path", ["out", "/out/../etc", "/out//x", "/", "", "/a\0b", "/" + "x" * 5000]
)
def test_a_path_is_absolute_and_plain(path):
    with pytest.raises(TornCheckpoint, match="path is"):
        manifest.parse(manifest.dump(replace(FOLDER, path=path)))


def test_a_newer_format_is_neither_damaged_nor_passed_over(run, attempt, tmp_path):
    content = manifest.dump(replace(FOLDER, format=2))
    with pytest.raises(OtherFormat, match="format 2, this hpctrain reads up to 1"):
        manifest.parse(content)
    path = tmp_path / "ckpt-50"
    path.write_bytes(b"x")
    stored = seal(run, attempt, path, 50)
    (stored.folder / "SEAL.json").write_bytes(content)

    with pytest.raises(FileSystemFault, match="use a newer hpctrain"):
        choose(run, attempt)


def test_a_name_counts_only_as_it_is_written():
    names = ["seal-000007", "seal-7", "seal-0000007", "seal-000000", "seal-000007.bak"]
    assert [parse_seal(name) for name in names] == [7, None, None, None, None]
    assert parse_seal(manifest.seal_name(1_234_567)) == 1_234_567
