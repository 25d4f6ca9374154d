"""Ranks out of step are named; counts that differ for a good reason never are."""

from __future__ import annotations

import json
import random

import pytest

from hpctrain.node.hangs.outliers import EQUAL, KEPT, ODD, CountsByTick, JobCounts

RANKS = 4


def said(counts_of, ticks):
    """What two nodes of two ranks say, after JSON."""
    nodes = []
    for first in (0, 2):
        node = CountsByTick()
        for tick in ticks:
            node.look([{tick: counts_of(rank, tick)} for rank in (first, first + 1)])
        nodes.append((2, json.loads(json.dumps(node.plain()))))
    return nodes


def verdicts(counts_of, ticks=40):
    job = JobCounts()
    heard = [job.hear(said(counts_of, range(begin, begin + 4))) for begin in range(0, ticks, 4)]
    return [one for one in heard if one is not None]


def skips(bad, at, missing=1):
    return lambda rank, tick: 5 * tick + 7 - (missing if rank in bad and tick >= at else 0)


@pytest.mark.parametrize("bad", [(0,), (2,), (1, 3)])
def test_a_rank_that_leaves_out_a_collective_is_named_once(bad):
    (found,) = verdicts(skips(bad, at=EQUAL + 2))
    assert found.ranks == (bad if len(bad) == 1 else (1, 3))
    assert "called 1 fewer collectives of all ranks than the others" in found.summary


def test_one_that_has_called_more_is_named_so():
    (found,) = verdicts(skips((3,), at=EQUAL + 2, missing=-2))
    assert (found.ranks, "2 more" in found.summary) == ((3,), True)


def test_it_takes_as_many_ticks_as_are_said():
    job = JobCounts()
    at = EQUAL
    for tick in range(at + ODD - 1):
        assert job.hear(said(skips((1,), at), [tick])) is None
    assert job.hear(said(skips((1,), at), [at + ODD - 1])).ranks == (1,)


@pytest.mark.parametrize(
    "counts_of",
    [
        lambda rank, tick: 5 * tick,
        lambda rank, tick: 7 * tick + rank * tick,
        lambda rank, tick: 5 * tick + (1 if rank == 2 and tick % 3 == 0 else 0),
        lambda rank, tick: 5 * tick + (tick if rank == 1 and tick > 20 else 0),
        lambda rank, tick: 5 * tick - (1 if rank == 1 and tick > 2 else 0),
        lambda rank, tick: 9 - (1 if rank == 1 and tick > 20 else 0),
    ],
    ids=["equal", "pipeline", "thread", "messages later", "from the first on", "nothing called"],
)
def test_whatever_else_makes_counts_differ_names_nobody(counts_of):
    assert verdicts(counts_of, 120) == []


def test_a_thread_at_its_own_pace_names_nobody():
    numbers = random.Random(3)
    late = [[numbers.choice((0, 0, 1)) for _ in range(400)] for _ in range(RANKS)]
    found = verdicts(lambda rank, tick: 5 * tick - late[rank][tick], 400)
    assert found == []


def test_ticks_that_not_all_ranks_show_are_not_judged():
    node = CountsByTick()
    node.look([{1: 5, 2: 6}, {2: 6, 3: 9}])
    assert node.plain() == [[2, 6]]
    node.look([{2: 6, 3: 9}, {3: 8}])
    assert node.plain() == [[2, 6], [3, 9, 8]]
    node.look([{}, {4: 1}])
    assert node.plain() == [[2, 6], [3, 9, 8]]


def test_short_ticks_are_kept_by_their_multiples():
    node = CountsByTick()
    for tick in range(20_000):
        node.look([{tick: tick}])
    ticks = [tick for tick, _ in node.plain()]
    assert ticks[-KEPT:] == list(range(20_000 - KEPT, 20_000))
    assert {0, 16384, 1024 * 19, 64 * 311} <= set(ticks)
    assert len(ticks) < 4 * KEPT


def test_a_group_that_begins_to_count_anew_names_nobody():
    assert verdicts(lambda rank, tick: 5 * (tick % 20), 120) == []
