from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format.manifest import FileEntry, bytes_digest
from hpctrain.core.testing import faults
from hpctrain.errors import CheckpointError, FileSystemFault, OtherFormat, TornCheckpoint
from tests.support import checkpoints as support

ENTRY = FileEntry("shard-00000.safetensors", 2097152, "xxh3_64:2d06800538d394c2")


@pytest.fixture
def path(tmp_path):
    return tmp_path / manifests.MANIFEST_NAME


def reason(path):
    with pytest.raises(TornCheckpoint) as caught:
        manifests.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sealed(raw):
    """A manifest file's bytes for a dictionary, with the digest that belongs to it."""
    rest = {key: value for key, value in raw.items() if key != "self_digest"}
    body = json.dumps(rest, indent=1).removesuffix("\n}").encode()
    return body + f',\n "self_digest": "{bytes_digest(body)}"\n}}\n'.encode()


def test_what_is_loaded_is_what_was_dumped(path):
    written = support.manifest(1000, [ENTRY])

    manifests.dump(written, path)

    assert manifests.load(path) == written
    assert written.self_digest.startswith("xxh3_64:")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_any_state_that_json_can_hold_comes_back_as_it_was(tmp_path_factory, extra):
    path = tmp_path_factory.mktemp("manifest") / manifests.MANIFEST_NAME
    written = dataclasses.replace(support.manifest(1, [ENTRY]), extra=extra)

    manifests.dump(written, path)

    assert manifests.load(path).extra == extra


def test_infinity_survives_since_schedulers_start_their_best_loss_there(path):
    written = dataclasses.replace(support.manifest(1, [ENTRY]), extra={"best": math.inf})

    manifests.dump(written, path)

    assert manifests.load(path).extra == {"best": math.inf}


def test_every_single_flipped_bit_is_detected(path):
    manifests.dump(support.manifest(1000, [ENTRY]), path)
    whole = path.read_bytes()

    undetected = []
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            manifests.parse(bytes(damaged))
        except TornCheckpoint:
            continue
        undetected.append(bit)

    assert undetected == []


def test_every_cut_is_called_a_cut(path):
    manifests.dump(support.manifest(1000, [ENTRY]), path)
    whole = path.read_bytes()

    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert reason(path).startswith(f"manifest is cut: it ends after {length:,} bytes")


def test_a_missing_manifest_is_named_so(path):
    assert reason(path) == "manifest is missing"


def test_a_directory_in_the_manifests_place_is_no_manifest(path):
    path.mkdir()

    assert reason(path).startswith("manifest cannot be read: [Errno 21]")


def test_a_changed_value_fails_the_manifests_own_digest(path):
    manifests.dump(support.manifest(1000, [ENTRY]), path)
    path.write_text(path.read_text().replace('"step": 1000', '"step": 2000'))

    assert reason(path) == "manifest's own digest does not match"


def test_added_white_space_is_not_as_it_was_written(path):
    manifests.dump(support.manifest(1000, [ENTRY]), path)
    whole = path.read_text()

    path.write_text(whole.replace('"step": 1000', '"step":  1000'))
    assert reason(path) == "manifest's own digest does not match"
    path.write_text(whole.removesuffix("}\n") + " }\n")
    assert reason(path) == "manifest's bytes are not as they were written"


@pytest.mark.parametrize("content", [b"{]}\n", b"\xff\xfe}\n", b"[" * 100_000 + b"}\n"])
def test_garbage_is_not_json(path, content):
    path.write_bytes(content)

    assert reason(path).startswith("manifest is not JSON")


def test_json_that_is_no_object_is_not_ours(path):
    path.write_text("[]\n")

    assert reason(path) == "manifest is not JSON of ours: a list, not an object"


def test_a_newer_format_asks_for_a_newer_hpctrain(path):
    path.write_text('{"format": 5, "something": "else"}\n')

    with pytest.raises(OtherFormat) as caught:
        manifests.load(path)
    assert str(caught.value) == (
        f"{path.parent.name}: manifest has format 5, this hpctrain reads up to 4; use a newer "
        "hpctrain"
    )


def test_a_format_of_before_is_refused_with_the_version_that_reads_it(path):
    path.write_text('{"format": 2, "something": "else"}\n')

    with pytest.raises(OtherFormat) as caught:
        manifests.load(path)
    assert str(caught.value) == (
        f"{path.parent.name}: manifest has format 2, which hpctrain 0.1.0 can read and this one "
        "cannot: `hpctrain checkpoints export` of 0.1.0 writes what `hpctrain checkpoints import` "
        "of this one reads"
    )


def test_a_flipped_bit_in_the_formats_number_is_damage_and_no_newer_format(path):
    manifests.dump(support.manifest(1000, [ENTRY]), path)
    path.write_text(path.read_text().replace('"format": 4', '"format": 2'))

    assert reason(path) == "manifest's own digest does not match"


@pytest.mark.parametrize("error", ["ESTALE", "EIO", "EACCES", "EMFILE"])
def test_a_manifest_that_cannot_be_read_is_not_torn(path, error):
    manifests.dump(support.manifest(1000, [ENTRY]), path)

    with faults.armed(f"fail:read.manifest,error={error}"), pytest.raises(FileSystemFault) as told:
        manifests.load(path)
    assert str(told.value).startswith("manifest cannot be read: [Errno ")


@pytest.mark.parametrize("version", [None, 0, 1, "1"])
def test_a_format_that_was_never_written_is_refused(path, version):
    path.write_text(json.dumps({"format": version}) + "\n")

    assert reason(path) == f"manifest has format {version!r}, which no hpctrain writes"


def test_a_key_of_a_later_hpctrain_of_the_same_format_is_ignored(path):
    manifests.dump(support.manifest(1000, [ENTRY]), path)
    path.write_bytes(sealed(json.loads(path.read_text()) | {"later": 1}))

    assert manifests.load(path).step == 1000


def test_a_key_that_is_not_there_is_named(path):
    manifests.dump(support.manifest(1000, [ENTRY]), path)
    raw = json.loads(path.read_text())
    del raw["engine"]
    path.write_bytes(sealed(raw))

    assert "'engine'" in reason(path)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "manifest names no files"),
        ([("../../secrets", 1)], "manifest names '../../secrets', which is no shard's name"),
        ([("..", 1)], "manifest names '..', which is no shard's name"),
        ([("MANIFEST.json", 1)], "manifest names 'MANIFEST.json', which is no shard's name"),
        ([("a", 1), ("a", 1)], "manifest names a twice"),
    ],
)
def test_a_list_of_files_that_cannot_be_is_refused(path, files, said):
    listed = [FileEntry(name, size, "xxh3_64:0") for name, size in files]
    manifests.dump(support.manifest(1000, listed), path)

    assert reason(path) == said


def test_an_unknown_digest_is_not_called_damage(path):
    manifests.dump(support.manifest(1, [FileEntry("a", 1, "sha256:00")]), path)

    assert reason(path) == "manifest has digest 'sha256:00' for a, known is xxh3_64:"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"scheduler": {"milestones": {30: 1}}}, "manifest.extra.scheduler.milestones has the key"),
        ({"list": [{30: 1}]}, r"manifest.extra.list\[0\] has the key 30"),
        ({"tensor": object()}, "manifest of step 1 cannot be written as JSON"),
    ],
)
def test_state_that_json_would_change_is_refused_at_the_save(path, extra, said):
    written = dataclasses.replace(support.manifest(1, [ENTRY]), extra=extra)

    with pytest.raises(CheckpointError, match=said):
        manifests.dump(written, path)
    assert not path.exists()


def test_a_manifest_is_never_written_over_another(path):
    manifests.dump(support.manifest(1000, [ENTRY]), path)

    with pytest.raises(FileExistsError):
        manifests.dump(support.manifest(2000, [ENTRY]), path)
    assert manifests.load(path).step == 1000
