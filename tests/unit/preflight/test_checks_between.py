from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.preflight.checks_between import (
    ALL_UP_TO,
    apart,
    check_names,
    check_shared,
    looked_for,
    missed,
    neighbours,
    standing_apart,
)

FOLDER = "/runs"


def names_of(size):
    return [f"n{rank}" for rank in range(size)]


def looks(size):
    """Node to whom it looks for, itself included."""
    names = names_of(size)
    return {names[r]: [names[r], *(names[o] for o in looked_for(r, size))] for r in range(size)}


def seen_by_groups(groups):
    """What nodes do not see that have as many directories as there are groups; node to group."""
    size = len(groups)
    group_of = dict(zip(names_of(size), groups, strict=True))
    return {
        node: [name for name in names if group_of[name] != group_of[node]]
        for node, names in looks(size).items()
    }


@pytest.mark.parametrize("size", [1, 2, 3, ALL_UP_TO])
def test_few_nodes_look_for_all(size):
    for rank in range(size):
        assert looked_for(rank, size) == [other for other in range(size) if other != rank]


@given(st.integers(ALL_UP_TO + 1, 3000))
def test_every_look_has_one_back_and_none_is_at_itself(size):
    found = {rank: set(looked_for(rank, size)) for rank in range(size)}

    assert all(rank not in others for rank, others in found.items())
    assert all(rank in found[other] for rank, others in found.items() for other in others)
    assert all({0, (rank + 1) % size} - {rank} <= found[rank] for rank in found)


@pytest.mark.parametrize("size", [64, 1000, 16_384])
def test_the_looks_of_all_nodes_grow_little_more_than_their_number(size):
    assert max(len(neighbours(rank, size)) for rank in range(size)) <= 2 * 14 + 1
    assert max(len(looked_for(rank, size)) for rank in range(1, size)) <= 2 * 14 + 1
    assert sum(len(looked_for(rank, size)) for rank in range(size)) <= size * 30


@given(st.integers(3, 200), st.data())
def test_a_minority_with_a_directory_of_its_own_is_named_and_nobody_else(size, data):
    odd = data.draw(st.sets(st.integers(0, size - 1), max_size=min(3, (size - 1) // 2)))
    groups = [rank if rank in odd else -1 for rank in range(size)]
    unseen = seen_by_groups(groups)

    found = standing_apart(names_of(size), looks(size), missed(names_of(size), unseen))

    assert found == [f"n{rank}" for rank in sorted(odd)]


@pytest.mark.parametrize("size", [2, 4, 32, 64, 1000, 1024])
@pytest.mark.parametrize("split", ["blocks", "by turns", "at random"])
def test_of_two_halves_neither_is_named_and_nobody_can_train(size, split):
    groups = {
        "blocks": [2 * rank // size for rank in range(size)],
        "by turns": [rank % 2 for rank in range(size)],
        "at random": random.Random(7).sample([rank % 2 for rank in range(size)], size),
    }[split]
    unseen, names = seen_by_groups(groups), names_of(size)

    found = check_shared(FOLDER, dict.fromkeys(names, ""), unseen, looks(size))
    why = apart(FOLDER, {}, unseen, looks(size))

    assert standing_apart(names, looks(size), missed(names, unseen)) == []
    assert [(one.status, one.nodes) for one in found] == [("fail", [])]
    assert "is not one directory for all nodes" in why
    assert len(why) < 2000  # it goes to every node


def test_a_third_in_blocks_is_named_whole_and_left_behind():
    size = 900
    unseen, names = seen_by_groups([int(rank < 300) for rank in range(size)]), names_of(size)

    [found] = check_shared(FOLDER, dict.fromkeys(names, ""), unseen, looks(size))

    assert found.nodes == names[:300]  # though the first node is one of them
    assert apart(FOLDER, {}, unseen, looks(size)) == ""


def test_a_node_whose_files_nobody_sees_is_named_though_it_sees_all():
    size = 100
    unseen = {node: ["n7"] * ("n7" in mine and node != "n7") for node, mine in looks(size).items()}

    found = check_shared(FOLDER, dict.fromkeys(names_of(size), ""), unseen, looks(size))

    assert [one.nodes for one in found] == [["n7"]]


def test_a_node_that_sees_nobody_is_named_though_all_see_it():
    size = 100
    unseen = dict.fromkeys(names_of(size), ()) | {"n7": [n for n in looks(size)["n7"] if n != "n7"]}

    [found] = check_shared(FOLDER, dict.fromkeys(names_of(size), ""), unseen, looks(size))

    assert found.nodes == ["n7"]


def test_a_node_that_sees_one_of_three_others_is_named():
    names, unseen = names_of(4), {"n3": ("n0", "n1")}

    assert standing_apart(names, looks(4), unseen) == ["n3"]


def test_two_halves_of_which_one_sees_the_other_blame_nobody():
    names, unseen = names_of(4), {"n0": (), "n1": (), "n2": ("n0", "n1"), "n3": ("n0", "n1")}

    assert standing_apart(names, looks(4), unseen) == []


def test_what_one_node_missed_of_one_other_blames_nobody():
    size = 100
    unseen = dict.fromkeys(names_of(size), ()) | {"n7": ["n8"]}

    [found] = check_shared(FOLDER, dict.fromkeys(names_of(size), ""), unseen, looks(size))

    assert (found.nodes, found.message) == ([], "n7 does not see n8")
    assert apart(FOLDER, {}, unseen, looks(size)) == ""


@pytest.mark.parametrize(("size", "says"), [(4, "every node sees all files"), (64, "the first")])
def test_what_is_well_says_what_was_looked_at(size, says):
    well, names = dict.fromkeys(names_of(size), ()), names_of(size)

    [files] = check_shared(FOLDER, dict.fromkeys(names, ""), well, looks(size))
    [hosts] = check_names(well)

    assert says in files.message
    assert ("every node finds the others" in hosts.message) == (size == 4)
