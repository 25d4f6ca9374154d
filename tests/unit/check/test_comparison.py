"""Losses of two runs are held against each other bit by bit, and what came of it told."""

from __future__ import annotations

import math

import pytest

from hpctrain.advise.check.comparison import (
    LossComparison,
    RehearsedAttempt,
    began_again,
    compared,
    place_text,
    printed_losses,
    printed_places,
)
from hpctrain.advise.check.rehearsal import (
    left_line,
    loss_line,
    printed_line,
    rank_line,
    resume_line,
    stop_line,
)
from hpctrain.core.base.records import EndReason

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
        ({1: 4.0, 2: 3.0}, {3: 2.0, 4: 1.0}, "ok", "steps 1 to 4 as in an undisturbed run"),
        ({1: 4.0, 2: 3.0}, {3: 2.0, 4: 1.5}, "fail", "from step 4 on"),
        ({1: 4.5, 2: 3.0}, {3: 2.0, 4: 1.5}, "not known", "differ at step 1 already"),
        ({1: None}, {3: None}, "not known", "reports no loss"),
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


def test_the_size_of_a_save_is_told_where_it_is_known():
    before = attempt({1: 4.0}, reason=EndReason.PREEMPTED, saved=[1], save_bytes=3 << 20)

    assert "saved step 1 (3.0 MiB), resumed" in stop_line(before, attempt({}, restored=1)).message


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


@pytest.mark.parametrize(
    ("line", "losses"),
    [
        ("iter 10: loss 3.2345, time 12.3ms, mfu 1.0%", {10: 3.2345}),
        ("Step: 7 | lr 1e-4 | Loss: 1.5e-1", {7: 0.15}),
        ("[2026] step=3 loss=nan", {3: NAN}),
        ("{'loss': 2.5, 'step': 40}", {40: 2.5}),
        ("iteration     100/  1000 | lm loss: 2.5E+00 |", {100: 2.5}),
        ("step 0: train loss 4.2, val loss 4.3", {}),
        ("epoch 3 loss 1.0", {}),
        ("step 3 is slow, no loss", {}),
        ("x" * 2000 + " step 1 loss 1.0", {}),
    ],
)
def test_losses_that_programs_print_are_read(line, losses):
    assert repr(printed_losses(f"hello\n{line}\nbye")) == repr(losses)


def test_the_last_word_on_a_step_counts():
    assert printed_losses("step 1 loss 2\nstep 1 loss 3\n") == {1: 3.0}


def test_a_program_of_others_that_resumes_otherwise_is_a_note():
    before, whole = attempt({0: 4.0, 1: 3.0}), attempt({0: 4.0, 1: 3.0, 2: 2.0})

    assert printed_line(before, attempt({2: 2.0}), whole).status == "ok"
    assert printed_line(before, attempt({2: 2.5}), whole).status == "note"


def test_a_run_in_peace_that_read_what_was_left_compares_nothing():
    line = printed_line(attempt({0: 4.0}), attempt({1: 3.0}), attempt({1: 3.0}))

    assert line.status == "not known"
    assert "began with step 1" in line.message


@pytest.mark.parametrize(
    ("reason", "status"), [(EndReason.PREEMPTED, "ok"), (EndReason.CRASHED, "note")]
)
def test_how_a_program_took_the_notice_is_told(reason, status):
    line = left_line(attempt({}, reason=reason), 4.0)

    assert (line.status, "4" in line.message) == (status, True)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("epoch 3 it 20 loss 1.9", (3, 20)),
        ("[120/500] loss: 2.1", (-1, 120)),
        ("step=120, lr=0.1", (-1, 120)),
        ("Epoch: [3][ 20/500]\tTime 0.1", (3, 20)),
        ("Train Epoch: 3 [640/60000 (1%)]\tLoss: 0.3", (3, 640)),
        (" 24%|##4       | 120/500 [00:10<00:31, 12.1it/s]", (-1, 120)),
        ("Epoch 3/90:  24%|##4       | 120/500 [00:10<00:31]", (3, 120)),
        ("{'loss': 1.2, 'grad_norm': 0.5, 'epoch': 0.12}", (0.12, -1)),
        ("iter 100: loss 2.5, time 12ms", (-1, 100)),
        ("global_step: 7", (-1, 7)),
        ("ep 4 batch 9", (4, 9)),
        ("Iteration #12", (-1, 12)),
        ("2026-11-28 01:02:03 INFO | step 5 | loss 1.0", (-1, 5)),
    ],
)
def test_what_programs_print_of_where_they_are_is_read(line, place):
    assert printed_places(line) == [place]


@pytest.mark.parametrize(
    "line",
    ["loss 1.9", "val_loss 3.0 at step 5", "stepping 5", "keep 3 files", "12/500 rows", "x" * 2000],
)
def test_what_says_nothing_of_it_is_passed_over(line):
    assert printed_places(line) == []


def test_a_line_without_an_epoch_is_of_the_last_one():
    assert printed_places("Epoch 2\n  1%| | 1/9 [0\r 2%| | 2/9 [0\nEpoch 3\n") == [
        (2, -1), (2, 1), (2, 2), (3, -1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        ([(0, 0), (0, 1), (1, 0)], [(0, 0)], True),
        ([(0, 0), (0, 1), (1, 0)], [(1, 0)], False),
        ([(-1, 100), (-1, 200)], [(-1, 300)], False),
        ([(-1, 100), (-1, 200)], [(-1, 100)], True),
        ([(0, -1), (1, -1)], [(0, -1)], True),
        ([(0, -1), (0, -1)], [(0, -1)], None),
        ([(-1, 1), (-1, 9), (-1, 1)], [(-1, 1)], None),
        ([], [(0, 0)], None),
        ([(0, 0), (1, 0)], [], None),
    ],
)
def test_a_second_start_that_begins_where_the_first_did_began_anew(before, after, again):
    assert began_again(before, after) is again


@pytest.mark.parametrize(
    ("after", "saved", "status", "words"),
    [
        ([(0, 0)], True, "fail", "came to epoch 2 step 1, started over at epoch 0 step 0: each"),
        ([(0, 0)], False, "note", "unless it saves later than the rehearsal stopped it"),
        ([(2, 0)], True, "ok", "came to epoch 2 step 1, resumed at epoch 2 step 0"),
        ([], True, "not known", "not known whether its second start resumed"),
    ],
)
def test_a_rehearsal_says_whether_it_went_on(after, saved, status, words):
    line = resume_line([(0, 0), (2, 1)], after, saved=saved)

    assert line.status == status
    assert words in line.message


def test_a_place_has_what_was_named():
    assert place_text((3.5, -1.0)) == "epoch 3.5"
    assert place_text((-1.0, 20.0)) == "step 20"
