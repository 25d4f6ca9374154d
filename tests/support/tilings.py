"""Any way to cut tensors into chunks and destinations, for property tests."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from hpctrain.checkpoint.format.shard import ShardPiece

DTYPES = ["U8", "BOOL", "BF16", "F16", "F32", "I64", "C64"]


@st.composite
def shapes(draw, largest=24):
    """Up to three dimensions; a scalar and an empty one among them."""
    return tuple(draw(st.lists(st.integers(0, largest), max_size=3)))


@st.composite
def cuts(draw, shape, depth=4):
    """Boxes that tile a shape, cut in two again and again, as no grid need be."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, depth))):
        index = draw(st.integers(0, len(boxes) - 1))
        begin, extent = boxes[index]
        wide = [d for d, size in enumerate(extent) if size > 1]
        if not wide:
            continue
        d = draw(st.sampled_from(wide))
        at = draw(st.integers(1, extent[d] - 1))
        left, right = list(extent), list(extent)
        left[d], right[d] = at, extent[d] - at
        moved = list(begin)
        moved[d] += at
        boxes[index : index + 1] = [(begin, tuple(left)), (tuple(moved), tuple(right))]
    return boxes


@st.composite
def ranges(draw, number):
    """Ranges that tile so many elements."""
    edges = sorted(draw(st.lists(st.integers(0, number), max_size=4)))
    edges = [0, *edges, number]
    return [(low, high - low) for low, high in itertools.pairwise(edges)]


@st.composite
def tilings(draw, name, shape, dtype):
    """Pieces that make up a tensor: boxes, or flat ranges."""
    if draw(st.booleans()):
        parts = draw(ranges(math.prod(shape)))
        return [ShardPiece(name, dtype, shape, (at,), (count,), flat=True) for at, count in parts]
    return [ShardPiece(name, dtype, shape, begin, extent) for begin, extent in draw(cuts(shape))]


@st.composite
def regions(draw, name, shape, dtype):
    """A box of a tensor, or a range of it; as a piece."""
    if draw(st.booleans()):
        number = math.prod(shape)
        at = draw(st.integers(0, number))
        count = draw(st.integers(0, number - at))
        return ShardPiece(name, dtype, shape, (at,), (count,), flat=True)
    begin = tuple(draw(st.integers(0, size)) for size in shape)
    extent = tuple(draw(st.integers(0, size - at)) for at, size in zip(begin, shape, strict=True))
    return ShardPiece(name, dtype, shape, begin, extent)


@st.composite
def checkpoints(draw):
    """Pieces by rank, and regions to read."""
    ranks = [[], [], []]
    wanted = []
    for number in range(draw(st.integers(1, 3))):
        name, dtype, shape = f"t{number}", draw(st.sampled_from(DTYPES)), draw(shapes())
        for piece in draw(tilings(name, shape, dtype)):
            ranks[draw(st.integers(0, 2))].append(piece)
        wanted += [draw(regions(name, shape, dtype)) for _ in range(draw(st.integers(1, 2)))]
    return ranks, wanted
