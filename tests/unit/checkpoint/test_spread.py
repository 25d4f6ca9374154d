"""What several ranks hold alike is written once, by all of them together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.format.geometry import my_part
from hpctrain.checkpoint.format.shard import ShardPiece
from tests.support import tilings
from tests.support.checkpoints import elements_of
from tests.support.parts import whole


def all_parts(pieces, replicas):
    return [my_part(pieces, replica, replicas) for replica in range(replicas)]


@st.composite
def held(draw):
    """Boxes that every replica holds, of any tensors: whole ones, and shards of larger ones."""
    pieces = []
    for number in range(draw(st.integers(0, 6))):
        shape = draw(tilings.shapes(largest=12))
        begin, extent = draw(st.sampled_from(draw(tilings.cuts(shape))))
        dtype = draw(st.sampled_from(tilings.DTYPES))
        pieces.append(ShardPiece(f"t{number}", dtype, shape, begin, extent))
    return pieces


@settings(max_examples=200)
@given(held(), st.integers(1, 9))
def test_all_replicas_parts_make_up_each_box_exactly(pieces, replicas):
    written = {number: [] for number in range(len(pieces))}
    for parts in all_parts(pieces, replicas):
        for number, part in parts:
            mine = pieces[number]
            assert (part.name, part.dtype, part.shape) == (mine.name, mine.dtype, mine.shape)
            assert not part.flat
            written[number] += elements_of(part)

    for number, piece in enumerate(pieces):
        assert sorted(written[number]) == sorted(elements_of(piece))


@settings(max_examples=100)
@given(held(), st.integers(1, 9))
def test_a_part_is_one_run_of_the_boxs_bytes_so_it_needs_no_copy(pieces, replicas):
    for number, part in (one for parts in all_parts(pieces, replicas) for one in parts):
        of_box = list(elements_of(pieces[number]))
        of_part = list(elements_of(part))
        first = of_box.index(of_part[0]) if of_part else 0
        assert of_part == of_box[first : first + len(of_part)]


@settings(max_examples=100)
@given(held(), st.integers(1, 9))
def test_no_replica_gets_an_empty_part_and_each_empty_or_scalar_tensor_one_writer(pieces, replicas):
    pieces = [*pieces, whole("none", "F32", 0, 3), whole("step", "F32"), whole("one", "U8", 1, 1)]
    parts = [one for mine in all_parts(pieces, replicas) for one in mine]

    assert all(part.nbytes or not pieces[number].nbytes for number, part in parts)
    for number, piece in enumerate(pieces):
        if len(list(elements_of(piece))) <= 1:
            assert [part for at, part in parts if at == number] == [piece]


def realistic():
    """Two hundred tensors of mixed sizes, and an embedding of half of all bytes."""
    dice = random.Random(7)
    pieces = []
    for n in range(67):
        wide = dice.choice([512, 768, 1024])
        pieces += [
            whole(f"model.{n}.weight", "BF16", wide, dice.choice([512, 2048])),
            whole(f"model.{n}.bias", "BF16", wide),
            whole(f"optim.{n}.step", "F32"),
        ]
    rows = sum(piece.nbytes for piece in pieces) // 2048
    return [*pieces[:90], whole("model.embedding", "BF16", rows, 1024), *pieces[90:]]


@pytest.mark.parametrize("replicas", [2, 3, 8, 16, 64])
def test_each_replica_writes_its_share_of_a_realistic_state_within_a_tenth(replicas):
    pieces = realistic()
    total = sum(piece.nbytes for piece in pieces)
    largest = max(piece.nbytes for piece in pieces)
    assert 0.49 < largest / total < 0.51

    amounts = [sum(part.nbytes for _, part in parts) for parts in all_parts(pieces, replicas)]

    assert sum(amounts) == total
    assert max(amounts) < 1.1 * total / replicas
    assert min(amounts) > 0.9 * total / replicas


def test_every_replica_comes_to_the_same_cuts_without_asking():
    pieces = realistic()
    again = [whole(piece.name, piece.dtype, *piece.shape) for piece in pieces]
    assert all_parts(pieces, 8) == all_parts(again, 8)


def test_one_alone_writes_everything_as_it_holds_it():
    pieces = realistic()
    assert my_part(pieces, 0, 1) == list(enumerate(pieces))


def test_a_cut_goes_to_the_nearest_row_of_the_first_dimension_that_has_two():
    piece = ShardPiece("w", "F32", (9, 16, 10), (4, 2, 0), (1, 10, 10))

    parts = all_parts([piece], 3)

    cuts = [(part.begin, part.extent) for mine in parts for _, part in mine]
    assert cuts == [
        ((4, 2, 0), (1, 3, 10)),
        ((4, 5, 0), (1, 4, 10)),
        ((4, 9, 0), (1, 3, 10)),
    ]


def test_with_more_replicas_than_rows_some_write_nothing():
    parts = all_parts([whole("w", "F32", 2, 100)], 5)
    assert sorted(len(mine) for mine in parts) == [0, 0, 0, 1, 1]


def test_a_state_without_bytes_has_names_all_the_same():
    pieces = [whole("a", "F32", 0), whole("b", "U8", 3, 0)]
    assert all_parts(pieces, 3) == [list(enumerate(pieces)), [], []]
