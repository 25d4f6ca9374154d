"""Layers of a chain go into stages in order, and the largest stage is as small as can be."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.ledger.plan.mesh import balance


@settings(max_examples=200)
@given(st.data())
def test_each_layer_is_in_one_stage_in_order_and_the_largest_stage_is_as_small_as_can_be(data):
    links = data.draw(
        st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=8)
    )
    sizes, blocks = [size for size, _ in links], [block for _, block in links]
    count = data.draw(st.integers(1, max(1, sum(blocks))))
    blocks = blocks if any(blocks) else [True] * len(links)

    runs = balance(sizes, blocks, count)

    assert [place for run in runs for place in run] == list(range(len(links)))
    assert all(any(blocks[place] for place in run) for run in runs)
    ends = itertools.combinations(range(1, len(links)), count - 1)
    every = [[range(a, b) for a, b in itertools.pairwise([0, *e, len(links)])] for e in ends]
    fair = [cut for cut in every if all(any(blocks[place] for place in run) for run in cut)]
    assert _largest(runs, sizes) == min(_largest(cut, sizes) for cut in fair)


def _largest(runs, sizes):
    return max(sum(sizes[place] for place in run) for run in runs)


@given(
    layers=st.integers(1, 40), block=st.integers(1, 99), ends=st.integers(0, 400), data=st.data()
)
def test_stages_of_a_decoder_are_above_their_mean_by_one_layer_at_most(layers, block, ends, data):
    count = data.draw(st.integers(1, layers))
    sizes = [ends, 0, *[block] * layers, 1, ends]
    blocks = [False] * 2 + [True] * layers + [False] * 2

    runs = balance(sizes, blocks, count)

    least = block + 1 + ends  # a block and what is behind the last one
    assert _largest(runs, sizes) <= max(sum(sizes) / count + max(sizes), least)


def test_equal_layers_are_spread_evenly_where_the_ends_are_larger():
    runs = balance([10, *[1] * 8, 10], [False, *[True] * 8, False], 4)

    assert [len(run) for run in runs] == [2, 3, 3, 2]
