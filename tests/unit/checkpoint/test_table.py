"""The chunk table: what is asked of its rows; what is no table of this checkpoint is refused."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.format import index as indices
from hpctrain.checkpoint.format import table
from hpctrain.checkpoint.format.manifest import TABLE_NAME
from hpctrain.checkpoint.format.reader import open_chunks
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.errors import TornCheckpoint
from tests.support import checkpoints as support
from tests.support import tilings
from tests.support.parts import made

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
    return made(RANKS)[0].whole()


# ---- what is written comes back -----------------------------------------------------------------


@settings(max_examples=100)
@given(tilings.checkpoints())
def test_any_table_comes_back_as_it_was(drawn):
    ranks, _ = drawn
    index, manifest = made(ranks)

    back = indices.parse(index.dump(), manifest)

    for column in (*indices.COLUMNS, "itemsize"):
        assert getattr(back, column).tolist() == getattr(index, column).tolist(), column


def test_the_file_is_read_with_its_digest_proved_and_plain_safetensors_reads_its_columns(tmp_path):
    index, manifest = made(RANKS)
    (tmp_path / TABLE_NAME).write_bytes(index.dump())

    assert open_chunks(tmp_path, manifest).dump() == index.dump()
    with safetensors.safe_open(tmp_path / TABLE_NAME, "np") as file:
        assert {*file.keys()} == {*indices.COLUMNS}
        assert file.get_tensor("tensor").tolist() == index.tensor.tolist()


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(0, "U8"), (255, "U8"), (256, "U16"), (65535, "U16"), (65536, "U32"), (2**32, "U64")],
)
def test_each_column_takes_the_narrowest_type_that_holds_it(largest, dtype):
    content = table.encode_columns({"head": np.array([0, largest], np.int64)})

    (length,) = struct.unpack_from("<Q", content)
    assert json.loads(content[8 : 8 + length])["head"]["dtype"] == dtype


def test_a_checkpoint_without_tensors_has_an_empty_table():
    index, manifest = made([])

    read = indices.parse(index.dump(), manifest).whole()

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


@given(st.binary(max_size=200))
def test_garbage_is_no_table(content):
    _, manifest = made(RANKS)
    assert "is not a chunk table" in refused(lambda: indices.parse(content, manifest))


def test_a_column_with_a_number_whose_sums_run_over_is_no_table():
    index, manifest = made(RANKS)
    index.number[0] = 2**62 + 1

    why = refused(lambda: indices.parse(index.dump(), manifest))

    assert why.startswith("chunks.table is not a chunk table: column number holds 46116")


def test_a_table_that_is_missing_damaged_or_unreadable_is_torn(tmp_path):
    file, (index, manifest) = tmp_path / TABLE_NAME, made(RANKS)
    assert refused(lambda: open_chunks(tmp_path, manifest)) == "chunks.table is missing"

    file.write_bytes(index.dump())
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
