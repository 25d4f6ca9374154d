"""Engines train the shipped recipe as one process does, and where one would not it is found."""

from __future__ import annotations

import math

import pytest

from hpctrain.core.settings.layers import flag_layer, resolve
from hpctrain.train.engines.native import Native
from tests.support import parity
from tests.support.parity import GradientSums, StepRecord, compare, summary

pytestmark = pytest.mark.usefixtures("preloaded")

TINY = {
    "train.global_batch": "12",
    "train.seq_len": "16",
    "train.layers": "2",
    "train.dim": "16",
    "train.heads": "2",
    "train.data_limit_mb": "0.2",
    "train.dropout": "0.1",
}
VICTIM = "blocks.1.mlp_norm.weight"


@pytest.fixture
def check(tmp_path):
    """Holds some steps of an engine against one process."""

    def train(kind="fsdp2", ranks=2, steps=1, **sets):
        values = TINY | {"engine.kind": kind} | sets
        settings, _ = resolve([flag_layer({}, [f"{key}={value}" for key, value in values.items()])])
        return parity.check_parity(settings, tmp_path, ranks=ranks, steps=steps)

    return train


def on_every_rank(monkeypatch, broken):
    """Have each rank of the engine call `broken(engine)` instead of its own step."""
    real = Native.step

    def step(engine):
        if engine.world.world_size > 1:
            broken(engine)
        return real(engine)

    monkeypatch.setattr(Native, "step", step)


def parameter(engine):
    return next(value for name, value in engine.model.named_parameters() if name.endswith(VICTIM))


# ---- what holds


@pytest.mark.parametrize(
    ("kind", "ranks", "sets"),
    [
        ("fsdp2", 4, {"engine.tp": "2"}),
        ("ddp", 2, {"train.micro_batch": "2"}),
        ("fsdp2", 2, {"engine.reduce_each_pass": "true", "train.micro_batch": "2"}),
    ],
)
def test_an_engine_that_trains_as_one_process_does_passes(check, kind, ranks, sets):
    result = check(kind, ranks, steps=2, **sets)

    assert result.holds, summary(result)
    assert summary(result).startswith("parity holds: largest difference of a loss ")
    assert [row.step for row in result.rows] == [1, 2]
    assert result.largest < result.tolerance == 1e-4


# ---- what does not


def test_a_parameter_without_a_gradient_is_named(monkeypatch, check):
    def drop(engine):
        parameter(engine).grad = None

    on_every_rank(monkeypatch, drop)

    said = summary(check(steps=2))

    assert f"parity does not hold: without a gradient: {VICTIM}; " in said


def test_a_gradient_that_only_one_rank_has_wrong_is_named(monkeypatch, check):
    def bend(engine):
        if engine.world.rank == 1:
            parameter(engine).grad *= 1.05

    on_every_rank(monkeypatch, bend)

    ((name, apart),) = check().different

    assert name == VICTIM
    assert 1e-2 < apart < 5e-2


def test_an_engine_that_sees_other_samples_leaves_the_tolerance(monkeypatch, check):
    real = parity.make_batches

    def other(tokens, train, engine):
        batches = real(tokens, train, engine)
        if engine.world.world_size > 1:
            batches.consumed = train.global_batch
        return batches

    monkeypatch.setattr(parity, "make_batches", other)

    assert "out of tolerance from step 1 on" in summary(check())


# ---- the result by itself

ONE = [StepRecord(4.0, 1.0), StepRecord(3.0, 1.0)]
SAME = {"a": GradientSums(1.0, 1.0, 0.0)}


@pytest.mark.parametrize(
    ("engine", "gradients", "said"),
    [
        ([StepRecord(4.0, 1.0), StepRecord(3.00029, 1.0)], SAME, "loss 9.7e-05, within 0.0001"),
        ([StepRecord(4.0, 1.0), StepRecord(3.0004, 1.0)], SAME, "out of tolerance from step 2 on"),
        ([StepRecord(4.0, 1.002), StepRecord(3.0, 1.0)], SAME, "out of tolerance from step 1 on"),
        ([StepRecord(math.nan, 1.0), StepRecord(3.0, 1.0)], SAME, "difference of a loss nan"),
        (ONE, {"a": GradientSums(0.0, 1.0, 1.0)}, "without a gradient: a;"),
        (ONE, {"a": GradientSums(1.0, 1.0, 4e-6)}, "another gradient: a (2.0e-03);"),
        (ONE, {"a": GradientSums(1.0, 0.0, 1.0)}, "another gradient: a (inf);"),
        (ONE, {"a": GradientSums(0.0, 0.0, 0.0)}, "parity holds"),
        (ONE, {f"w{i}": GradientSums(0.0, 1.0, 1.0) for i in range(7)}, "w4 and 2 more;"),
    ],
    ids=["near", "a loss", "a norm", "no number", "no gradient", "other", "from nothing", "none",
         "many"],
)  # fmt: skip
def test_the_verdict_says_what_is_off(engine, gradients, said):
    result = compare(ONE, engine, gradients, 1e-4)

    assert said in summary(result)
    assert result.holds is summary(result).startswith("parity holds: ")


def test_a_step_that_both_leave_out_for_an_overflow_is_none():
    overflow = [StepRecord(4.0, math.inf), StepRecord(3.0, 1.0)]
    assert compare(overflow, overflow, SAME, 2e-2).holds
    assert not compare(ONE, overflow, SAME, 2e-2).holds
