"""Which copies of weights are wrong, what is looked at when, and up to where all was right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.train.runtime.guarding import clean_step, differing, slices, window_of


def test_equal_copies_are_no_news():
    assert differing([1.0, 1.0, 2.0, 2.0], [[0, 1], [2, 3]]) == []


@pytest.mark.parametrize("wrong", range(4))
def test_of_three_or_more_the_minority_is_wrong(wrong):
    digests = [5.0] * 4
    digests[wrong] = 6.0
    (each,) = differing(digests, [[0, 1, 2, 3]])
    assert (each.suspects, each.is_certain, each.compared) == ((wrong,), True, (0, 1, 2, 3))


@pytest.mark.parametrize(("digests", "suspects"), [((1, 2), (0, 1)), ((1, 1, 2, 2), (0, 1, 2, 3))])
def test_without_a_majority_nobody_is_named_for_certain(digests, suspects):
    (each,) = differing(digests, [range(len(digests))])
    assert (each.suspects, each.is_certain) == (suspects, False)


def test_only_ranks_that_hold_the_same_part_are_compared():
    found = differing([1.0, 2.0, 1.0, 9.0, 1.0, 2.0], [[0, 2, 4], [1, 3, 5]])
    assert [each.suspects for each in found] == [(3,)]


@given(st.lists(st.integers(0, 10_000), max_size=60), st.integers(1, 20))
def test_every_tensor_is_in_one_slice(sizes, count):
    cut = slices(sizes, count)
    assert len(cut) == count
    assert sorted(n for part in cut for n in part) == list(range(len(sizes)))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 20))
def test_no_slice_is_much_larger_than_a_fair_share(sizes, count):
    loads = [sum(sizes[n] for n in part) for part in slices(sizes, count)]
    assert max(loads) <= sum(sizes) / count + max(sizes)


def test_a_window_is_whole_turns_and_longer_for_many_ranks():
    assert [window_of(8, ranks) for ranks in (2, 256, 257, 16_384)] == [8, 8, 16, 512]


def test_what_was_there_before_the_last_turn_but_one_is_clean():
    assert clean_step(64, 8) == 48
    assert clean_step(8, 8) == 0
