"""Who has whose copies, by the switches of the nodes."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.node.memory.replica_peer import beside, next_nodes, replica_peers_of, warning

KNOWN = st.lists(st.sampled_from(["s1", "s2", "s3", "s4"]), min_size=2, max_size=40)
SOME_KNOWN = st.lists(st.sampled_from(["", "s1", "s2", "s3"]), min_size=2, max_size=40)


def apart(peers, switches):
    """How many copies are on another switch than their state."""
    pairs = enumerate(peers)
    return sum(switches[place] != switches[peer] for place, peer in pairs)


@given(SOME_KNOWN)
def test_each_node_has_the_copies_of_one_other_node(switches):
    peers = replica_peers_of(switches)

    assert sorted(peers) == list(range(len(switches)))
    assert all(peer != place for place, peer in enumerate(peers))


@given(KNOWN)
def test_every_copy_is_on_another_switch_where_none_has_more_than_half(switches):
    largest, nodes = max(Counter(switches).values()), len(switches)

    together = beside(replica_peers_of(switches), switches)

    # A switch with more than half of the nodes finds so many places outside, and fills them.
    assert len(together) == max(0, 2 * largest - nodes)


@given(st.lists(st.sampled_from(["", "s1", "s2", "s3"]), min_size=2, max_size=6))
def test_no_other_ring_has_more_copies_on_another_switch(switches):
    places = range(len(switches))
    rings = [ring for ring in permutations(places) if all(ring[place] != place for place in places)]

    assert apart(replica_peers_of(switches), switches) == max(
        apart(ring, switches) for ring in rings
    )


@given(SOME_KNOWN, st.randoms())
def test_the_names_of_switches_do_not_matter(switches, chance):
    names = ["a", "b", "c", "d"]
    chance.shuffle(names)
    others = dict(zip(["", "s1", "s2", "s3"], names, strict=True))

    assert replica_peers_of([others[name] for name in switches]) == replica_peers_of(switches)


@given(st.integers(1, 40))
def test_it_is_the_next_node_where_no_switch_is_known_or_each_node_has_its_own(nodes):
    ring = tuple((place + 1) % nodes for place in range(nodes))

    assert next_nodes(nodes) == ring
    assert replica_peers_of(["s1"] * nodes) == ring
    assert replica_peers_of([f"s{place}" for place in range(nodes)]) == ring


def test_it_is_no_node_where_there_is_none():
    assert next_nodes(0) == ()


@pytest.mark.parametrize("dead", ["s1", "s2", "s3"])
def test_a_switch_that_dies_leaves_each_of_its_states_elsewhere(dead):
    switches = ["s1", "s1", "s2", "s2", "s3", "s3", "s3"]

    living = {place for place, switch in enumerate(switches) if switch != dead}

    lost = set(range(len(switches))) - living
    assert {replica_peers_of(switches)[place] for place in lost} <= living


def test_it_is_said_whose_copies_a_switch_takes_with_it():
    names, switches = ["n1", "n2", "n3", "n4"], ["s1", "s1", "s1", "s2"]

    said = warning(names, replica_peers_of(switches), switches)

    assert said == (
        "copies of n[2-3] stay on their own switch (s1): it has more than half of the round's "
        "nodes, and where it dies they are lost"
    )


@pytest.mark.parametrize("switches", [["s1", "s1", "s2", "s2"], ["", "", ""], ["", "s1", "s2"]])
def test_nothing_is_said_where_no_switch_takes_both_or_none_is_known(switches):
    assert warning(["n1", "n2", "n3", "n4"], replica_peers_of(switches), switches) == ""
