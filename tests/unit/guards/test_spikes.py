"""Spikes are found, clean runs are left alone, and nothing that is no number blinds the rule."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

from hpctrain.train.guards.rules import LEAST, MOST_SPIKES_IN_A_ROW, WINDOW, SpikeRule

SPIKES = range(2000, 29_500, 997)


def series(steps, tail, seed=0):
    """A loss that falls, and a norm; their noise normal, or with the heavy tails of t with 4."""
    rng = np.random.default_rng(seed)

    def noise():
        drawn = rng.standard_normal(steps) if tail == "normal" else rng.standard_t(4, steps)
        return drawn if tail == "normal" else drawn / math.sqrt(2)

    t = np.arange(steps)
    base = 2.0 + 6.0 * np.exp(-t / 800) + 1.5 * np.exp(-t / 20000)
    loss = base * (1 + 0.012 * noise())
    norm = (0.3 + 1.2 * np.exp(-t / 500)) * np.exp(0.12 * noise())
    return loss, norm


def found(loss, norm, rule=None):
    rule = rule or SpikeRule()
    pairs = zip(loss.tolist(), norm.tolist(), strict=True)
    return [step for step, pair in enumerate(pairs) if rule.judge(*pair) is not None]


@pytest.mark.parametrize(
    ("tail", "steps", "most"),
    [
        ("normal", 10_000, 1),
        ("t4", 10_000, 12),
        pytest.param("normal", 100_000, 1, marks=pytest.mark.soak),
        pytest.param("t4", 100_000, 60, marks=pytest.mark.soak),
    ],
)
def test_a_clean_run_is_left_alone(tail, steps, most):
    assert len(found(*series(steps, tail))) <= most


@pytest.mark.parametrize("tail", ["normal", "t4"])
def test_every_spike_is_found(tail):
    loss, norm = series(8_000, tail)
    spikes = [step for step in SPIKES if step < len(loss)]
    loss[spikes] *= 1.35
    norm[spikes] *= 6
    assert set(spikes) <= set(found(loss, norm))


def flat(rule, steps):
    for step in range(steps):
        assert rule.judge(2.0 + 0.001 * (step % 7), 1.0 + 0.001 * (step % 5)) is None
    return rule


def test_a_spike_of_the_loss_or_the_norm_says_what_and_by_how_much():
    loss = flat(SpikeRule(), 100).judge(3.0, 1.0)
    norm = flat(SpikeRule(), 100).judge(2.0, 50.0)

    assert (loss.what, loss.value, round(loss.usual, 2)) == ("loss", 3.0, 2.0)
    assert loss.deviations == pytest.approx(0.997 / (0.005 * 2.003))
    assert (norm.what, norm.value, round(norm.usual, 2)) == ("grad_norm", 50.0, 1.0)


def test_floors_keep_a_quiet_run_from_crying_wolf():
    rule = flat(SpikeRule(), 100)
    assert rule.judge(2.0 * 1.049, math.exp(0.49)) is None
    assert rule.judge(2.0 * 1.06, 1.0) is not None
    assert rule.judge(2.0, math.exp(0.51)) is not None


def test_a_fall_is_no_spike():
    assert flat(SpikeRule(), 100).judge(0.1, 0.001) is None


def test_nothing_is_judged_before_there_are_enough_values():
    assert flat(SpikeRule(), LEAST - 1).judge(1000.0, 1.0) is None
    assert flat(SpikeRule(), LEAST).judge(1000.0, 1.0) is not None


def test_a_spike_does_not_enter_what_later_steps_are_judged_by():
    rule = flat(SpikeRule(), WINDOW)
    before = rule.state_dict()
    rule.judge(1000.0, 1.0)
    assert {**rule.state_dict(), "in_a_row": 0} == before


def test_after_eight_in_a_row_the_next_is_a_new_level():
    rule = flat(SpikeRule(), WINDOW)
    told = [rule.judge(3.0, 1.0) is not None for _ in range(MOST_SPIKES_IN_A_ROW + 1)]
    assert told == [True] * MOST_SPIKES_IN_A_ROW + [False]
    assert rule.state_dict()["losses"][-1] == 3.0


def test_a_program_that_tells_no_loss_is_judged_by_its_norm():
    rule = SpikeRule()
    assert [rule.judge(None, 1.0) for _ in range(WINDOW)] == [None] * WINDOW
    assert rule.judge(None, 100.0).what == "grad_norm"
    assert rule.state_dict()["losses"] == []


def test_a_norm_of_nothing_is_judged_too():
    assert flat(SpikeRule(), 100).judge(2.0, 0.0) is None


@pytest.mark.parametrize("cut", [3, 64, 200, 777])
def test_a_resumed_rule_decides_as_one_that_went_on_to_the_bit(cut):
    loss, norm = series(1000, "t4", seed=5)
    loss[::97] *= 1.4
    whole, first, second = SpikeRule(), SpikeRule(), SpikeRule()
    decided = found(loss, norm, whole)
    before = found(loss[:cut], norm[:cut], first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = found(loss[cut:], norm[cut:], second)

    assert decided == before + [cut + step for step in after]
    assert second.state_dict() == whole.state_dict()


def test_a_judgement_is_cheap():
    loss, norm = series(2000, "normal")
    rule = SpikeRule()
    began = time.process_time()
    found(loss, norm, rule)
    assert (time.process_time() - began) / 2000 < 0.0005  # 0.04 ms on a quiet core


def test_a_resume_in_the_middle_of_a_row_counts_on():
    first, second = flat(SpikeRule(), WINDOW), SpikeRule()
    for _ in range(MOST_SPIKES_IN_A_ROW):
        assert first.judge(3.0, 1.0) is not None
    second.load_state_dict(first.state_dict())
    assert second.judge(3.0, 1.0) is None
