"""How many steps that are not finite are put up with."""

from __future__ import annotations

import json

import pytest

from hpctrain.train.guards.rules import (
    MOST_IN_A_ROW,
    MOST_IN_WINDOW,
    MOST_OVERFLOWS,
    WINDOW_STEPS,
    NonfiniteRule,
)

GO_ON, STOP = False, True


def met(rule, steps, *, transient=False):
    return [rule.met(step, transient=transient) for step in steps]


def test_the_third_in_a_row_stops():
    assert met(NonfiniteRule(), [5, 6, 7]) == [GO_ON, GO_ON, STOP]
    assert MOST_IN_A_ROW == 3
    assert met(NonfiniteRule(), [5, 6, 8]) == [GO_ON] * 3  # a good one lay between


@pytest.mark.parametrize("transient", [True, False])
def test_more_than_three_in_a_hundred_steps_stop(transient):
    assert met(NonfiniteRule(), [1, 30, 60, 100], transient=transient) == [GO_ON] * 3 + [STOP]
    assert met(NonfiniteRule(), [1, 30, 60, 101], transient=transient) == [GO_ON] * 4
    assert (WINDOW_STEPS, MOST_IN_WINDOW) == (100, 3)


def test_faults_that_were_gone_the_second_time_are_no_row():
    rule = NonfiniteRule()
    assert met(rule, [1, 2, 3], transient=True) == [GO_ON] * 3
    assert len(rule.state_dict()["steps"]) == 3


def test_one_that_stops_at_once_forgives_a_fault_that_was_gone():
    rule = NonfiniteRule(stops_at_once=True)
    assert rule.met(1, transient=True) is GO_ON
    assert rule.met(2, transient=False) is STOP


def test_overflows_are_daily_business_unless_they_do_not_end():
    rule = NonfiniteRule()
    assert [rule.overflowed(1024.0) for _ in range(MOST_OVERFLOWS)] == [False] * 7 + [True]
    rule.overflows = 0
    assert not rule.overflowed(512.0)
    assert rule.overflowed(1.0)  # the scale cannot fall any more


def test_a_resumed_rule_judges_as_the_one_that_went_on():
    whole, first = NonfiniteRule(), NonfiniteRule()
    met(whole, [5, 6])
    met(first, [5, 6])
    first.overflowed(8.0)
    second = NonfiniteRule()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert second.met(7, transient=False) is whole.met(7, transient=False) is STOP
    assert second.overflows == 1
    assert len(second.state_dict()["steps"]) == 3
