"""Last wills at real keepers, left by ranks that are played by the test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from hpctrain.checkpoint.format.manifest import Manifest, plain
from hpctrain.checkpoint.format.shard import ShardPiece, file_name, header
from hpctrain.memory import will_stock
from hpctrain.memory.choice import Inventory, choose
from hpctrain.memory.copy_plan import CopyPlan
from hpctrain.memory.facts import joined, part_facts
from hpctrain.memory.protocol import KeeperLost
from hpctrain.memory.slots import Mark
from hpctrain.memory.will_line import WillLine
from hpctrain.memory.will_pages import CellState
from tests.support.keepers import BLOCK_BYTES, Keepers, covered_by_all, ready, until

NBYTES = 6000


@pytest.fixture
def one(tmp_path):
    """A node with three ranks."""
    keepers = Keepers(tmp_path, nodes=1, ranks=3)
    keepers.heirs = []
    yield keepers
    for rank in keepers.heirs:
        rank.line.close()
    keepers.close()


def will_plan(ranks):
    pieces = [ShardPiece("model.w", "F32", (NBYTES // 4,), (0,), (NBYTES // 4,))]
    head = header(pieces, file_name(ranks), BLOCK_BYTES)
    manifest = Manifest(
        run_id="id",
        name="run",
        step=7,
        world_size=ranks,
        mesh={"dp_replicate": ranks},
        engine="ddp",
    )
    facts = {"part": part_facts(pieces, ranks), "manifest": plain(manifest)}
    return CopyPlan(ranks + 1, ranks, len(head), (NBYTES,), BLOCK_BYTES, facts), head


def own_plan(rank, ranks):
    pieces = [ShardPiece(f"rng.rank-{rank:05d}.torch", "U8", (16,), (0,), (16,))]
    head = header(pieces, file_name(rank), BLOCK_BYTES)
    facts = {"part": part_facts(pieces, rank)}
    return CopyPlan(ranks + 1, rank, len(head), (16,), BLOCK_BYTES, facts), head


class Rank:
    """A rank of a round: an heir, and a thread of its own where it is asked."""

    def __init__(self, keepers, rank):
        self.rank, self.ranks = rank, keepers.nodes * keepers.ranks
        self.folder = keepers.folder(rank // keepers.ranks)
        self.line = WillLine(self.folder, rank, keepers.round)
        keepers.heirs.append(self)
        self.own, self.head = own_plan(rank, self.ranks)
        self.page = self.line.be_heir(will_plan(self.ranks)[0].size, self.own)

    def done(self, step, state=CellState.SAME, *, ends=True):
        """Keep a step's generators, and come to its end."""
        cell = self.page.open_cell(step)
        content = self.head + bytes([step]) * 16
        cell[: len(content)] = content
        self.page.close_cell(step, len(content), state)
        if ends:
            self.page.come_to(step)

    def leave(self, step, *, is_whole=True):
        """Write the will, if it is this rank's to write; whether it was."""
        asking = self.line.again()
        try:
            if not asking.may_write(step):
                return False
            plan, head = will_plan(self.ranks)
            asking.memory[: len(head)] = head
            asking.memory[len(head) : len(head) + NBYTES] = bytes([step]) * NBYTES
            asking.written(step, plan if is_whole else None)
            return True
        finally:
            asking.close()

    def asked(self, step):
        """Wait to be asked, on a thread, and leave the will then."""
        thread = threading.Thread(target=lambda: self.line.wait() and self.leave(step), daemon=True)
        thread.start()
        return thread


def ranks_of(keepers):
    ready(keepers)
    return [Rank(keepers, rank) for rank in range(keepers.nodes * keepers.ranks)]


def gathered(keepers, node=0):
    """What a node's agent hears."""
    line = WillLine(keepers.folder(node), node * keepers.ranks, keepers.round)
    try:
        return line.gather()
    finally:
        line.close()


def gathered_step(keepers):
    whole = keepers.keepers[0]._round.wills._whole
    return None if whole is None else whole.mark.step


def settled(keepers, *, counts=True):
    for keeper in keepers.keepers:
        keepers._do(keeper, {"wills": {"attempt": keepers.round, "counts": counts}})


def choices(keepers, least_step=0):
    """What a new round of the ranks would go on from."""
    lines = keepers.begin()
    held = [lines[node * keepers.ranks].held() for node in range(keepers.nodes)]
    return lines, choose([Inventory(each.own, each.guests, each.door) for each in held], least_step)


def content(line, mark, rank, plan):
    handle = line.open(mark, rank)
    try:
        return os.pread(handle, sum(plan.sizes), plan.head)
    finally:
        os.close(handle)


def test_the_next_round_finds_the_wills_step_with_what_each_rank_alone_had(one):
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(6)
        rank.done(7)
    ranks[1].line.close()  # it is killed
    threads = [ranks[0].asked(7), ranks[2].asked(7)]

    assert gathered(one)["step"] == 7
    for thread in threads:
        thread.join(20)
    settled(one)
    lines, (best, *_) = choices(one)

    assert (best.mark, best.kept_by, best.world_size) == (Mark(1, 7, 1), "will", 4)
    facts = lines[0].facts(best.mark, range(4))
    manifest, _ = joined(facts)
    assert "model.w" in {tensor.name for tensor in manifest.tensors}
    assert content(lines[0], best.mark, 3, will_plan(3)[0]) == bytes([7]) * NBYTES
    assert content(lines[1], best.mark, 1, own_plan(1, 3)[0]) == bytes([7]) * 16


def test_of_ranks_that_are_a_step_apart_the_newer_one_leaves_the_will(one, monkeypatch):
    monkeypatch.setattr(will_stock, "CLAIM_S", 60.0)
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(6)
        rank.done(7, ends=rank is not ranks[0])
    ranks[1].line.close()
    older = threading.Thread(target=lambda: left.append(ranks[0].leave(6)), daemon=True)
    left = []
    older.start()
    newer = ranks[2].asked(7)

    assert gathered(one)["step"] == 7
    for thread in (older, newer):
        thread.join(20)
    assert left == [False], "a will that is written over may be lost, and the newer one with it"


def test_one_that_is_in_its_update_may_come_to_a_newer_step(one, monkeypatch):
    monkeypatch.setattr(will_stock, "CLAIM_S", 60.0)
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(6)
    ranks[2].page.change()
    left = []
    older = threading.Thread(target=lambda: left.append(ranks[0].leave(6)), daemon=True)
    older.start()
    older.join(0.1)
    assert left == [], "it has not waited"

    ranks[2].done(7)
    assert ranks[2].leave(7)
    older.join(20)
    assert left == [False]
    assert gathered_step(one) == 7


def test_but_it_is_not_waited_for_for_ever(one, monkeypatch):
    monkeypatch.setattr(will_stock, "CLAIM_S", 0.05)
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(6)
    ranks[2].page.change()  # and stays there

    assert ranks[0].leave(6)
    assert not ranks[1].leave(6), "the node has one"


def test_what_does_not_count_is_gone(one):
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(7)
    assert ranks[0].leave(7)

    settled(one, counts=False)

    assert choices(one)[1] == []


def test_nothing_counts_unless_the_agent_says_so(one):
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(7)
    assert ranks[0].leave(7)

    assert choices(one)[1] == []


def test_without_the_generators_of_each_rank_there_is_no_will(one):
    ranks = ranks_of(one)
    for rank in ranks[:2]:
        rank.done(7)
    ranks[2].done(6)  # killed behind the update: nobody knows its generators
    assert ranks[0].leave(7)
    settled(one)

    assert choices(one)[1] == []


@pytest.mark.parametrize(("others", "is_taken"), [(CellState.SAME, True), (CellState.OTHER, False)])
def test_generators_from_ahead_of_an_update_count_where_others_drew_none_behind_it(
    one, others, is_taken
):
    ranks = ranks_of(one)
    for rank in ranks[:2]:
        rank.done(7, others)
    ranks[2].done(7, CellState.AHEAD, ends=False)
    assert ranks[0].leave(7)
    settled(one)

    assert [choice.mark for choice in choices(one)[1]] == ([Mark(1, 7, 1)] if is_taken else [])


def test_a_will_that_is_not_of_one_moment_is_none_and_another_rank_may_leave_it(one):
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(7)

    assert ranks[0].leave(7, is_whole=False)
    assert ranks[1].leave(7)

    settled(one)
    assert [choice.mark for choice in choices(one)[1]] == [Mark(1, 7, 1)]


def test_a_rank_that_is_killed_while_it_writes_leaves_none(one):
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(7)
    asking = ranks[0].line.again()
    assert asking.may_write(7)
    plan, head = will_plan(3)
    asking.memory[: len(head)] = head
    asking.close()  # half of it is there

    until(lambda: ranks[1].leave(7), "nobody else may write")
    settled(one)
    lines, (best, *_) = choices(one)
    assert content(lines[0], best.mark, 3, plan) == bytes([7]) * NBYTES


def test_a_stopped_rank_is_not_waited_for(one, monkeypatch):
    """Nor one that has ended; the kernel knows both."""
    monkeypatch.setattr(will_stock, "LEAST_S", 600.0)
    monkeypatch.setattr(will_stock, "MOST_S", 600.0)  # longer than its agent would wait
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(7)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stopped:
        wills = one.keepers[0]._round.wills
        wills._heirs[2].pid = stopped.pid
        stopped.send_signal(19)
        ranks[1].line.close()
        thread = ranks[0].asked(7)

        assert gathered(one)["step"] == 7
        stopped.kill()
    thread.join(20)


def test_the_will_that_training_went_on_from_stays_until_a_newer_copy_counts(one):
    ranks = ranks_of(one)
    for rank in ranks:
        rank.done(7)
    assert ranks[0].leave(7)
    settled(one)
    lines = ready(one, Mark(1, 7, 1))
    again = [Rank(one, rank) for rank in range(3)]
    for rank in again:
        rank.done(8)

    assert not again[0].leave(8)
    settled(one)  # another one is killed, too soon
    assert choices(one)[1][0].mark == Mark(1, 7, 1)

    lines = ready(one, Mark(1, 7, 1))
    again = [Rank(one, rank) for rank in range(3)]
    covered_by_all(lines, 9)
    for rank in again:
        rank.done(10)
    until(lambda: again[1].leave(10), "no will though a newer copy counts")


@pytest.mark.parametrize("first_says", [True, False])
def test_the_first_nodes_word_is_that_of_all(tmp_path, first_says):
    """The others may not have heard how the round ended."""
    two = Keepers(tmp_path, nodes=2, ranks=1)
    two.heirs = []
    for rank in ranks_of(two):
        rank.done(7)
    assert two.heirs[1].leave(7)

    for keeper, counts in zip(two.keepers, (first_says, True), strict=True):
        two._do(keeper, {"wills": {"attempt": two.round, "counts": counts}})

    assert [choice.mark for choice in choices(two)[1]] == [Mark(1, 7, 1)] * first_says
    for rank in two.heirs:
        rank.line.close()
    two.close()


def test_too_little_memory_costs_the_will_alone(one, monkeypatch):
    ready(one)
    line = WillLine(one.folder(0), 0, 1)

    with pytest.raises(KeeperLost, match="copies in memory need"):
        line.be_heir(1 << 50, own_plan(0, 3)[0])

    line.close()
    covered_by_all(one.lines, 5)
