from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.format.geometry import Grid, overlap
from hpctrain.checkpoint.format.shard import DTYPES, ShardPiece
from hpctrain.checkpoint.format.table import ChunkTable
from tests.support import checkpoints as support
from tests.support import tilings


def table_of(pieces):
    """A table of these chunks of one tensor, whether they make it up or not."""

    def column(values):
        return np.array(list(values), np.int64)

    zeros = np.zeros(len(pieces), np.int64)
    return ChunkTable(
        tensor=zeros,
        file=zeros,
        offset=np.cumsum([0, *(piece.nbytes for piece in pieces)], dtype=np.int64)[:-1],
        dims=column(len(piece.begin) for piece in pieces),
        flat=column(piece.flat for piece in pieces),
        begin=column(at for piece in pieces for at in piece.begin),
        extent=column(count for piece in pieces for count in piece.extent),
        digests=np.zeros(0, np.uint64),
        first_proof=zeros,
        file_blocks=zeros,
        itemsize=column(DTYPES[piece.dtype] for piece in pieces),
        block_bytes=64,
    )


def found_for(pieces, *wanted):
    regions = list(wanted)
    return overlap(table_of(pieces), regions, np.zeros(len(wanted), np.int64))


def indices(grid):
    """Where each of a grid's bytes lies in its chunk and in its destination, one by one."""
    pairs = [(grid.source, grid.target)]
    for count, source, target in zip(
        grid.counts, grid.source_strides, grid.target_strides, strict=True
    ):
        pairs = [(s + i * source, t + i * target) for s, t in pairs for i in range(count)]
    return pairs


def filled(found, number, nbytes, chunks):
    """A destination as its runs and grids fill it, and how often each byte was filled."""
    memory, times = bytearray(nbytes), [0] * nbytes
    pairs = [
        (row, source + i, target + i)
        for region, row, source, target, count in found.runs.T.tolist()
        if region == number
        for i in range(count)
    ]
    for region, row, grid in found.grids:
        if region == number:
            pairs += [(row, source, target) for source, target in indices(grid)]
    for row, source, target in pairs:
        memory[target] = chunks[row][source]
        times[target] += 1
    return bytes(memory), times


@st.composite
def cases(draw):
    """Chunks that make up a tensor, and regions of it that are not empty."""
    dtype, shape = draw(st.sampled_from(tilings.DTYPES)), draw(tilings.shapes(9))
    pieces = draw(tilings.tilings("t", shape, dtype))
    wanted = draw(st.lists(tilings.regions("t", shape, dtype), min_size=1, max_size=3))
    return pieces, [one for one in wanted if one.nbytes]


@settings(max_examples=300)
@given(cases())
def test_each_byte_of_a_region_is_filled_once_and_from_its_place(drawn):
    pieces, wanted = drawn
    content = support.contents(1, [pieces])["t"]
    chunks = [support.bytes_of(piece, content) for piece in pieces]

    found = found_for(pieces, *wanted)

    assert found.problems == {}
    for number, one in enumerate(wanted):
        memory, times = filled(found, number, one.nbytes, chunks)
        assert memory == support.bytes_of(one, content)
        assert set(times) == {1}


@settings(max_examples=300)
@given(cases(), st.data())
def test_a_missing_or_a_doubled_chunk_is_told_by_every_region_that_it_touches(drawn, data):
    pieces, wanted = drawn
    lost = data.draw(st.integers(0, len(pieces) - 1))
    twice = data.draw(st.integers(0, len(pieces) - 1))
    lost_elements = set(support.elements_of(pieces[lost]))
    twice_elements = set(support.elements_of(pieces[twice]))
    broken = [piece for number, piece in enumerate(pieces) if number != lost]
    broken += [pieces[twice]] * (2 if lost == twice else 1)
    if lost == twice:
        lost_elements = set()

    found = found_for(broken, *wanted)

    for number, one in enumerate(wanted):
        elements = set(support.elements_of(one))
        touched = elements & (lost_elements | twice_elements)
        assert (number in found.problems) == bool(touched)


def boxes(shape, *parts):
    return [ShardPiece("t", "U8", shape, begin, extent) for begin, extent in parts]


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 0), (2, 3)), ((0, 2), (2, 2)), ((2, 0), (2, 3))],
        [((0, 0), (2, 4)), ((1, 0), (2, 4))],
    ],
    ids=["columns", "rows"],
)
def test_the_right_number_of_elements_is_not_enough(parts):
    overlapping = boxes((4, 4), *parts)
    (whole,) = boxes((4, 4), ((0, 0), (4, 4)))

    assert sum(piece.nbytes for piece in overlapping) == whole.nbytes
    assert found_for(overlapping, whole).problems == {0: "has elements that are in two chunks"}


def test_an_empty_box_is_in_nobodys_way():
    flat = ShardPiece("t", "U8", (4, 4), (0,), (16,), flat=True)
    empty, wanted = boxes((4, 4), ((0, 0), (0, 2)), ((1, 0), (2, 4)))

    assert found_for([flat, empty], wanted).runs.T.tolist() == [[0, 0, 4, 0, 8]]


def test_a_region_that_is_not_covered_tells_how_much_it_lacks():
    rows = boxes((4, 4), ((0, 0), (1, 4)), ((3, 0), (1, 4)))
    wanted = boxes((4, 4), ((0, 0), (4, 4)), ((0, 0), (1, 4)), ((0, 2), (4, 2)))

    assert found_for(rows, *wanted).problems == {
        0: "lacks 8 of the elements that are wanted: no chunk has them",
        2: "lacks 4 of the elements that are wanted: no chunk has them",
    }


def test_flat_ranges_beside_boxes_that_are_none_are_refused():
    mixed = [
        ShardPiece("t", "U8", (4, 4), (0, 0), (4, 2)),
        ShardPiece("t", "U8", (4, 4), (0,), (8,), flat=True),
    ]
    wanted = boxes((4, 4), ((0, 0), (4, 4)))

    assert found_for(mixed, *wanted).problems == {
        0: "is stored as flat ranges and as boxes that are none"
    }


@pytest.mark.parametrize("flat", [False, True])
def test_rows_for_rows_are_runs_whatever_is_flat(flat):
    rows = [
        ShardPiece("t", "F32", (8, 3), (at * 3,), (6,), flat=True)
        if flat
        else ShardPiece("t", "F32", (8, 3), (at, 0), (2, 3))
        for at in range(0, 8, 2)
    ]
    wanted = ShardPiece("t", "F32", (8, 3), (1, 0), (4, 3))

    found = found_for(rows, wanted)

    assert found.grids == []
    assert found.runs.T.tolist() == [[0, 0, 12, 0, 12], [0, 1, 0, 12, 24], [0, 2, 0, 36, 12]]


def test_what_lies_in_one_column_of_boxes_on_both_sides_is_a_run():
    columns = boxes((8, 8), ((0, 0), (8, 4)), ((0, 4), (8, 4)))

    found = found_for(columns, ShardPiece("t", "U8", (8, 8), (2, 4), (3, 4)))

    assert found.grids == []
    assert found.runs.T.tolist() == [[0, 1, 8, 0, 12]]


@pytest.mark.parametrize(
    ("begin", "extent", "grid"),
    [
        ((0, 0, 0, 1), (6, 5, 4, 1), Grid((120, 1), (3, 1), (1, 1), 1, 0)),
        ((2, 0, 0, 1), (1, 5, 4, 1), Grid((20, 1), (3, 1), (1, 1), 121, 0)),
        ((0, 0, 1, 0), (6, 1, 2, 3), Grid((6, 6), (60, 1), (6, 1), 3, 0)),
    ],
)
def test_dimensions_that_go_on_where_the_inner_one_ends_are_one_loop(begin, extent, grid):
    (chunk,) = boxes((6, 5, 4, 3), ((0, 0, 0, 0), (6, 5, 4, 3)))

    found = found_for([chunk], ShardPiece("t", "U8", (6, 5, 4, 3), begin, extent))

    assert found.grids == [(0, 0, grid)]


GRIDS = st.builds(
    lambda counts, gaps, source: Grid(
        tuple(counts), _nested(counts, gaps), _nested(counts, [0] * len(counts)), source, 5
    ),
    *(st.lists(st.integers(low, 5), min_size=3, max_size=3) for low in (1, 0)),
    st.integers(0, 40),
)


def _nested(counts, gaps):
    strides, stride = [], 1
    for count, gap in zip(reversed(counts), gaps, strict=True):
        strides.append(stride)
        stride = stride * count + gap
    return tuple(reversed(strides))


@given(GRIDS)
def test_bytes_before_a_position_are_counted_right(grid):
    places = [source for source, _ in indices(grid)]
    positions = np.arange(max(places) + 10)

    counted = grid.before(positions).tolist()

    assert counted == [sum(place < position for place in places) for position in positions]


@given(GRIDS, st.data())
def test_a_part_of_a_grid_is_those_bytes_as_few_grids(grid, data):
    low = data.draw(st.integers(0, grid.nbytes))
    high = data.draw(st.integers(low, grid.nbytes))

    parts = list(grid.part(low, high))

    assert [pair for part in parts for pair in indices(part)] == indices(grid)[low:high]
    assert len(parts) <= 2 * len(grid.counts) - 1
    assert sum(math.prod(part.counts) for part in parts) == high - low


def test_no_regions_are_no_work():
    found = found_for(boxes((4,), ((0,), (4,))))

    assert found.runs.shape == (5, 0)
    assert (found.grids, found.problems) == ([], {})
