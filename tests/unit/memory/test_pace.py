"""How many steps lie between two copies: what they cost, and no change for little."""

from __future__ import annotations

import pytest

from hpctrain.node.memory.copies import Pace


@pytest.mark.parametrize("setting", [0, 7])
def test_the_first_copy_of_a_start_does_not_wait(setting):
    """What was lost before has left one copy behind: another loss would find none in memory."""
    assert Pace(setting).steps == 1


def test_a_first_copy_that_fails_is_not_tried_at_each_step():
    pace = Pace(7)
    pace.miss()

    assert pace.steps == 7


def test_a_number_that_is_set_stays():
    pace = Pace(7)

    assert pace.learn(1.0, 9.0, 0.1), "the first copy is told"
    assert not pace.learn(2.0, 9.0, 0.1)
    assert pace.steps == 7
    assert pace.stall_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("stall_s", "covered_s", "step_s", "steps"),
    [
        (0.010, 0.1, 1.0, 1),
        (0.0101, 0.1, 1.0, 2),
        (0.07, 0.5, 0.1, 70),  # the wait counts
        (0.001, 8.0, 0.1, 100),  # the way counts
    ],
)
def test_the_fewest_steps_that_keep_both_bounds_are_chosen(stall_s, covered_s, step_s, steps):
    pace = Pace(0)

    assert pace.learn(stall_s, covered_s, step_s)
    assert pace.steps == steps
    assert stall_s <= 0.01 * steps * step_s + 1e-9
    assert covered_s <= 0.8 * steps * step_s + 1e-9


def test_small_changes_are_no_change_and_one_odd_copy_none():
    pace = Pace(0)
    pace.learn(0.10, 0.1, 0.1)
    assert pace.steps == 100

    assert not pace.learn(0.11, 0.1, 0.1)
    assert not pace.learn(5.0, 0.1, 0.1), "the median counts"
    assert pace.steps == 100
    pace.learn(5.0, 0.1, 0.1)
    assert pace.learn(5.0, 0.1, 0.1)
    assert pace.steps == 5000


def test_copies_are_quick_if_the_slowest_is_whole_in_half_the_time_between_two():
    pace = Pace(2)
    assert not pace.is_quick(1.0), "nothing is known yet"

    pace.learn(0.01, 0.1, 0.5)
    pace.learn(0.01, 0.5, 0.5)
    pace.learn(0.01, 0.1, 0.5)

    assert pace.is_quick(0.5)
    assert not pace.is_quick(0.49)
    assert not pace.is_quick(0.0)


def test_without_a_step_time_nothing_is_chosen():
    pace = Pace(0)

    assert pace.learn(0.1, 0.1, 0.0)
    assert pace.steps == 1
