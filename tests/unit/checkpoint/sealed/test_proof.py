"""What a file's own format says of it: cut anywhere it is not whole; nothing is unpickled."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from hpctrain.checkpoint.sealed.files import cut, proves_itself


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save({"weights": torch.arange(5000.0), "step": 3}, path)
    return path


def test_what_torch_has_saved_proves_itself(saved):
    assert proves_itself(saved)
    assert cut(saved) is None


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.6, 0.9, 0.99, 0.9999])
def test_cut_anywhere_it_does_not(saved, share):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(len(whole) * share)])

    assert not proves_itself(saved)
    assert share == 0 or cut(saved)


def test_a_hole_in_its_midst_is_seen(saved):
    whole = saved.read_bytes()
    middle = len(whole) // 2
    saved.write_bytes(whole[:middle] + bytes(512) + whole[middle + 512 :])

    assert not proves_itself(saved)
    assert "CRC" in cut(saved)


def test_an_archive_that_torch_saved_without_checksums_is_not_cut_and_proves_nothing(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weights": torch.arange(5000.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)

    assert cut(path) is None
    assert not proves_itself(path)
    path.write_bytes(path.read_bytes()[:-200])
    assert cut(path)


def test_what_no_format_is_known_of_says_nothing(tmp_path):
    path = tmp_path / "ckpt.bin"
    path.write_bytes(b"anything")

    assert not proves_itself(path)
    assert cut(path) is None


def test_safetensors_say_that_they_are_cut_and_never_that_they_are_whole(tmp_path):
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + b"data"
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole)
    assert cut(path) is None
    assert not proves_itself(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert cut(path)
    path.write_bytes(struct.pack("<Q", 10) + b'{"w": [1]}' + b"data")
    assert "damaged" in cut(path)
