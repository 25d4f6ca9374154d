"""Which step ranks go on from, of what the nodes have."""

from __future__ import annotations

from hpctrain.node.memory.slots import HeldCopy, Inventory, Mark, choose

DOORS = [["n0", 1], ["n1", 2], ["n2", 3]]


def node(number, own=(), guests=()):
    """What a node has: pairs of step and rank, of three ranks."""
    copies = [[HeldCopy(1, step, 3, rank) for step, rank in of] for of in (own, guests)]
    return Inventory(*copies, DOORS[number])


def test_the_newest_step_whose_makers_are_all_there_is_memory():
    nodes = [
        node(rank, [(10, rank), (20, rank)], [(10, (rank - 1) % 3), (20, (rank - 1) % 3)])
        for rank in range(3)
    ]

    newest, older = choose(nodes, 0)

    assert (newest.mark, newest.world_size, newest.kept_by) == (Mark(1, 20), 3, "memory")
    assert newest.addresses == {
        0: [DOORS[0], DOORS[1]],
        1: [DOORS[1], DOORS[2]],
        2: [DOORS[0], DOORS[2]],
    }
    assert older.mark == Mark(1, 10)


def test_a_lost_nodes_part_comes_from_its_peer():
    nodes = [node(0, [(20, 0)], [(20, 2)]), node(2, [(20, 2)], [(20, 1)]), Inventory()]

    (choice,) = choose(nodes, 0)

    assert choice.kept_by == "peer"
    assert choice.addresses[1] == [DOORS[2]]


def test_a_newer_step_on_a_peer_comes_before_an_older_one_of_its_makers():
    nodes = [
        node(0, [(10, 0), (20, 0)], [(10, 2)]),
        node(1, [(10, 1)], [(20, 0), (20, 1)]),
        node(2, [(10, 2), (20, 2)]),
    ]

    assert [(choice.mark.step, choice.kept_by) for choice in choose(nodes, 0)] == [
        (20, "peer"),
        (10, "memory"),
    ]


def test_a_part_that_nobody_has_and_what_the_disk_has_newer_are_no_choice():
    nodes = [node(0, [(20, 0)], [(20, 2)]), node(2, [(20, 2)])]

    assert choose(nodes, 0) == []
    assert choose([*nodes, node(1, [(20, 1)])], 21) == []
    assert len(choose([*nodes, node(1, [(20, 1)])], 20)) == 1


def test_lists_as_json_has_them_are_understood_and_no_address_gives_nothing():
    plain = [[[1, 20, 1, 0]], [], None]

    (choice,) = choose([plain], 0)

    assert (choice.mark, choice.addresses) == (Mark(1, 20), {})
