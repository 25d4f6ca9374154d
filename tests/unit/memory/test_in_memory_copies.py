"""What lies in slots: proved, read as a checkpoint, and no flipped bit unseen."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hpctrain.checkpoint.format import index
from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.format.shard import ShardPiece, rank_of
from hpctrain.errors import CheckpointError, TornCheckpoint
from hpctrain.node.memory.copy_plan import CopyPlan, joined, part_of
from hpctrain.node.memory.in_memory_copies import NodeCopies, RankSlotMemory
from hpctrain.node.memory.slots import Mark
from tests.support.replica_servers import BLOCK_BYTES, plan_of, values_of

WORLD, STEP, OWN = 3, 7, 16
MARK = Mark(1, STEP)
PLAIN = {
    "run_id": "id",
    "name": "run",
    "step": STEP,
    "world_size": WORLD,
    "mesh": {"dp_replicate": WORLD},
    "engine": "ddp",
    "block_bytes": BLOCK_BYTES,
    "data": {"samples_consumed": 70},
}


def stocked(rank):
    """A rank's memory with a proved copy in slot 1."""
    plan, head = plan_of(rank, WORLD, {"manifest": PLAIN} if rank == 0 else None)
    rank_memory = RankSlotMemory()
    rank_memory.take(plan.size)
    nbytes = sum(plan.sizes)
    memory = rank_memory.arenas[1].view(0, plan.size)
    memory[:] = bytes(head) + values_of(STEP, rank, nbytes) + bytes(plan.size - plan.head - nbytes)
    rank_memory.slots.slots[1].state = "given"
    assert rank_memory.slots.copied(1, MARK)
    rank_memory.prove(1, MARK, plan)
    rank_memory.slots.proved(1, whole=True)
    return rank_memory


@pytest.fixture
def stocks():
    made = [stocked(rank) for rank in range(WORLD)]
    yield made
    for rank_memory in made:
        rank_memory.close()


def node_of(stocks):
    """A node that has these."""
    node = NodeCopies()
    node.own = dict(enumerate(stocks))
    return node


def source(stocks):
    """The checkpoint that the copies make, as a rank reads it."""
    import os
    from pathlib import Path

    told = {}
    for rank in range(WORLD):
        copy = node_of(stocks).find(MARK, rank).copy
        told[rank] = [copy.size, copy.digest, copy.plan.head, copy.plan.facts]
    manifest, table = joined(told)
    chunks = index.parse(table, manifest)
    return CheckpointSource(
        Path("memory/step"),
        manifest,
        chunks,
        descriptor=lambda path: os.dup(node_of(stocks).find(MARK, rank_of(path.name)).arena.fd),
    )


def read(of, begin, count):
    values = np.empty(count, np.float32)
    total = of.entry("model.w").shape
    of.read([Target(ShardPiece("model.w", "F32", total, (begin,), (count,)), values)])
    return values.tobytes()


def test_copies_are_read_as_one_checkpoint_whatever_the_cuts(stocks):
    of = source(stocks)
    share = 5000
    whole = b"".join(values_of(STEP, rank, share + OWN)[:share] for rank in range(WORLD))

    assert read(of, 0, 3 * share // 4) == whole
    assert read(of, 600, 1900) == whole[2400 : 2400 + 7600]
    manifest = of.manifest
    assert (manifest.step, manifest.world_size, manifest.engine) == (STEP, WORLD, "ddp")
    assert manifest.data == {"samples_consumed": 70}
    own = np.empty(OWN, np.uint8)
    of.read([Target(ShardPiece("rng.rank-00001.torch", "U8", (OWN,), (0,), (OWN,)), own)])
    assert own.tobytes() == values_of(STEP, 1, share + OWN)[share:]


def flip(rank_memory, byte, bit):
    view = rank_memory.arenas[1].view(byte, 1)
    view[0] ^= 1 << bit


def count_found(stocks, flips, seed):
    """How many flipped bits of a rank's parts and of their proof a reader of all refuses."""
    of, dice, refused = source(stocks), random.Random(seed), 0
    plan, _ = plan_of(1, WORLD)
    own = np.empty(OWN, np.uint8)
    for _ in range(flips):
        byte, bit = dice.randrange(plan.head, plan.size), dice.randrange(8)
        flip(stocks[1], byte, bit)
        try:
            read(of, 0, 3750)
            of.read([Target(ShardPiece("rng.rank-00001.torch", "U8", (OWN,), (0,), (OWN,)), own)])
        except TornCheckpoint:
            refused += 1
        flip(stocks[1], byte, bit)
    read(of, 0, 3750)  # whole again
    return refused


def test_every_flipped_bit_is_found(stocks):
    assert count_found(stocks, 50, seed=1) == 50


@pytest.mark.soak
def test_a_thousand_flipped_bits_are_found(stocks):
    assert count_found(stocks, 1000, seed=2) == 1000


def test_a_copy_is_found_by_its_step_and_rank_alone(stocks):
    assert node_of(stocks).find(MARK, 0).copy.plan.rank == 0
    assert node_of(stocks).find(Mark(2, STEP), 0) is None
    assert node_of(stocks[:1]).find(MARK, 1) is None
    assert [copy.rank for rank_memory in stocks for copy in rank_memory.held()] == [0, 1, 2]
    stocks[0].slots.keep_only(None)
    assert stocks[0].held() == []


def test_a_plan_comes_back_as_it_is_and_nothing_else_does():
    plan, _ = plan_of(1, WORLD, {"manifest": PLAIN})

    assert CopyPlan.parse(plan.dump()) == plan
    for content in (b"", b"[]", b"{}", plan.dump().replace(b'"rank":1', b'"rank":-1')):
        with pytest.raises((ValueError, TypeError)):
            CopyPlan.parse(content)


def test_facts_that_are_not_whole_are_refused():
    with pytest.raises(TornCheckpoint, match="rank 1"):
        part_of(1, [10, "digest", 8, {"part": {"layout": {}}}])
    with pytest.raises((TornCheckpoint, CheckpointError)):
        joined({0: [10, "digest", 8, {"part": {}}]})


def test_a_manifest_in_json_is_the_manifest():
    from hpctrain.checkpoint.format import manifest as manifests

    whole = Manifest(**PLAIN, extra={"scheduler": {"last_lr": [0.1]}}, metrics={"loss": 1.5})
    assert manifests.of_plain(manifests.plain(whole)) == whole
    with pytest.raises(CheckpointError, match="key 3"):
        manifests.plain(Manifest(**PLAIN, extra={"scheduler": {3: 1}}))
