"""What a node's memory takes in from others, and what it does not."""

from __future__ import annotations

import pytest

from hpctrain.checkpoint.format import shard
from hpctrain.errors import CheckpointError
from hpctrain.node.memory.in_memory_copies import NodeCopies, ProvedCopy, digests_of
from hpctrain.node.memory.slots import Mark, RankSlots
from tests.support.replica_servers import plan_of, values_of

BEFORE = Mark(1, -1)


def copy_of(step):
    """A copy of rank 0 of two, and its bytes."""
    plan, head = plan_of(0, 2)
    content = bytearray(plan.size)
    content[: plan.head] = head
    content[plan.head : plan.head + sum(plan.sizes)] = values_of(step, 0, sum(plan.sizes))
    ends = shard.proof(head, digests_of(memoryview(content), plan))
    content[plan.size - len(ends) :] = ends
    return ProvedCopy(Mark(1, step), plan, shard.proof_digest(ends)), bytes(content)


@pytest.fixture
def node():
    """One with memory for a guest's copies."""
    node_copies = NodeCopies()
    node_copies.new_round(1)
    node_copies.take_guest(0, copy_of(10)[0].size)
    return node_copies


def taken(node, step, kept=None, settled=BEFORE, then=lambda: None):
    copy, content = copy_of(step)

    def fill(view):
        view[:] = content
        then()

    return node.receive(0, copy, kept, settled, fill)


def test_what_is_still_needed_is_not_written_over(node):
    assert [taken(node, 10), taken(node, 20)] == ["", ""]
    assert "still needed" in taken(node, 30)
    assert taken(node, 30, Mark(1, 20), Mark(1, 20)) == ""

    assert {copy.step for copy in node.held()[1]} == {20, 30}
    assert node.find(Mark(1, 20), 0).view == copy_of(20)[1]


def test_a_copy_whose_round_ends_while_it_comes_does_not_count(node):
    assert taken(node, 10, then=lambda: node.new_round(1)) != ""
    assert node.held() == ([], [])


def test_a_copy_that_breaks_off_leaves_its_slot_free(node):
    def gone():
        raise ConnectionResetError

    for _ in range(3):
        with pytest.raises(ConnectionResetError):
            taken(node, 10, then=gone)

    assert node.held() == ([], [])
    assert taken(node, 10) == ""


def test_a_copy_without_memory_for_it_is_refused(node):
    copy, _ = copy_of(10)

    assert "no memory" in node.receive(1, copy, None, BEFORE, lambda _: None)
    with pytest.raises(CheckpointError):
        node.take_guest(0, 1 << 60)


def test_what_comes_from_elsewhere_takes_no_slot_beside_a_copy():
    slots = RankSlots()
    assert slots.reserve() == 0
    assert slots.reserve() is None
    assert slots.copied(0, Mark(1, 10))
    slots.proved(0, whole=True)

    assert slots.reserve() is None
    assert slots.give(Mark(1, 10), Mark(1, 10)) == 1
