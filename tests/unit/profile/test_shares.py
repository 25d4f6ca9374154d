"""Time divided among kinds: every moment counts once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.observe.profile.trace import both, divide, length, minus, union

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple))


def moments(intervals):
    return {moment for begin, end in intervals for moment in range(begin, end)}


@given(SPANS, SPANS)
def test_intervals_are_sets_of_moments(these, those):
    one, other = union(these), union(those)

    assert moments(one) == moments(these)
    assert moments(minus(one, other)) == moments(these) - moments(those)
    assert moments(both(one, other)) == moments(these) & moments(those)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(one))
    assert length(one) == len(moments(these))


@given(SPANS, SPANS, SPANS)
def test_shares_add_up_to_one_and_the_earlier_kind_wins(first, second, third):
    kinds = {"a": union(first), "b": union(second), "c": union(third)}
    shares = divide((5, 35), kinds, "rest")
    inside = set(range(5, 35))

    assert sum(shares.values()) == pytest.approx(1)
    assert shares["a"] == pytest.approx(len(inside & moments(first)) / 30)
    only = inside & moments(second) - moments(first)
    assert shares["b"] == pytest.approx(len(only) / 30)
