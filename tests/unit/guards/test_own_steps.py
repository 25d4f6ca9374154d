"""The guards of a loop without an engine."""

from __future__ import annotations

import json
import math

import pytest

from hpctrain.core.settings.schema import GuardSettings
from hpctrain.train.guards.rules import OwnSteps

NAN = float("nan")


def rows(*numbers):
    return [(loss, norm, f"n{rank}") for rank, (loss, norm) in enumerate(numbers)]


GOOD = rows((1.0, 2.0), (1.1, 2.0))


def test_a_step_that_is_finite_is_applied_and_nothing_is_told():
    assert OwnSteps(GuardSettings()).judge(1, GOOD) == (True, None)


@pytest.mark.parametrize("norm", [NAN, math.inf])
def test_one_ranks_loss_names_it_though_the_norm_is_everybodys(norm):
    guard = OwnSteps(GuardSettings())
    applied, bad = guard.judge(7, rows((1.0, norm), (NAN, norm)))
    assert not applied
    assert (bad.step, bad.rank, bad.ranks, bad.node, guard.must_stop) == (7, 1, (1,), "n1", False)
    assert math.isnan(bad.loss)
    assert str(bad.grad_norm) == str(norm)


def test_a_norm_that_has_travelled_names_nobody():
    applied, bad = OwnSteps(GuardSettings()).judge(7, rows((1.0, NAN), (1.0, NAN)))
    assert not applied
    assert (bad.rank, bad.ranks, bad.node) == (None, (), "")


def stops(guard, step, numbers):
    guard.judge(step, numbers)
    return guard.must_stop


def test_the_third_in_a_row_stops_and_one_that_only_tells_says_it_once():
    guard, bad = OwnSteps(GuardSettings()), rows((NAN, 1.0))
    assert [stops(guard, step, bad) for step in (1, 2, 3)] == [False, False, True]
    telling = OwnSteps(GuardSettings(nonfinite="tell"))
    said = [telling.judge(step, each) for step, each in enumerate([bad, bad, GOOD[:1], bad])]
    assert [applied for applied, _ in said] == [True] * 4
    assert [event is not None for _, event in said] == [True, False, False, True]


def test_off_looks_at_nothing():
    assert OwnSteps(GuardSettings(nonfinite="off")).judge(1, rows((NAN, NAN))) == (True, None)


@pytest.mark.parametrize(("spike", "applied"), [("tell", True), ("skip", False)])
def test_the_largest_of_all_ranks_is_judged_and_a_resume_judges_the_same(spike, applied):
    guard = OwnSteps(GuardSettings(spike=spike))
    for step in range(100):
        assert guard.judge(step, GOOD) == (True, None)
    resumed = OwnSteps(GuardSettings(spike=spike))
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for each in (guard, resumed):
        is_applied, event = each.judge(100, rows((9.0, 2.0), (1.0, 2.0)))
        assert (is_applied, event.what, event.value) == (applied, "loss", 9.0)


def test_a_resume_counts_on_the_steps_that_were_not_finite():
    guard, bad = OwnSteps(GuardSettings()), rows((NAN, 1.0))
    assert [stops(guard, step, bad) for step in (1, 2)] == [False] * 2
    resumed = OwnSteps(GuardSettings())
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert stops(resumed, 3, bad)


def test_a_rule_that_was_off_begins_without_a_memory():
    off = OwnSteps(GuardSettings(nonfinite="off")).state_dict()
    resumed = OwnSteps(GuardSettings())
    resumed.load_state_dict(off)
    assert not stops(resumed, 1, rows((NAN, 1.0)))
