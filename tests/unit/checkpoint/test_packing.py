"""A manifest of many ranks is small, says what a list would say, and stands for nothing else."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format import packing
from hpctrain.checkpoint.format.manifest import BLOCKS_PREFIX, FileEntry, TensorEntry
from hpctrain.checkpoint.format.shard import file_name
from hpctrain.errors import TornCheckpoint
from tests.support import checkpoints as support

TABLE = ("chunks.table", 7, "xxh3_64:0123456789abcdef")


def digest(number):
    return f"{BLOCKS_PREFIX}{number * 0x9E3779B97F4A7C15 % 2**64:016x}"


def shards(ranks, sizes=(100,)):
    return [(file_name(rank), sizes[rank % len(sizes)], digest(rank)) for rank in ranks]


def own(ranks, tensors):
    return [(f"rng.rank-{rank:05d}.{name}", text) for rank in ranks for name, text in tensors]


def manifest(ranks=range(100), *, tensors=(("torch", "U8[5056]"), ("cuda", "U8[16]"))):
    files = [FileEntry(*file) for file in [*shards(ranks), TABLE]]
    about = support.manifest(1000, files)
    about.tensors = [TensorEntry("model.w", "F32", (3, 4))]
    for name, text in own(ranks, tensors):
        dtype, _, size = text.rstrip("]").partition("[")
        about.tensors.append(TensorEntry(name, dtype, (int(size),)))
    return about


RANKS = st.one_of(
    st.sets(st.integers(0, 130_000), min_size=65, max_size=200).map(sorted),
    st.builds(range, st.integers(0, 5), st.integers(400, 500), st.integers(1, 5)),
)


@given(RANKS, st.lists(st.integers(0, 2**53), min_size=1, max_size=5))
def test_files_come_back_as_they_were(ranks, sizes):
    files = [*shards(ranks, sizes), TABLE]

    packed = packing.pack_files(files, BLOCKS_PREFIX)

    back, others = packing.unpack_files(packed, BLOCKS_PREFIX)
    assert [*back, *(tuple(entry.values()) for entry in others)] == files


NAMES = st.lists(
    st.tuples(st.text(min_size=1, max_size=5), st.sampled_from(["U8[3]", "F64[2]"])),
    min_size=1, max_size=3, unique_by=lambda tensor: tensor[0],
)  # fmt: skip


BACKWARDS = RANKS.map(lambda ranks: list(ranks)[::-1])


@given(RANKS | BACKWARDS, NAMES, NAMES, st.integers(1, 4))
def test_tensors_come_back_as_they_were_whatever_differs_between_ranks(ranks, most, some, every):
    tensors = [("model.w", "F32[2]"), ("rng.rank-00000.x", "U8[1]"), ("model.b", "F32[]")]
    for rank in ranks:
        tensors += own([rank], some if rank % every else most)

    written, rules = packing.pack_tensors(tensors)

    back = list(written)
    for alike, of_ranks in packing.unpack_tensors(rules):
        back += [
            (name.replace("*", f"{r:05d}", 1), t) for r in of_ranks for name, t in alike.items()
        ]
    assert back == tensors
    assert rules


def test_a_name_that_stands_there_twice_stays_so():
    tensors = own(range(100), [("torch", "U8[3]"), ("torch", "U8[3]")])

    assert packing.pack_tensors(tensors) == (tensors, [])


def test_all_rules_together_stand_for_no_more_than_there_can_be():
    rule = {"ranks": [0, 1, packing.MOST_OWN // 2], "tensors": {"rng.rank-*.x": "U8[1]"}}
    assert len(list(packing.unpack_tensors([rule, rule]))) == 2

    with pytest.raises(ValueError, match="too many"):
        list(packing.unpack_tensors([rule, rule, rule]))


@pytest.mark.parametrize(
    "files",
    [
        shards(range(64)),
        shards([*range(80, 100), *range(70)]),
        [(name, size, "xxh3_64:" + "0" * 16) for name, size, _ in shards(range(100))],
        [(name.replace("shard-", "shard-0"), size, of) for name, size, of in shards(range(100))],
        [TABLE, *shards(range(100))],
    ],
)
def test_what_follows_no_rule_stays_a_list(files):
    assert packing.pack_files(files, BLOCKS_PREFIX) is None


def test_at_16384_ranks_a_manifest_is_small_on_disk_and_on_its_way():
    about = manifest(range(16384))
    content = manifests._body(about)

    assert len(content) < 300_000
    assert len(pickle.dumps(about)) < 300_000
    assert pickle.loads(pickle.dumps(about)) == about  # noqa: S301


def test_a_manifest_of_many_ranks_is_written_and_read(tmp_path):
    about = manifest([*range(3, 300, 3), 1000, 99_999, 100_000])

    manifests.dump(about, tmp_path / "MANIFEST.json")

    assert manifests.load(tmp_path / "MANIFEST.json") == about
    assert b'"digests": "' in (tmp_path / "MANIFEST.json").read_bytes()


def test_people_can_read_the_manifest_of_a_few_ranks():
    content = manifests._body(manifest(range(8)))

    assert b'"name": "shard-00007.safetensors"' in content
    assert b'"rng.rank-00007.torch": "U8[5056]"' in content


# ---- a stranger's


def sealed(about, change):
    """The manifest's bytes with something else in them, and their digest."""
    import json

    raw = json.loads(manifests._body(about) + b"\n}\n")
    change(raw)
    body = json.dumps(raw, indent=1).removesuffix("\n}").encode()
    return body + manifests.sealed_by(manifests.bytes_digest(body))


def put(*keys):
    """Something else at a place of a manifest."""
    *path, last, value = keys

    def change(raw):
        for key in path:
            raw = raw[key]
        raw[last] = value

    return change


ODD = [
    (put("files", "digests", "0" * 15), "digests that are none"),
    (put("files", "digests", "G" * 1600), "digests that are none"),
    (put("files", "digests", 16), "digests that are none"),
    (put("files", "digests", "0" * 1584), "ranks are 0, 1, 100"),
    (put("files", "ranks", [0, 1, 99]), "files are of 99 ranks, 100 digests are there"),
    (put("files", "ranks", [0, 1, 2**60]), "too many or none"),
    (put("files", "ranks", [0, 2**60, 100]), "too many or none"),
    (put("files", "ranks", [-1, 1, 100]), "too many or none"),
    (put("files", "ranks", [0, 0, 100]), "too many or none"),
    (put("files", "ranks", [0, 1, 101, 0, 1, -1]), "too many or none"),
    (put("files", "ranks", [0, 1, 50, 0, 1, 50]), "names shard-00000.safetensors twice"),
    (put("files", "ranks", [0, 1]), "ranks are not first, step and count"),
    (put("files", "ranks", "012"), "ranks are not first, step and count"),
    (put("files", "sizes", [100, 99]), "files have 99 sizes"),
    (put("files", "sizes", [100, 2**60]), "sizes, 100 digests are there"),
    (put("files", "sizes", [100, 101, 1, -1]), "sizes that are none"),
    (put("files", "sizes", [[], 100]), "sizes that are none"),
    (put("files", "sizes", [2**60, 100]), "for its size"),
    (put("files", "sizes", [-1, 100]), "for its size"),
    (put("files", "sizes", None), "lack sizes or others"),
    (put("files", "others", {}), "lack sizes or others"),
    (put("files", "others", [5]), "5 stands for a file"),
    (put("files", 7), "files is 7"),
    (put("own", 7), "own is 7"),
    (put("own", [7]), "is none"),
    (put("own", 0, "tensors", {}), "is none"),
    (put("own", 0, "tensors", {"model.*": "U8[1]"}), "is none"),
    (put("own", 0, "tensors", {"rng.rank-*.x": "U8"}), "for its dtype and shape"),
    (put("own", 0, "ranks", [0, 1, 2_000_000]), "too many or none"),
    (put("own", 0, "ranks", [0, 1, 50, 0, 1, 50]), "a tensor of a rank stands there twice"),
    (put("tensors", "rng.rank-00007.torch", "U8[1]"), "a tensor of a rank stands there twice"),
]


@pytest.mark.parametrize(("change", "said"), ODD)
def test_what_stands_for_no_files_or_tensors_is_refused(change, said):
    with pytest.raises(TornCheckpoint, match=re.escape(said)):
        manifests.parse(sealed(manifest(), change))


def test_a_manifest_that_was_not_changed_is_not_refused():
    assert manifests.parse(sealed(manifest(), lambda raw: None)).files == manifest().files
