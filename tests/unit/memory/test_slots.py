"""Slots and coverage: at every moment one step is whole in memory that nobody writes."""

from __future__ import annotations

import random

import pytest

from hpctrain.node.memory.slots import (
    NEVER,
    Coverage,
    HeldCopy,
    Mark,
    RankSlots,
    candidates,
)

NOTHING_SETTLED = Mark(1, NEVER)


def test_a_step_is_covered_when_every_member_has_it_whole():
    coverage = Coverage([0, 1])

    assert not coverage.hear(0, 10, whole=True)
    assert coverage.hear(1, 10, whole=True)
    assert (coverage.settled, coverage.covered) == (10, 10)


def test_a_step_that_a_member_has_not_is_settled_and_not_covered():
    coverage = Coverage([0, 1])
    coverage.hear(0, 10, whole=True)
    coverage.hear(1, 10, whole=False)
    assert (coverage.settled, coverage.covered) == (10, NEVER)

    coverage.hear(1, 30, whole=True)  # nothing of step 20: it has none
    coverage.hear(0, 20, whole=True)
    assert (coverage.settled, coverage.covered) == (20, NEVER)
    coverage.hear(0, 30, whole=True)
    assert (coverage.settled, coverage.covered) == (30, 30)


def test_what_was_heard_before_changes_nothing():
    coverage = Coverage([0])
    coverage.hear(0, 10, whole=False)

    assert not coverage.hear(0, 10, whole=True)
    assert coverage.covered == NEVER


def written(slots, step, kept=None, settled=NOTHING_SETTLED):
    number = slots.give(kept, settled)
    assert number is not None
    assert slots.copied(number, Mark(1, step))
    slots.proved(number, whole=True)
    return number


def test_the_covered_copy_and_the_one_that_may_be_are_not_given_away():
    slots = RankSlots()
    first = written(slots, 10)
    second = written(slots, 20, Mark(1, 10), Mark(1, 10))
    assert first != second

    assert slots.give(Mark(1, 10), Mark(1, 10)) is None, "20 may be covered by now"
    assert slots.give(Mark(1, 10), Mark(1, 20)) == second, "20 will never be"
    slots.new_round()
    assert slots.whole() == [Mark(1, 10)]


def test_the_older_copy_goes_when_the_newer_is_covered():
    slots = RankSlots()
    first = written(slots, 10)
    written(slots, 20)

    assert slots.give(Mark(1, 20), Mark(1, 20)) == first


def test_one_slot_is_given_at_a_time():
    slots = RankSlots()
    number = slots.give(None, NOTHING_SETTLED)
    assert slots.give(None, NOTHING_SETTLED) is None
    slots.copied(number, Mark(1, 10))
    assert slots.give(None, NOTHING_SETTLED) is None, "it is being proved"
    assert not slots.copied(number, Mark(1, 11)), "it was not given again"
    slots.proved(number, whole=False)
    assert slots.whole() == []


def test_what_training_does_not_go_on_from_is_given_up():
    slots = RankSlots()
    written(slots, 10)
    written(slots, 20)

    slots.keep_only(Mark(1, 10))
    assert slots.whole() == [Mark(1, 10)]
    assert slots.find(Mark(1, 10)) == 0
    assert slots.find(Mark(1, 20)) is None
    slots.keep_only(None)
    assert slots.whole() == []


@pytest.mark.parametrize("seed", range(20))
def test_one_step_is_whole_and_not_written_whatever_comes_when(seed):
    """Ranks on nodes of their own, news that come late, copies that fail or are left out."""
    dice = random.Random(seed)
    ranks = [RankSlots() for _ in range(4)]
    root = Coverage(range(4))
    news = [(NEVER, NEVER)] * 4  # what each node has heard: covered, settled
    step, best = 0, NEVER
    for _ in range(300):
        step += 10
        if news[0][1] != root.settled:
            news[0] = (root.covered, root.settled)
            continue  # rank 0 wishes for a copy when it has heard of the last one
        for number, slots in enumerate(ranks):
            covered, settled = news[number]
            kept = Mark(1, covered) if covered != NEVER else None
            given = slots.give(kept, Mark(1, settled))
            if root.covered != NEVER:  # also while it is being written
                newest = Mark(1, root.covered)
                assert all(others.find(newest) is not None for others in ranks)
            whole = given is not None and dice.random() < 0.8
            if given is not None:
                slots.copied(given, Mark(1, step))
                slots.proved(given, whole=whole)
            root.hear(number, step, whole=whole)
            if dice.random() < 0.5:
                news[dice.randrange(4)] = (root.covered, root.settled)
        for number in range(1, 4):
            if dice.random() < 0.8:
                news[number] = (root.covered, root.settled)
        best = max(best, root.covered)
    assert best > 100, "it does not stand still"


def of(attempt, step, ranks, world=2):
    return [HeldCopy(attempt, step, world, rank) for rank in ranks]


def test_a_step_can_be_had_where_all_ranks_copies_are_there():
    held = [of(1, 10, [0]) + of(1, 20, [0]), of(1, 10, [1])]

    assert candidates(held, 0) == [Mark(1, 10)]
    assert candidates(held, 10) == [Mark(1, 10)], "a tie goes to memory"
    assert candidates(held, 11) == []


def test_the_newer_attempt_counts_and_worlds_are_not_mixed():
    held = [of(1, 50, [0, 1]) + of(2, 45, [0, 1]) + of(3, 60, [0], world=2)]
    held += [of(3, 60, [0], world=1)]

    assert candidates(held, 0) == [Mark(3, 60), Mark(2, 45), Mark(1, 50)]
    assert candidates([of(3, 60, [0], world=2), of(3, 60, [1], world=3)], 0) == []
