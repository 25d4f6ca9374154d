"""All ranks' parts make one table, or an error that says which tensor is not whole."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.format import table as module
from hpctrain.checkpoint.format.layout import assemble, part_of
from hpctrain.checkpoint.format.manifest import TensorEntry
from hpctrain.checkpoint.format.shard import ShardPiece, file_name
from hpctrain.checkpoint.format.table import place_in
from hpctrain.errors import CheckpointError
from tests.support import checkpoints as support
from tests.support import tilings
from tests.support.parts import BLOCK_BYTES, part, whole


def together(*ranks):
    parts = [part(rank, pieces) for rank, pieces in enumerate(ranks)]
    files, tensors, index = assemble(parts, BLOCK_BYTES)
    return files, tensors, index.whole()


def refused(*ranks) -> str:
    with pytest.raises(CheckpointError) as caught:
        together(*ranks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def box(begin, extent, shape, name="w", dtype="F32"):
    return ShardPiece(name, dtype, tuple(shape), tuple(begin), tuple(extent))


def flat(begin, count, shape, name="w", dtype="F32"):
    return ShardPiece(name, dtype, tuple(shape), (begin,), (count,), flat=True)


def grid(shape, *counts, name="w"):
    """Boxes of a tensor that is cut evenly in each dimension."""
    sizes = [size // count for size, count in zip(shape, counts, strict=True)]
    return [
        box([i * size for i, size in zip(at, sizes, strict=True)], sizes, shape, name)
        for at in np.ndindex(*counts)
    ]


# ---- what is made of the parts ------------------------------------------------------------------


def test_files_tensors_and_chunks_are_numbered_in_the_ranks_order():
    files, tensors, table = together(
        [box((0, 0), (2, 4), (4, 4)), whole("optim.step", "I64")],
        [],
        [whole("model.none", "U8", 0, 3), box((2, 0), (2, 4), (4, 4))],
    )

    assert [entry.name for entry in files] == [file_name(0), file_name(2)]
    assert tensors == [
        TensorEntry("w", "F32", (4, 4)),
        TensorEntry("optim.step", "I64", ()),
        TensorEntry("model.none", "U8", (0, 3)),
    ]
    assert table.tensor.tolist() == [0, 1, 2, 0]
    assert table.file.tolist() == [0, 0, 1, 1]
    assert table.dims.tolist() == [2, 0, 2, 2]
    assert table.begin.tolist() == [0, 0, 0, 0, 2, 0]
    assert table.extent.tolist() == [2, 4, 0, 3, 2, 4]
    assert table.itemsize.tolist() == [4, 8, 1, 4]


def test_offsets_are_those_at_which_the_ranks_wrote():
    ranks = [[whole("t0", "F32", 100), whole("r", "U8")], [whole("t1", "F32", 100)]]

    _, _, table = together(*ranks)

    reports = [support.unwritten(rank, pieces, BLOCK_BYTES) for rank, pieces in enumerate(ranks)]
    assert table.offset.tolist() == [n for report in reports for n in report.offsets.tolist()]


def test_names_that_ranks_share_in_another_order_or_not_at_all_are_one_tensor_each():
    shape = (6, 4)
    _, tensors, table = together(
        [box((0, 0), (2, 4), shape, "a"), whole("rng.rank-00000.torch", "U8", 3)],
        [whole("rng.rank-00001.torch", "U8", 3), box((2, 0), (4, 4), shape, "a")],
        [whole("only.here", "I64", 2)],
    )

    names = ["a", "only.here", "rng.rank-00000.torch", "rng.rank-00001.torch"]
    assert [one.name for one in tensors] == names
    assert table.tensor.tolist() == [0, 2, 3, 0, 1]


def test_any_text_is_a_name():
    names = ["model.\0", "model.\0\0", "", "modèle", "a\nb"]
    _, tensors, _ = together([whole(name, "U8", 1) for name in names])
    assert [one.name for one in tensors] == names


def test_a_part_is_sent_as_columns_and_comes_back_as_it_was():
    sent = part(0, [whole(f"model.layers.{n}.weight", "BF16", 1024, 8) for n in range(500)])

    content = pickle.dumps(sent)
    back = pickle.loads(content)  # noqa: S301 - our own bytes

    assert (back.file, back.key) == (sent.file, sent.key)
    assert (back.layout.key, back.layout.names) == (sent.key, sent.layout.names)
    assert len(content) < 500 * 120


def test_a_rank_whose_layout_another_sends_says_little_however_many_tensors_it_has():
    names = [f"model.layers.{n}.weight" for n in range(500)]
    ranks = [[box((at, 0), (2, 8), (8, 8), name) for name in names] for at in (0, 2, 4, 6)]
    parts = [part(rank, pieces) for rank, pieces in enumerate(ranks)]

    assert len({one.key for one in parts}) == 2  # the first begins at 0 throughout
    short = [replace(one, layout=None) if rank > 1 else one for rank, one in enumerate(parts)]
    _, _, index = assemble(short, BLOCK_BYTES)

    assert all(len(pickle.dumps(one)) < 600 for one in short[2:])
    assert index.whole().begin.tolist() == assemble(parts, BLOCK_BYTES)[2].whole().begin.tolist()
    with pytest.raises(CheckpointError, match="no rank has said what lies in 'shard-00001"):
        assemble([short[0], *[replace(one, layout=None) for one in parts[1:]]], BLOCK_BYTES)


def test_no_rank_with_a_file_makes_an_empty_table():
    files, tensors, table = together([], [])
    assert (files, tensors, len(table)) == ([], [], 0)


def test_the_states_digest_leaves_out_the_generators_of_random_numbers():
    pieces = [
        whole("model.w", "F32", 40),
        whole("rng.rank-00000.torch", "U8", 100),
        whole("model.none", "U8", 0),
        whole("rngs.tracked", "U8", 1),
    ]
    report = support.unwritten(0, pieces, BLOCK_BYTES)
    digests = report.digests

    def state(turned):
        other = replace(report, digests=np.where(np.arange(len(digests)) == turned, 1, digests))
        return part_of(pieces, other, block_bytes=BLOCK_BYTES).state

    as_is = state(-1)
    assert [state(block) == as_is for block in range(len(digests))] == [
        *[False] * 3,
        True,
        True,
        False,
    ]


# ---- what covers a tensor -----------------------------------------------------------------------


@settings(max_examples=150)
@given(tilings.checkpoints())
def test_any_way_to_cut_tensors_is_accepted(drawn):
    ranks, _ = drawn
    _, tensors, table = together(*ranks)

    assert len(table) == sum(map(len, ranks))
    for number, entry in enumerate(tensors):
        rows = table.rows_of(number)
        elements = table.nbytes[rows].sum() // table.itemsize[rows[0]]
        assert elements == math.prod(entry.shape)


@settings(max_examples=300)
@given(st.data())
def test_a_piece_that_is_moved_resized_doubled_or_lost_is_refused(data):
    """Told by painting: what covers each element once is accepted, all else is not."""
    shape = data.draw(tilings.shapes(largest=8))
    assume(math.prod(shape) > 0)
    pieces = list(data.draw(tilings.tilings("w", shape, "U8")))
    victim = data.draw(st.integers(0, len(pieces) - 1))
    changed = data.draw(changes(pieces[victim]))
    pieces[victim : victim + 1] = changed
    assume(pieces)

    if tiles(pieces):
        together(pieces)
    else:
        assert "w" in refused(pieces)


@st.composite
def changes(draw, piece):
    """A piece that lies elsewhere or is larger or smaller, twice the same, or none."""
    what = draw(st.sampled_from(["move", "resize", "double", "lose"]))
    if what == "double":
        return [piece, piece]
    if what == "lose" or not piece.begin:
        return []
    at = draw(st.integers(0, len(piece.begin) - 1))
    by = draw(st.integers(-4, 4))
    if what == "move":
        begin = list(piece.begin)
        begin[at] = max(0, begin[at] + by)
        return [replace(piece, begin=tuple(begin))]
    extent = list(piece.extent)
    extent[at] = max(0, extent[at] + by)
    return [replace(piece, extent=tuple(extent))]


def tiles(pieces) -> bool:
    """Whether each element is covered once: slow, and plainly right."""
    shape = pieces[0].shape
    painted = np.zeros(shape, int)
    for piece in pieces:
        bounds = (math.prod(shape),) if piece.flat else shape
        ends = [at + size for at, size in zip(piece.begin, piece.extent, strict=True)]
        if any(end > bound for end, bound in zip(ends, bounds, strict=True)):
            return False
        target = painted.reshape(-1) if piece.flat else painted
        target[tuple(map(slice, piece.begin, ends))] += 1
    return bool((painted == 1).all())


@settings(max_examples=100)
@given(st.data())
def test_boxes_too_many_to_paint_are_judged_alike(data):
    shape = data.draw(tilings.shapes(largest=8))
    pieces = [box(*cut, shape) for cut in data.draw(tilings.cuts(shape, depth=8))]
    moved = [replace(one, begin=pieces[0].begin) if one == pieces[-1] else one for one in pieces]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_PAINTED", 0)
        together(pieces)
        if not tiles(moved):
            assert "w" in refused(moved)


@pytest.mark.parametrize(
    "pieces",
    [
        grid((8, 8), 4, 2),
        grid((8, 8, 8), 2, 4, 2),
        [*grid((8, 8), 2, 1)[:1], *[box((4 + r, 0), (1, 8), (8, 8)) for r in range(4)]],
        [box((0, 0), (3, 4), (4, 4)), flat(12, 1, (4, 4)), flat(13, 3, (4, 4))],
        [flat(0, 6, (4, 4)), box((1, 2), (1, 2), (4, 4)), flat(8, 8, (4, 4))],
        [flat(4, 12, (4, 4)), flat(0, 4, (4, 4)), box((2, 0), (0, 4), (4, 4))],
        [box((0, 0), (0, 4), (4, 4)), box((0, 0), (4, 4), (4, 4)), box((4, 0), (0, 4), (4, 4))],
        [box((), (), ())],
        [flat(0, 1, ())],
        [box((0, 0), (0, 3), (0, 3)), box((0, 1), (0, 1), (0, 3)), flat(0, 0, (0, 3))],
        # A pinwheel: no straight line cuts it in two.
        [
            box((0, 0), (1, 2), (3, 3)),
            box((0, 2), (2, 1), (3, 3)),
            box((2, 1), (1, 2), (3, 3)),
            box((1, 0), (2, 1), (3, 3)),
            box((1, 1), (1, 1), (3, 3)),
        ],
    ],
)
def test_each_of_these_covers_its_tensor_once(pieces):
    _, _, table = together(pieces)
    assert len(table.rows_of(0)) == len(pieces)


OVERLAP = "the ranks' parts of w overlap: some of it was written twice, some by nobody"


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (grid((8, 8), 4, 2)[:-1], "w has 64 elements, 56 were written"),
        ([*grid((8, 8), 4, 2), grid((8, 8), 4, 2)[0]], "w has 64 elements, 72 were written"),
        ([*grid((8, 8), 4, 2)[:-1], grid((8, 8), 4, 2)[0]], OVERLAP),
        ([box((0, 0), (4, 8), (8, 8)), box((3, 0), (4, 8), (8, 8))], OVERLAP),
        ([box((0, 0), (3, 2), (3, 4)), box((0, 0), (2, 3), (3, 4))], OVERLAP),
        ([flat(0, 8, (4, 4)), flat(7, 8, (4, 4))], OVERLAP),
        ([flat(0, 8, (4, 4)), box((1, 0), (2, 4), (4, 4))], OVERLAP),
        ([box((0, 0), (4, 2), (4, 4)), flat(8, 8, (4, 4))], "as flat ranges and as boxes"),
        ([box((1, 0), (4, 4), (4, 4))], "w reach out of its shape, F32[4,4]"),
        ([box((0, 0), (2, 8), (4, 4))], "w reach out of its shape, F32[4,4]"),
        ([flat(8, 8, (4, 4)), flat(16, 8, (4, 4))], "w reach out of its shape, F32[4,4]"),
        ([flat(1, 1, ())], "w reach out of its shape, F32[]"),
        ([box((0,), (16,), (4, 4))], "w reach out of its shape, F32[4,4]"),
        ([box((0, 0), (1, 1), (4, 4)) for _ in range(3)], "w has 16 elements, 3 were written"),
        ([box((0, 0), (0, 3), (1, 3))], "w has 3 elements, 0 were written"),
    ],
)
def test_what_does_not_cover_its_tensor_once_is_refused_by_its_name(pieces, reason):
    assert reason in refused(pieces[:1], pieces[1:])


def test_a_tensor_is_not_taken_for_another_of_the_same_shape_that_other_ranks_wrote():
    """Each is looked at once for all that are laid out alike; these two are not."""
    shape = (3, 4)
    right = [[box((row, 0), (1, 4), shape, "a")] for row in (0, 1, 2)]
    wrong = [[box((row, 0), (1, 4), shape, "b")] for row in (0, 1, 1)]

    assert "b overlap" in refused(*right, *wrong)


def test_a_rank_whose_part_is_missing_is_told_by_its_tensors():
    ranks = [[box((rank, 0), (1, 4), (2, 4), f"model.{n}") for n in range(5)] for rank in range(2)]
    assert refused(ranks[0], []) == (
        "the ranks' parts do not make up the tensors: model.0 has 8 elements, 4 were written, "
        "model.1 has 8 elements, 4 were written, model.2 has 8 elements, 4 were written "
        "(and 2 more)"
    )


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (whole("w", "BF16", 4, 4), "BF16[4,4]"),
        (whole("w", "F32", 4, 5), "F32[4,5]"),
        (whole("w", "F32", 4, 4, 1), "F32[4,4,1]"),
        (whole("w", "F32", 4, 0), "F32[4,0]"),
        (whole("w", "F32"), "F32[]"),
    ],
)
def test_ranks_that_disagree_on_a_tensor_are_refused_with_both_views(other, text):
    mine = [whole("a", "U8", 2), box((0, 0), (2, 4), (4, 4))]

    assert refused(mine, [other]) == f"ranks disagree on w: F32[4,4] and {text}"
    assert refused([*mine, other]) == f"ranks disagree on w: F32[4,4] and {text}"


# ---- boxes as ranges ----------------------------------------------------------------------------


@st.composite
def boxes_in(draw):
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    begin = [draw(st.integers(0, size - 1)) for size in shape]
    extent = [draw(st.integers(1, size - at)) for at, size in zip(begin, shape, strict=True)]
    return box(begin, extent, shape)


@settings(max_examples=200)
@given(boxes_in())
def test_a_box_is_a_range_exactly_if_its_elements_follow_each_other(piece):
    elements = list(support.elements_of(piece))
    follow = elements == list(range(elements[0], elements[0] + len(elements)))

    box = (np.array([sizes], np.int64) for sizes in (piece.begin, piece.extent, piece.shape))
    first, is_run = place_in(*box)

    assert is_run.tolist() == [follow]
    assert first.tolist() == elements[:1]
