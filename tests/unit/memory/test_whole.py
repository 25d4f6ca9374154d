"""A copy counts as whole only with each bit as it was proved."""

from __future__ import annotations

import random

import pytest

from hpctrain.checkpoint.format import shard
from hpctrain.node.memory.copy_plan import is_whole, pieces
from hpctrain.node.memory.in_memory_copies import digests_of
from tests.support.replica_servers import plan_of, values_of


@pytest.fixture
def whole():
    """A copy, its plan and its digest."""
    plan, head = plan_of(0, 2)
    content = bytearray(plan.size)
    content[: plan.head] = head
    content[plan.head : plan.head + sum(plan.sizes)] = values_of(7, 0, sum(plan.sizes))
    ends = shard.proof(head, digests_of(memoryview(content), plan))
    content[plan.size - len(ends) :] = ends
    return bytes(content), plan, shard.proof_digest(ends)


def test_every_flipped_bit_is_found(whole):
    content, plan, digest = whole
    dice = random.Random(1)
    assert is_whole(memoryview(content), plan, digest)
    for _ in range(200):
        other = bytearray(content)
        other[dice.randrange(plan.size)] ^= 1 << dice.randrange(8)

        assert not is_whole(memoryview(other), plan, digest)


def test_another_copy_that_is_whole_by_itself_is_not_this_one(whole):
    content, plan, _ = whole

    assert not is_whole(memoryview(content), plan, shard.proof_digest(b"another"))
    assert not is_whole(memoryview(bytearray(plan.size)), plan, shard.proof_digest(b"another"))


def test_pieces_are_the_whole_copy():
    assert list(pieces(9, 4)) == [(0, 4), (4, 8), (8, 9)]
    assert list(pieces(0, 4)) == []
