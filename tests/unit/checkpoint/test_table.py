"""The chunk table: what is written comes back; what is no table of this checkpoint is refused."""

from __future__ import annotations

import dataclasses
import json
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.format import table
from hpctrain.checkpoint.format.manifest import TABLE_NAME
from hpctrain.checkpoint.format.reader import open_chunks
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.errors import TornCheckpoint
from tests.support import checkpoints as support
from tests.support import tilings
from tests.support.parts import dump_2, made_2

RANKS = [
    [
        ShardPiece("w", "F32", (9, 16), (0, 0), (5, 16)),
        ShardPiece("step", "I64", (), (), ()),
        ShardPiece("b", "BF16", (100,), (0,), (60,), flat=True),
    ],
    [
        ShardPiece("b", "BF16", (100,), (60,), (40,), flat=True),
        ShardPiece("w", "F32", (9, 16), (5, 0), (4, 16)),
        ShardPiece("none", "U8", (0, 3), (0, 0), (0, 3)),
    ],
]


@pytest.fixture
def whole():
    return made_2(RANKS)[0]


@pytest.fixture
def manifest():
    return made_2(RANKS)[1]


def same(one, other):
    assert one.block_bytes == other.block_bytes
    for column in (*table.COLUMNS, "itemsize"):
        mine, yours = getattr(one, column), getattr(other, column)
        assert (mine.dtype, mine.tolist()) == (yours.dtype, yours.tolist()), column


# ---- what is written comes back -----------------------------------------------------------------


@settings(max_examples=100)
@given(tilings.checkpoints())
def test_any_table_comes_back_as_it_was(drawn):
    ranks, _ = drawn
    whole, manifest = made_2(ranks)

    same(table.parse(dump_2(whole), manifest), whole)


def test_the_file_is_read_with_its_digest_proved(tmp_path, whole, manifest):
    (tmp_path / TABLE_NAME).write_bytes(dump_2(whole))

    same(open_chunks(tmp_path, manifest), whole)


def test_plain_safetensors_reads_the_columns_as_the_document_says(tmp_path, whole):
    (tmp_path / TABLE_NAME).write_bytes(dump_2(whole))

    with safetensors.safe_open(tmp_path / TABLE_NAME, "np") as file:
        read = {name: file.get_tensor(name).tolist() for name in table.COLUMNS}

    assert read["file"] == [0, 0, 0, 1, 1, 1]
    assert read["tensor"] == [0, 1, 2, 2, 0, 3]
    assert read["dims"] == [2, 0, 1, 1, 2, 2]
    assert read["flat"] == [0, 0, 1, 1, 0, 0]
    assert read["begin"] == [0, 0, 0, 60, 5, 0, 0, 0]
    assert read["extent"] == [5, 16, 60, 40, 4, 16, 0, 3]
    assert len(read["digests"]) == 5 + 1 + 2 + 2 + 4


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(0, "U8"), (255, "U8"), (256, "U16"), (65535, "U16"), (65536, "U32"), (2**32, "U64")],
)
def test_each_column_takes_the_narrowest_type_that_holds_it(whole, largest, dtype):
    offset = np.array([0, 0, 0, 0, 0, largest], np.int64)
    content = dump_2(dataclasses.replace(whole, offset=offset))

    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    assert header["offset"]["dtype"] == dtype
    assert header["digests"]["dtype"] == "U64"
    assert [name for name in table.COLUMNS if header[name]["dtype"] == "U8"][:2] == [
        "tensor",
        "file",
    ]


def test_a_checkpoint_without_tensors_has_an_empty_table():
    whole, manifest = made_2([])

    read = table.parse(dump_2(whole), manifest)

    assert len(read) == 0
    assert (read.rows_of(0).tolist(), read.rows_in(0)) == ([], (0, 0))
    assert read.first_block.tolist() == [0]


# ---- what is asked of it ------------------------------------------------------------------------


def test_rows_lie_in_the_order_of_files_and_offsets(whole):
    keys = list(zip(whole.file.tolist(), whole.offset.tolist(), strict=True))
    assert keys == sorted(keys)


def test_the_rows_of_a_tensor_are_all_its_chunks_in_the_tables_order(whole):
    assert [whole.rows_of(tensor).tolist() for tensor in range(5)] == [[0, 4], [1], [2, 3], [5], []]


def test_the_rows_in_a_file_are_its_chunks(whole):
    assert [whole.rows_in(file) for file in range(3)] == [(0, 3), (3, 6), (6, 6)]


def test_boxes_are_given_by_row_and_dimension(whole):
    begin, extent = whole.boxes(np.array([4, 0]))
    assert (begin.tolist(), extent.tolist()) == ([[5, 0], [0, 0]], [[4, 16], [5, 16]])

    begin, extent = whole.boxes(np.array([1]))
    assert (begin.shape, extent.shape) == ((1, 0), (1, 0))
    assert whole.boxes(np.zeros(0, np.int64))[0].shape == (0, 0)


def test_bytes_and_blocks_of_each_chunk(whole):
    assert whole.nbytes.tolist() == [320, 8, 120, 80, 256, 0]
    assert whole.first_block.tolist() == [0, 5, 6, 8, 10, 14, 14]


def test_a_scalar_has_one_element_and_an_empty_box_none():
    dims = np.array([0, 2, 0, 1, 2, 0])
    extent = np.array([3, 4, 7, 0, 5])
    assert table.elements(dims, extent).tolist() == [1, 12, 1, 7, 0, 1]
    assert table.elements(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


# ---- what is refused ----------------------------------------------------------------------------


def refused(act) -> str:
    with pytest.raises(TornCheckpoint) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parsed(content, manifest):
    try:
        return table.parse(content, manifest), None
    except TornCheckpoint as error:
        return None, str(error)


@settings(max_examples=300)
@given(st.data())
def test_damaged_bytes_are_a_torn_checkpoint_or_a_table_that_fits_the_manifest(data):
    """Also where their digest is right, as a writer with a mistake would make them."""
    whole, manifest = made_2(RANKS)
    content = bytearray(dump_2(whole))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))

    read, reason = parsed(bytes(content[:cut]), manifest)

    if read is None:
        assert reason.startswith(TABLE_NAME)
        assert "\n" not in reason
        return
    assert table.misplaced(manifest.tensors, read) is None
    sizes = np.array([entry.size for entry in manifest.files])[read.file]
    assert (read.offset + read.nbytes <= sizes).all()
    assert len(read.digests) == read.first_block[-1]


@given(st.binary(max_size=200))
def test_garbage_is_no_table(content):
    _, manifest = made_2(RANKS)
    assert "is not a chunk table" in refused(lambda: table.parse(content, manifest))


COLUMNS_OF_TROUBLE = [
    ("tensor", [0, 1, 2, 2, 0, 4], "is not a chunk table: index 4 is out of bounds"),
    ("tensor", [0, 1, 2, 2, 0, 2], "names a chunk outside of b"),
    ("file", [0, 0, 0, 1, 1, 9], "names file 9 of 3"),
    ("dims", [2, 0, 1, 1, 2], "has columns of different lengths"),
    ("dims", [2, 0, 1, 1, 2, 1], "has 8 pairs of begin and extent, its rows need 7"),
    ("dims", [2, 1, 0, 1, 2, 2], "names a chunk outside of step"),
    ("flat", [0, 0, 2, 1, 0, 0], "names a chunk outside of b"),
    ("flat", [0, 1, 1, 1, 0, 0], "names a chunk outside of step"),
    ("begin", [0, 0, 0, 61, 5, 0, 0, 0], "names a chunk outside of b"),
    ("begin", [0, 0, 0, 60, 5, 1, 0, 0], "names a chunk outside of w"),
    ("begin", [0, 0, 0, 2**62, 5, 0, 0, 0], "names a chunk outside of b"),
    ("begin", [0, 0, 0, 2**62 + 1, 5, 0, 0, 0], "is not a chunk table: column begin holds 46116"),
    ("extent", [5, 16, 60, 41, 4, 16, 0, 3], "names a chunk outside of b"),
    ("extent", [5, 16, 60, 40, 4, 2**62, 0, 3], "names a chunk outside of w"),
    ("extent", [1, 16, 60, 40, 4, 16, 0, 3], "has 14 digests, its chunks have 10 blocks"),
]


@pytest.mark.parametrize(("column", "values", "reason"), COLUMNS_OF_TROUBLE)
def test_a_table_at_odds_with_itself_or_the_manifest_is_refused(
    whole, manifest, column, values, reason
):
    content = dump_2(dataclasses.replace(whole, **{column: np.array(values, np.int64)}))

    assert refused(lambda: table.parse(content, manifest)).startswith(f"{TABLE_NAME} {reason}")


@pytest.mark.parametrize(
    ("row", "by", "reason"),
    [
        (5, 1, "names a chunk behind the end of its file"),
        (0, 4096, "names a chunk behind the end of its file"),
        (1, 8, "has chunks that do not lie one behind the other in their file"),
        (1, -8, "has chunks that do not lie one behind the other in their file"),
        (2, -1, "has chunks that do not lie one behind the other in their file"),
    ],
)
def test_a_chunk_that_lies_behind_the_files_end_or_not_at_its_neighbours_is_refused(
    whole, manifest, row, by, reason
):
    offset = whole.offset.copy()
    offset[row] += by
    content = dump_2(dataclasses.replace(whole, offset=offset))

    assert refused(lambda: table.parse(content, manifest)) == f"{TABLE_NAME} {reason}"


def test_rows_that_are_not_sorted_by_file_are_refused_for_rows_in_would_miss_some():
    halves = [ShardPiece("w", "U8", (4, 8), (at, 0), (2, 8)) for at in (0, 2)]
    whole, manifest = made_2([[half] for half in halves])
    content = dump_2(dataclasses.replace(whole, file=whole.file[::-1]))

    reason = refused(lambda: table.parse(content, manifest))

    assert reason == f"{TABLE_NAME} has chunks that do not lie one behind the other in their file"


def test_bytes_of_a_file_behind_its_last_chunk_are_refused_for_nothing_proves_them(whole, manifest):
    longer = dataclasses.replace(manifest.files[0], size=manifest.files[0].size + 1)
    manifest.files[0] = longer

    reason = refused(lambda: table.parse(dump_2(whole), manifest))

    assert reason == f"{TABLE_NAME} has chunks that do not lie one behind the other in their file"


def test_a_table_that_is_missing_damaged_or_unreadable_is_torn(tmp_path, whole, manifest):
    file = tmp_path / TABLE_NAME
    assert refused(lambda: open_chunks(tmp_path, manifest)) == "chunks.table is missing"

    file.write_bytes(dump_2(whole))
    support.flip_bit(file, 8 * file.stat().st_size - 1)
    assert refused(lambda: open_chunks(tmp_path, manifest)).endswith(
        f"manifest says {manifest.files[-1].digest} (damaged bytes)"
    )

    file.unlink()
    file.mkdir()
    assert refused(lambda: open_chunks(tmp_path, manifest)).startswith(
        "chunks.table cannot be read: "
    )

    del manifest.files[-1]
    assert refused(lambda: open_chunks(tmp_path, manifest)) == "manifest names no chunks.table"
