"""One rank's file: any reader of safetensors opens it, and its digests are those of its bytes."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import safetensors
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.shard import ShardPiece, ShardReport, blocks_of, file_name, write
from hpctrain.errors import CheckpointError
from tests.support import checkpoints as support

BLOCK = 64
TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


def whole(name: str, dtype: str, *shape: int) -> ShardPiece:
    return ShardPiece(name, dtype, shape, (0,) * len(shape), shape)


def filled(pieces, seed=0):
    """Bytes for each piece; 0 and 1 only, which every dtype holds."""
    dice = np.random.default_rng(seed)
    return [dice.integers(0, 2, piece.nbytes, np.uint8).tobytes() for piece in pieces]


def views(contents):
    return [memoryview(content) for content in contents]


def written(path, pieces, contents, **options) -> ShardReport:
    return write(path, pieces, views(contents), block_bytes=BLOCK, **options)


def header_of(path) -> tuple[int, dict]:
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return 8 + length, json.loads(content[8 : 8 + length])


def expected_digests(contents, block=BLOCK):
    return [
        xxhash.xxh3_64_intdigest(content[at : at + block])
        for content in contents
        for at in range(0, len(content), block)
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / file_name(3)


# ---- for every reader of safetensors ------------------------------------------------------------


@pytest.mark.parametrize("dtype", shard.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (7, 3)])
def test_plain_safetensors_reads_every_dtype_and_shape(path, dtype, shape):
    pieces = [whole("model.a", dtype, *shape), whole("model.b", dtype, 4)]
    contents = filled(pieces)

    written(path, pieces, contents)

    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {"model.a", "model.b", "digests@shard-00003"}
        for piece, content in zip(pieces, contents, strict=True):
            tensor = file.get_tensor(piece.name)
            word, axes = shard.STORED.get(piece.dtype, (piece.dtype, ()))
            assert (tensor.dtype, tuple(tensor.shape)) == (TORCH[word], piece.shape + axes)
            read = tensor.reshape(-1).contiguous().view(torch.uint8)
            assert read.numpy().tobytes() == content


def test_the_values_that_numpy_reads_are_those_that_were_written(path):
    arrays = {
        "model.w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "optim.step": np.array(-1000),
        "model.mask": np.array([True, False]),
    }
    words = {"model.w": "F32", "optim.step": "I64", "model.mask": "BOOL"}
    pieces = [whole(name, words[name], *array.shape) for name, array in arrays.items()]

    write(path, pieces, [memoryview(array) for array in arrays.values()])

    with safetensors.safe_open(path, "np") as file:
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_a_box_is_stored_under_its_tensors_name_with_the_boxs_own_shape(path):
    piece = ShardPiece("model.w", "U8", (8, 4), (6, 1), (2, 3))

    written(path, [piece], [bytes(range(6))])

    with safetensors.safe_open(path, "np") as file:
        assert file.get_tensor("model.w").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_torch_is_told_where_boxes_lie_and_that_what_has_a_key_of_its_own_is_by_itself(path):
    pieces = [
        ShardPiece("a", "U8", (8, 4), (6, 0), (2, 4)),
        ShardPiece("a", "U8", (8, 4), (0, 2), (2, 2)),
        ShardPiece("b", "U8", (9,), (5,), (4,), flat=True),
        ShardPiece("c", "U8", (), (), ()),
    ]

    written(path, pieces, filled(pieces))

    about = header_of(path)[1]["__metadata__"]
    assert json.loads(about["DCP_SHARDING_INFO"]) == {
        "a": {"saved_offsets": [6, 0]},
        "a@0-2": {"saved_offsets": [0, 0]},
        "b@flat-5": {"saved_offsets": [0]},
        "c": {"saved_offsets": []},
        "digests@shard-00003": {"saved_offsets": [0]},
    }
    assert (about["format"], about["DCP_VERSION"]) == ("pt", "1.0")


def test_a_second_box_and_a_flat_range_have_keys_of_their_own(path):
    pieces = [
        ShardPiece("a", "U8", (8, 4), (6, 0), (2, 4)),
        ShardPiece("a", "U8", (8, 4), (0, 2), (2, 2)),
        ShardPiece("a", "U8", (8, 4), (4,), (2,), flat=True),
        ShardPiece("b", "U8", (9,), (5,), (4,), flat=True),
    ]
    contents = filled(pieces)

    written(path, pieces, contents)

    with safetensors.safe_open(path, "np") as file:
        read = {key: file.get_tensor(key).tobytes() for key in file.keys()}  # noqa: SIM118 - no dict
    del read["digests@shard-00003"]
    assert read == dict(zip(["a", "a@0-2", "a@flat-4", "b@flat-5"], contents, strict=True))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True))
def test_the_headers_length_is_a_multiple_of_8_whatever_the_names(names):
    head = shard.header([whole(f"model.{name}", "U8", 1) for name in names], "shard-00000")

    (length,) = struct.unpack_from("<Q", head)
    assert length % 8 == 0
    assert len(head) == 8 + length
    beside = {"__metadata__", "digests@shard-00000"}
    assert {f"model.{name}" for name in names} == json.loads(head[8:]).keys() - beside


# ---- the bytes and their digests ----------------------------------------------------------------

sizes = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 200), st.sampled_from([BLOCK, 4096, 4097])),
    max_size=40,
)


ways = st.fixed_dictionaries(
    {"write_bytes": st.integers(BLOCK, 4096), "threads": st.integers(1, 4)}
)
most_taken = st.one_of(st.none(), st.integers(1, 300))


@settings(max_examples=60)
@given(sizes, st.integers(0, 900), ways, most_taken)
def test_bytes_and_digests_are_the_same_however_they_are_written(
    tmp_path_factory, large, small, way, most
):
    """Sizes of 0, many small parts in one call, several threads, and a system that takes less."""
    pieces = [whole(f"t{n}", "U8", size) for n, size in enumerate([*large, *[1] * small])]
    contents = filled(pieces, seed=small)
    path = tmp_path_factory.mktemp("any") / file_name(0)
    with pytest.MonkeyPatch.context() as patch:
        if most is not None:
            patch.setattr(os, "pwritev", short_writes(most, os.pwritev))
        report = written(path, pieces, contents, **way)

    head = shard.header(pieces, path.name, BLOCK)
    digests = expected_digests(contents)
    numbers = [xxhash.xxh3_64_intdigest(head), *digests]
    row = struct.pack(f"<{len(numbers)}Q", *numbers)
    assert path.read_bytes() == head + b"".join(contents) + row
    assert report.head == len(head)
    assert report.size == path.stat().st_size
    assert report.offsets.tolist() == [
        len(head) + sum(map(len, contents[:n])) for n in range(len(pieces))
    ]
    assert report.digests.tolist() == digests
    assert report.digest == f"xxh3_64-blocks:{xxhash.xxh3_64_hexdigest(row)}"


def short_writes(most, pwritev):
    """A system call that writes so many bytes at most, as one may that a signal breaks into."""

    def short(file, buffers, offset):
        taken, room = [], most
        for buffer in buffers:
            taken.append(memoryview(buffer)[:room])
            room -= len(taken[-1])
            if not room:
                break
        return pwritev(file, taken, offset)

    return short


@pytest.mark.parametrize("sizes", [[1] * 3000, [3000 * BLOCK]])
def test_thousands_of_tiny_pieces_or_blocks_never_exceed_what_one_call_may_take(
    path, monkeypatch, sizes
):
    counts, real = [], os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *call: (counts.append(len(call[1])), real(*call))[1])
    pieces = [whole(f"t{n}", "U8", size) for n, size in enumerate(sizes)]

    written(path, pieces, filled(pieces), write_bytes=1 << 20)

    assert max(counts) <= 1024  # what Linux takes
    assert len(counts) < 20


def test_no_call_writes_much_more_than_write_bytes(path, monkeypatch):
    amounts, real = [], os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda *call: (amounts.append(sum(map(len, call[1]))), real(*call))[1]
    )
    pieces = [whole("a", "U8", 1000), whole("b", "U8", 30), whole("c", "U8", 500)]

    written(path, pieces, filled(pieces), write_bytes=256)

    assert max(amounts[1:-1]) <= 256  # the first is the header, the last the digests


def test_sources_are_asked_for_one_after_the_other_and_never_for_nothing(path):
    pieces = [whole("a", "U8", 1000), whole("none", "U8", 0), whole("b", "U8", 1000)]
    contents = filled(pieces)
    asked = []

    class Sources:
        def __getitem__(self, index):
            asked.append(index)
            return memoryview(contents[index])

    write(path, pieces, Sources(), block_bytes=BLOCK, write_bytes=256)

    assert asked == sorted(asked)
    assert set(asked) == {0, 2}


@pytest.mark.parametrize("size", [0, 11, 13])
def test_a_source_with_another_number_of_bytes_than_its_box_is_refused(path, size):
    piece = whole("model.w", "F32", 3)

    with pytest.raises(CheckpointError) as caught:
        written(path, [piece], [bytes(size)])

    assert str(caught.value) == f"model.w has {size} bytes to write, its box takes 12"


def test_a_source_of_any_element_type_counts_in_bytes(path):
    report = write(path, [whole("w", "F32", 3)], [memoryview(np.ones(3, np.float32))])

    assert report.size == path.stat().st_size


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_the_file_system_reaches_the_caller_from_any_thread(path, monkeypatch, threads):
    real = os.pwritev

    def full(file, buffers, offset):
        if offset > 1000:
            raise OSError(28, "No space left on device")
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    piece = whole("w", "U8", 4000)

    with pytest.raises(OSError, match="No space left"):
        written(path, [piece], filled([piece]), write_bytes=128, threads=threads)


def test_a_file_that_is_there_is_not_touched(path):
    path.write_bytes(b"another attempt's")

    with pytest.raises(FileExistsError):
        written(path, [whole("a", "U8", 1)], [b"1"])

    assert path.read_bytes() == b"another attempt's"


def test_the_file_is_flushed_after_its_last_byte_and_before_it_is_reported(path, monkeypatch):
    sizes_at_flush = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes_at_flush.append(os.fstat(file).st_size))

    report = written(path, [whole("a", "U8", 500)], [bytes(500)], write_bytes=128)

    assert sizes_at_flush == [report.size]


def test_two_files_that_differ_in_their_header_only_have_different_digests(tmp_path):
    reports = [written(tmp_path / name, [whole(name, "U8", 5)], [b"12345"]) for name in ("a", "b")]

    assert reports[0].digests.tolist() == reports[1].digests.tolist()
    assert reports[0].digest != reports[1].digest


def test_blocks_of_a_chunk_start_with_it_not_with_its_file(tmp_path):
    """A chunk keeps its digests wherever it lies, so that ranks can be compared."""
    piece, content = whole("w", "U8", 200), os.urandom(200)

    alone = written(tmp_path / "alone", [piece], [content])
    behind = written(tmp_path / "behind", [whole("a", "U8", 7), piece], [b"1234567", content])

    assert behind.digests[1:].tolist() == alone.digests.tolist()


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_chunk_has_as_many_blocks_as_its_bytes_fill(nbytes, block):
    assert len(range(0, nbytes, block)) == blocks_of(nbytes, block)


def test_a_piece_takes_the_bytes_of_its_part_only():
    assert ShardPiece("w", "BF16", (8, 4), (6, 1), (2, 3)).nbytes == 12
    assert ShardPiece("w", "F32", (8, 4), (6,), (5,), flat=True).nbytes == 20
    assert ShardPiece("step", "I64", (), (), ()).nbytes == 8
    assert file_name(3) == "shard-00003.safetensors"


def test_what_the_support_module_cuts_out_is_what_is_written(tmp_path):
    """The other tests' way to write a checkpoint: the pieces hold their parts of the tensor."""
    piece = ShardPiece("w", "U8", (3, 4), (1, 1), (2, 2))

    support.write_pieces(tmp_path, [[piece]], {"w": bytes(range(12))})

    with safetensors.safe_open(tmp_path / file_name(0), "np") as file:
        assert file.get_tensor("w").tolist() == [[5, 6], [9, 10]]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_is_not_as_long_as_it_was_written_is_an_error_of_its_writer(
    path, monkeypatch, change
):
    """Rank 0 does not look at it before the commit."""
    size = written(path.with_name(file_name(4)), [whole("w", "U8", 9)], [bytes(9)]).size
    real = os.fsync

    def drop(file):
        real(file)
        os.ftruncate(file, size + change)

    monkeypatch.setattr(os, "fsync", drop)
    said = f"is {size + change} bytes after its flush, {size} were written"
    with pytest.raises(OSError, match=said):
        written(path, [whole("w", "U8", 9)], [bytes(9)])
