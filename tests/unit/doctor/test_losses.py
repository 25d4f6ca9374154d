"""Losses that a log prints: where they cease to be numbers, or rise and stay."""

from __future__ import annotations

import pytest

from hpctrain.advise.doctor.faults import Certainty
from hpctrain.advise.doctor.scan import LossWatch


def seen(*lines):
    watch = LossWatch()
    watch.feed("".join(f"{line}\n" for line in lines).encode(), 0, 0)
    return watch.sightings("train.log")


@pytest.mark.parametrize(
    "words",
    ["loss: {}", "{{'loss': {}, 'lr': 1}}", "train_loss={}", "lm loss: {} |", "Loss {} MAE 1"],
)
def test_a_loss_that_is_no_number_to_the_end_is_told_with_its_first_line(words):
    sightings = seen(words.format(2.5), words.format("nan"), words.format("nan"))

    assert [(s.kind, s.line, s.certainty) for s in sightings] == [("nan", 2, Certainty.LIKELY)]


def test_a_loss_that_came_back_is_not_told():
    assert seen("loss: 2.5", "loss: nan", "loss: nan", "loss: 2.4") == []


def test_one_loss_that_is_no_number_is_told_where_there_was_never_one():
    [first] = seen("loss: nan")

    assert (first.kind, first.certainty) == ("nan", Certainty.POSSIBLE)
    assert seen("loss: 2.5", "loss: nan") == []


@pytest.mark.parametrize("name", ["val_loss", "eval_loss", "test_loss"])
def test_losses_of_validation_are_left_out(name):
    assert seen(f"{name}: nan", f"{name}: nan") == []


def test_a_rise_that_stays_is_told_and_one_that_passes_is_not():
    calm = [f"loss: {2.0 + 0.01 * (n % 7)}" for n in range(40)]

    assert seen(*calm, "loss: 9.0", *calm) == []
    [spike] = seen(*calm, *(["loss: 9.0"] * 12))
    assert (spike.kind, spike.line) == ("loss_spike", 41)
    assert "rose from about 2.0" in spike.text


def test_the_offsets_of_the_last_losses_are_kept():
    watch = LossWatch()
    watch.feed(b"loss: 1.0\n" * 100, 500, 0)

    assert len(watch.offsets) == 64
    assert watch.offsets[-1] == 500 + 99 * 10 + 1
