"""Every rank gets every value once, in whatever order they come and however wide the tree is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ControlLost
from hpctrain.node.control import collectives
from hpctrain.node.control.collectives import (
    DOWN,
    UP,
    Call,
    Collectives,
    children_of,
    entries_of,
    entry,
    parent_of,
)

GATHER, GATHER_0, BROADCAST = (
    Call("0", 1, kind) for kind in ("gather", "gather_on_0", "broadcast")
)


def test_the_tree_holds_every_node_once(monkeypatch):
    for fanout in (1, 2, 32):
        monkeypatch.setattr(collectives, "FANOUT", fanout)
        for nodes in (1, 2, 3, 33, 34, 1100):
            parents = {child: node for node in range(nodes) for child in children_of(node, nodes)}
            assert parents == {node: parent_of(node) for node in range(1, nodes)}


def test_three_levels_hold_two_thousand_nodes():
    assert parent_of(2047) is not None
    assert parent_of(parent_of(2047)) == 0 or parent_of(parent_of(parent_of(2047))) == 0


class Tree:
    """Nodes of two ranks whose messages come in any order."""

    def __init__(self, nodes: int) -> None:
        self.nodes = [
            Collectives(range(2 * n, 2 * n + 2), children_of(n, nodes), is_root=n == 0)
            for n in range(nodes)
        ]
        self.size = nodes
        self.flying: list[tuple[int, object]] = []
        self.got: dict[int, list[tuple[Call, dict[int, bytes]]]] = {r: [] for r in range(2 * nodes)}

    def give(self, rank: int, call: Call, value: bytes) -> None:
        self.send(rank // 2, self.nodes[rank // 2].give(rank, call, value))

    def send(self, node, deliveries):
        for to, call, joined in deliveries:
            if to == UP:
                self.flying.append((parent_of(node), ("up", node, call, joined)))
            elif to == DOWN:
                for child in children_of(node, self.size):
                    self.flying.append((child, ("down", call, joined)))
            else:
                self.got[to].append((call, dict(entries_of(joined))))

    def move(self, number: int) -> None:
        node, (way, *rest) = self.flying.pop(number % len(self.flying))
        hear = self.nodes[node].hear_up if way == "up" else self.nodes[node].hear_down
        self.send(node, hear(*rest))


@settings(max_examples=60)
@given(st.data())
def test_every_rank_gets_every_value_in_whatever_order_they_come(data):
    nodes = data.draw(st.integers(1, 7))
    kind = data.draw(st.sampled_from(collectives.CALL_KINDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "FANOUT", 2)
        tree, calls = Tree(nodes), [Call("0", number, kind) for number in range(3)]
        todo = [(rank, call) for call in calls for rank in range(2 * nodes)]
        while todo or tree.flying:
            moves = data.draw(st.integers(0, 10**6))
            if todo and (not tree.flying or moves % 2):
                rank, call = todo.pop(moves // 2 % len(todo))
                tree.give(rank, call, b"%d of %d" % (rank, call.number))
            else:
                tree.move(moves // 2)
    everybody = range(2 * nodes)
    of = {call: {rank: b"%d of %d" % (rank, call.number) for rank in everybody} for call in calls}
    for rank in everybody:
        if kind == "broadcast":
            wanted = [] if rank == 0 else [(call, {0: of[call][0]}) for call in calls]
        else:
            wanted = [] if kind == "gather_on_0" and rank else list(of.items())
        assert sorted(tree.got[rank], key=lambda pair: pair[0]) == wanted


def test_ranks_that_call_something_else_are_told_so():
    node = Collectives(range(2), [5], is_root=True)
    node.give(0, GATHER, b"")

    with pytest.raises(
        ControlLost, match="rank 1 does a gather_on_0 where another rank does a gather"
    ):
        node.give(1, GATHER_0, b"")
    with pytest.raises(ControlLost, match="a rank of node 5 does a gather_on_0"):
        node.hear_up(5, GATHER_0, b"")


def test_what_comes_twice_counts_once():
    node = Collectives(range(2), [], is_root=True)
    node.give(0, GATHER_0, b"first")
    node.give(0, GATHER_0, b"again")
    deliveries = node.give(1, GATHER_0, b"")

    assert [dict(entries_of(delivery.entries)) for delivery in deliveries] == [
        {0: b"first", 1: b""}
    ]


def test_a_call_that_is_over_leaves_nothing_behind():
    """Else a run of months would remember each of its gathers."""
    node = Collectives(range(1), [], is_root=True)

    for kind in ("gather_on_0", "gather"):  # were the first one kept, the second would be refused
        assert node.give(0, Call("0", 1, kind), b"")


def test_only_rank_0_is_heard_by_all():
    node = Collectives(range(2), [5], is_root=True)

    assert node.give(1, BROADCAST, b"mine") == []
    assert [to for to, *_ in node.give(0, BROADCAST, b"ours")] == [DOWN, 1]


@given(st.binary(max_size=30))
def test_other_bytes_are_no_values(garbage):
    try:
        found = list(entries_of(garbage))
    except ValueError:
        return
    assert b"".join(entry(*pair) for pair in found) == garbage


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        ["0", 1],
        [0, 1, "gather"],
        ["0", "1", "gather"],
        ["0", True, "gather"],
        ["0", 1, []],
    ],
)
def test_other_things_are_no_call(plain):
    with pytest.raises((ValueError, TypeError)):
        Call.of_plain(plain)


def test_a_call_comes_back():
    assert Call.of_plain(["0.1", 3, "gather"]) == Call("0.1", 3, "gather")
