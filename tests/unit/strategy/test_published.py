"""`hpctrain plan` beside published runs: tests/data/published-runs.toml, half of them held out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hpctrain.advise.strategy import choice, timing
from hpctrain.advise.strategy.memory import ELSEWHERE_ERROR, Spread
from hpctrain.advise.strategy.timing import share_of
from tests.support import published

TOLERANCE = 0.25
UNTUNED = {
    *("H25", "H47", "H48", "H53", "H54", "H55", "H56"),
    *("H86", "H87", "H88", "H89", "H90"),
}
"""Four programs of layers as they are written: 1.3 to 2 times as long as tuned ones."""
SMALL = {"H62", "H63", "H80"}
"""Models of 768 columns or six layers, 1.5 to 2.8 times as long."""
SLOW_LINKS = {"H51", "H52", "H78"}
"""ZeRO-1 over 128 and 1,024 GPUs, Megatron-LM over 512: their traffic is not hidden."""
FAST = {"H85"}
"""nanochat takes 0.78 of its plan."""
RESERVED = (0.85, 1.3)
"""Planned need over what the allocator reserved: that keeps what is freed where there is room."""
MAY_FIT = {"H60", "H64", "H82", "H86", "H87", "H88"}
ZERO_1_IN_TP = {"H76"}
"""Megatron-LM's tp ranks keep weights and gradients whole; the plan's shard them: 24 % less."""
MANY_LENGTHS = "ms-swift"
"""Its samples have many lengths, so that the allocator reserves up to 1.6 times what is needed."""
ALLOCATED = (0.9, 1 / (1 - ELSEWHERE_ERROR))
"""Planned tensors over published ones. The highest is H31, whose optimizer is fused."""


def test_there_are_runs_of_both_kinds_from_several_engines():
    held = [run for run in published.runs() if run.is_held_out]

    assert len(published.runs()) >= 40
    assert len(held) >= len(published.runs()) / 2
    assert len({run.said["source"] for run in published.runs()}) >= 6
    assert len({run.name for run in published.runs()}) == len(published.runs())


def test_what_was_trained_is_not_refused():
    """They need 5 to 20 % more than there is; H64 adapts two matrices, the plan seven."""
    rows = {run.name: run.row for run in published.runs()}

    assert [name for name, row in rows.items() if not (row.is_held or row.may_fit)] == []
    assert {name for name, row in rows.items() if not row.is_held} == MAY_FIT


def test_what_was_trained_within_the_plans_error_is_not_refused():
    """H12's layers with norms of several kernels, as hpctrain's own row has them."""
    (run,) = [run for run in published.runs() if run.name == "H12"]
    (row,) = [row for row in choice.rows_of(run.asked) if row.way.key == "fsdp2"]

    assert (row.fits, row.may_fit) == (False, True)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_step_takes_what_was_published_within_a_quarter(held_out):
    ratios = {
        run.name: run.step_ratio
        for run in published.runs()
        if run.step_ratio and run.is_held_out is held_out
    }
    off = {name for name, ratio in ratios.items() if not 1 - TOLERANCE <= ratio <= 1 + TOLERANCE}

    assert off == (UNTUNED | SMALL | FAST | (SLOW_LINKS - {"H51"}) if held_out else set())


def test_published_times_lie_in_the_range_that_a_plan_shows():
    for run in published.runs():
        if run.step_s:
            time = run.row.time
            assert time.least_s * 0.99 <= run.step_s <= time.most_s * 1.01, run.name


def test_planned_memory_is_near_what_was_published():
    ratios = [(run, run.memory_ratio) for run in published.runs() if run.memory_ratio]
    tensors = {run.name for run, _ in ratios if run.said["reading"] == "allocated"}

    assert len(ratios) >= 10
    assert len(tensors) >= 7
    for run, ratio in ratios:
        if run.name in tensors:
            assert ALLOCATED[0] <= ratio <= ALLOCATED[1], (run.name, ratio)
        elif run.said["source"] != MANY_LENGTHS and run.name not in ZERO_1_IN_TP:
            assert RESERVED[0] <= ratio <= RESERVED[1], (run.name, ratio)


def test_computing_blocks_again_never_makes_a_step_shorter():
    """Of one H200 a well tuned run was published, with recomputation: 67 % of its peak."""
    for family in ("a100", "h100", "h200", "gh200", "mi300x"):
        plain, full = (share_of(family, layout)[0] for layout in (Spread(), Spread(recompute=True)))
        assert full <= 4 / 3 * plain, family


def test_a_kind_without_published_runs_keeps_its_gpus_own_level():
    """Of A100s no tuned run with tp was calibrated: H100's tp runs would take it for an H100."""
    cut = Spread("fsdp2", shards=4, tp=2)
    (plain, _), (share, known_of) = share_of("a100", Spread()), share_of("a100", cut)
    of_h100 = share_of("h100", cut)[0] / share_of("h100", Spread())[0]

    assert share == pytest.approx(plain * of_h100)
    assert known_of == timing.ANY


def test_compiled_programs_on_copies_of_the_model_have_a_row_of_their_own():
    """H85: DDP and torch.compile; without fused kernels its activations would be too large."""
    (run,) = [run for run in published.runs() if run.name == "H85"]
    rows = {row.way.key: row for row in choice.rows_of(run.asked)}

    assert rows["ddp+fused"].is_held
    assert not rows["ddp"].is_held
    assert "single+fused" not in rows


def test_copies_of_a_model_whose_states_are_bf16_have_a_row_of_their_own():
    """H91 and H92: fp32 weights and moments would not have fitted, oumi's of bf16 did."""
    (run,) = [run for run in published.runs() if run.name == "H85"]
    rows = {row.way.key: row for row in choice.rows_of(run.asked)}
    saved = rows["ddp"].peak.nbytes - rows["ddp+bf16"].peak.nbytes

    assert saved > 8 * run.asked.model.params
    assert {"fsdp2+bf16", "fsdp2+recompute+bf16"} <= set(rows)
    assert "single+bf16" not in rows


def test_the_constants_are_those_that_the_calibration_runs_give():
    path = Path(timing.__file__).with_name("utilization.toml")

    assert tomllib.loads(path.read_text()) == published.fitted(), (
        "run: python -m tests.support.published utilization"
        " > hpctrain/advise/strategy/utilization.toml"
    )
