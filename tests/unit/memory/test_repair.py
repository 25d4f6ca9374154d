"""A copy is made whole from others, block by block, and nothing else is believed."""

from __future__ import annotations

import random

import pytest

from hpctrain.checkpoint.format import shard
from hpctrain.node.memory.copy_plan import bad_ranges, blocks, merged, repair
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


def reader(content, asked):
    def read(ranges):
        asked.extend(ranges)
        for low, high in ranges:
            yield low, content[low:high]

    return read


def test_nothing_is_bad_in_a_whole_copy_and_nobody_is_asked(whole):
    content, plan, digest = whole

    assert bad_ranges(memoryview(content), plan, digest) == []
    assert repair(memoryview(bytearray(content)), plan, digest, [reader(b"", [])])


def test_every_flipped_bit_is_found_and_mended_with_its_block_alone(whole):
    content, plan, digest = whole
    dice = random.Random(1)
    places = [*blocks(plan), (plan.size - 8 * len(list(blocks(plan))), plan.size)]
    for _ in range(200):
        byte = dice.randrange(plan.size)
        repaired, asked = bytearray(content), []
        repaired[byte] ^= 1 << dice.randrange(8)

        assert repair(memoryview(repaired), plan, digest, [reader(content, asked)])

        assert repaired == content
        assert asked == [place for place in places if place[0] <= byte < place[1]]


def test_a_copy_that_is_not_here_is_made_from_nothing(whole):
    content, plan, digest = whole
    repaired = bytearray(plan.size)

    assert repair(memoryview(repaired), plan, digest, [reader(content, [])])
    assert repaired == content


def test_two_copies_with_a_bad_block_each_make_a_whole_one(whole):
    content, plan, digest = whole
    ranges = list(blocks(plan))
    others = [bytearray(content), bytearray(content)]
    for other, (low, _) in zip(others, ranges[1:3], strict=True):
        other[low] ^= 1
    repaired = bytearray(plan.size)

    assert repair(memoryview(repaired), plan, digest, [reader(bytes(of), []) for of in others])
    assert repaired == content


def test_one_bad_block_everywhere_is_no_whole_copy(whole):
    content, plan, digest = whole
    other = bytearray(content)
    other[-1] ^= 1

    assert not repair(memoryview(bytearray(other)), plan, digest, [reader(bytes(other), [])] * 2)
    assert not repair(memoryview(bytearray(other)), plan, digest, [])


def test_neighbours_are_read_together_up_to_a_length():
    assert list(merged([(0, 3), (3, 5), (7, 9)], 4)) == [(0, 4), (4, 5), (7, 9)]
    assert list(merged([], 4)) == []
