"""Who takes part in a round, whatever was lost before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.node.agent.in_place import OFTEN_S, RoundSize, choose_members, dies_often, round_size

NODES = st.integers(1, 12)


@given(st.data())
def test_members_live_keep_their_order_and_are_as_many_as_can_be(data):
    count = data.draw(NODES)
    before = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]
    living = set(data.draw(st.lists(st.integers(0, count - 1), unique=True)))
    most = data.draw(NODES)
    size = RoundSize(most, data.draw(st.integers(1, most)))
    legal = set(data.draw(st.lists(NODES, unique=True)))

    members = choose_members(before, living, size, legal.__contains__)

    possible = [n for n in legal if size.least <= n <= min(size.most, len(living))]
    if members is None:
        assert not possible
        return
    assert len(members) == max(possible)
    assert set(members) <= living
    assert len(set(members)) == len(members)
    old = [node for node in before if node in living]
    assert list(members[: len(old)]) == old[: len(members)]
    joined = members[len(old) :]
    assert list(joined) == sorted(joined)


@pytest.mark.parametrize(
    ("nodes", "allocated", "spares", "shrinks", "expected"),
    [
        ((4, 4), 5, 1, False, RoundSize(4, 4)),
        ((4, 4), 4, 1, False, RoundSize(4, 4)),  # run again after a loss, without its spare
        ((4, 4), 3, 1, False, RoundSize(3, 3)),
        ((2, 4), 5, 1, True, RoundSize(4, 2)),
        ((2, 4), 3, 1, True, RoundSize(2, 2)),
        ((2, 4), 4, 0, True, RoundSize(4, 2)),
        ((2, 4), 4, 0, False, RoundSize(4, 4)),
    ],
)
def test_how_many_nodes_train(nodes, allocated, spares, shrinks, expected):
    size = round_size(*nodes, allocated=allocated, spares=spares, shrinks=shrinks)

    assert size == expected


def test_a_node_is_bad_whose_ranks_die_twice_within_an_hour():
    deaths = {}

    assert not dies_often(deaths, 1, 0.0)
    assert not dies_often(deaths, 2, 1.0)
    assert not dies_often(deaths, 1, OFTEN_S)
    assert dies_often(deaths, 1, 2 * OFTEN_S - 1)
