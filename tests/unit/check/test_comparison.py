"""Losses of two runs are held against each other bit by bit, and what came of it told."""

from __future__ import annotations

import math

import pytest

from hpctrain.base.records import EndReason
from hpctrain.check.comparison import LossComparison, RehearsedAttempt, compared
from hpctrain.check.rehearsal import loss_line, rank_line, stop_line

NAN = math.nan


@pytest.mark.parametrize(
    ("first", "second", "steps", "parts_at", "worst"),
    [
        ({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0, 3: 0.5}, (1, 2), None, 0.0),
        ({1: 2.0, 2: 1.0, 3: 1.0}, {1: 2.0, 2: 1.1, 3: 2.0}, (1, 2, 3), 2, 0.5),
        ({1: 1.0}, {1: 1.0 + 2**-52}, (1,), 1, pytest.approx(2**-52)),
        ({1: NAN}, {1: NAN}, (1,), None, 0.0),
        ({1: NAN}, {1: 1.0}, (1,), 1, math.inf),
        ({1: None, 2: 1.0}, {1: 1.0, 2: None}, (), None, 0.0),
        ({1: 1.0}, {2: 1.0}, (), None, 0.0),
    ],
)
def test_the_first_step_that_differs_is_found(first, second, steps, parts_at, worst):
    assert compared(first, second) == LossComparison(steps, parts_at, worst)


def attempt(losses, **changes):
    return RehearsedAttempt(losses, **changes)


WHOLE = attempt({1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0})


@pytest.mark.parametrize(
    ("before", "after", "status", "words"),
    [
        ({1: 4.0, 2: 3.0}, {3: 2.0, 4: 1.0}, "ok", "steps 1 to 4 as in a run in peace"),
        ({1: 4.0, 2: 3.0}, {3: 2.0, 4: 1.5}, "fail", "from step 4 on"),
        ({1: 4.5, 2: 3.0}, {3: 2.0, 4: 1.5}, "not known", "differ at step 1 already"),
        ({1: None}, {3: None}, "not known", "tells no loss"),
    ],
)
def test_a_difference_is_laid_on_the_stop_only_where_it_begins_there(before, after, status, words):
    line = loss_line(attempt(before), attempt(after), WHOLE)

    assert line.status == status
    assert words in line.message


@pytest.mark.parametrize(
    ("reason", "saved", "restored", "status"),
    [
        (EndReason.PREEMPTED, [2], 2, "ok"),
        (EndReason.PREEMPTED, [1], 1, "fail"),
        (EndReason.PREEMPTED, [], None, "fail"),
        (EndReason.CRASHED, [2], 2, "fail"),
    ],
)
def test_a_stop_that_loses_a_step_fails(reason, saved, restored, status):
    before = attempt({1: 4.0, 2: 3.0}, reason=reason, saved=saved)

    assert stop_line(before, attempt({}, restored=restored)).status == status


@pytest.mark.parametrize(
    ("comparison", "status"),
    [
        (LossComparison(()), "not known"),
        (LossComparison((1, 2)), "ok"),
        (LossComparison((1, 2), 1, 1e-3), "ok"),
        (LossComparison((1, 2), 2, 1.1e-3), "note"),
    ],
)
def test_rounding_between_numbers_of_ranks_is_none(comparison, status):
    assert rank_line(comparison).status == status
