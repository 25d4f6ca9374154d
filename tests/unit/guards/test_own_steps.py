"""The guards of a loop without an engine."""

from __future__ import annotations

import json
import math

import pytest

from hpctrain.core.settings.schema import GuardSettings
from hpctrain.train.guards.rules import OwnSteps, RankNumbers, Ruling

NAN = float("nan")


def rows(*numbers):
    return [RankNumbers(loss, norm, f"n{rank}") for rank, (loss, norm) in enumerate(numbers)]


GOOD = rows((1.0, 2.0), (1.1, 2.0))


def test_a_step_that_is_finite_is_applied_and_nothing_is_told():
    assert OwnSteps(GuardSettings()).judge(1, GOOD) == (True, None)


@pytest.mark.parametrize("norm", [NAN, math.inf])
def test_one_ranks_loss_names_it_though_the_norm_is_everybodys(norm):
    applied, bad = OwnSteps(GuardSettings()).judge(7, rows((1.0, norm), (NAN, norm)))
    assert not applied
    assert (bad.step, bad.rank, bad.ranks, bad.node, bad.ruling) == (7, 1, (1,), "n1", Ruling.GO_ON)
    assert math.isnan(bad.loss)
    assert str(bad.norm) == str(norm)


def test_a_norm_that_has_travelled_names_nobody():
    applied, bad = OwnSteps(GuardSettings()).judge(7, rows((1.0, NAN), (1.0, NAN)))
    assert not applied
    assert (bad.rank, bad.ranks, bad.node) == (None, (), "")


def test_the_third_in_a_row_stops_and_one_that_only_tells_says_it_once():
    guard, bad = OwnSteps(GuardSettings()), rows((NAN, 1.0))
    assert [guard.judge(step, bad)[1].ruling for step in (1, 2, 3)][-1] is Ruling.STOP
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
    assert [guard.judge(step, bad)[1].ruling for step in (1, 2)] == [Ruling.GO_ON] * 2
    resumed = OwnSteps(GuardSettings())
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert resumed.judge(3, bad)[1].ruling is Ruling.STOP


def test_a_rule_that_was_off_begins_without_a_memory():
    off = OwnSteps(GuardSettings(nonfinite="off")).state_dict()
    resumed = OwnSteps(GuardSettings())
    resumed.load_state_dict(off)
    assert resumed.judge(1, rows((NAN, 1.0)))[1].ruling is Ruling.GO_ON
