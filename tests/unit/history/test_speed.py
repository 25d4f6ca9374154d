"""Speed from step marks, ranks from their samples, and what a GPU could do at best."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from hpctrain.ledger.history.progress import newest_sample, peak_flops, rank_sample, speed
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.ledger_runs import event_of

if TYPE_CHECKING:
    from hpctrain.ledger.run.events import Event


def speed_of(events):
    return speed(RunHistory.of(events))


def started(attempt: int, device: str = "cpu", ranks: int = 4) -> list[Event]:
    return [
        event_of(0.0, "attempt_started", attempt, {"world_size": ranks}),
        event_of(0.0, "phase", attempt, {"name": "initialised", "device": device}),
        event_of(0.0, "restored", attempt, {"step": 0}),
    ]


def mark(t: float, first: int, last: int, *, attempt: int = 1, seconds=10.0, **more) -> Event:
    return event_of(t, "steps", attempt, {"first": first, "last": last, "seconds": seconds, **more})


def test_a_run_without_a_mark_has_no_speed():
    assert speed_of([]) is None
    assert speed_of(started(1)) is None


def test_times_of_steps_are_medians_over_marks_by_their_steps():
    marks = [
        mark(10, 1, 1, p50_s=9.0, p95_s=90.0),
        mark(20, 2, 11, p50_s=1.0, p95_s=2.0),
        mark(30, 12, 21, p50_s=1.2, p95_s=3.0),
    ]
    now = speed_of(started(1) + marks)
    assert (now.step_p50_s, now.step_p95_s) == (1.2, 3.0)
    assert now.steps_per_s == pytest.approx(21 / 30)
    assert now.window_s == 30


def test_marks_of_an_older_version_give_their_mean_step():
    now = speed_of([*started(1), mark(10, 1, 4)])
    assert (now.step_p50_s, now.step_p95_s, now.tokens_per_s) == (2.5, None, None)


def test_only_the_newest_ten_minutes_and_twenty_marks_count():
    old = [mark(t, t, t, p50_s=100.0, skipped=1) for t in range(1, 30)]
    assert speed_of([*started(1), *old, mark(700, 30, 39, p50_s=1.0)]).step_p50_s == 1.0
    assert speed_of([*started(1), *old]).skipped == 20


def test_a_stretch_in_which_the_job_was_suspended_says_nothing_of_its_speed():
    suspended = event_of(115, "suspended", 1, {"seconds": 90.0})
    marks = [mark(10, 1, 10), mark(20, 11, 20), suspended, mark(120, 21, 30, seconds=100.0)]

    now = speed_of([*started(1), *marks])

    assert now.steps_per_s == 1
    assert speed_of([*started(1), suspended, *marks[3:]]).steps_per_s == 0.1  # all that there is
    assert speed_of([*started(1), *marks, mark(130, 31, 40)]).window_s == 30


def test_an_attempt_s_speed_is_its_own():
    before = mark(10, 1, 10, p50_s=9.0)
    assert speed_of([*started(1), before, *started(2)]) is None
    late = mark(20, 11, 20, attempt=1, p50_s=9.0)
    now = speed_of([*started(1), before, *started(2), mark(19, 1, 5, attempt=2, p50_s=1.0), late])
    assert now.step_p50_s == 1.0


def test_rates_are_sums_over_the_time_of_the_marks_that_tell_them():
    samples = {"sample_first": 0, "sample_last": 80}
    now = speed_of(
        [
            *started(1),
            mark(10, 1, 5, tokens=1000, **samples),
            mark(30, 6, 10, seconds=20.0, tokens=500, **samples),
            mark(40, 11, 15),
        ]
    )
    assert now.tokens_per_s == pytest.approx(50)
    assert now.samples_per_s == pytest.approx(160 / 30)


def test_mfu_counts_all_ranks_and_is_told_for_known_devices_only():
    told = mark(10, 1, 5, flops=312e12 * 4 * 10 * 0.4)
    assert speed_of([*started(1, "NVIDIA A100-SXM4-40GB"), told]).mfu == pytest.approx(0.4)
    unknown = speed_of([*started(1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb"), told])
    assert unknown.mfu is None
    assert unknown.flops_per_s == pytest.approx(312e12 * 4 * 0.4)


def test_the_data_share_is_the_growth_of_its_sum_over_wall_time():
    first, second = mark(10, 1, 5, data_s=4.0), mark(30, 6, 10, data_s=5.0)
    assert speed_of([*started(1), first]).data_share == pytest.approx(0.4)
    assert speed_of([*started(1), first, second]).data_share == pytest.approx(0.05)
    assert speed_of([*started(1), mark(10, 1, 5)]).data_share is None


def test_the_last_word_on_loss_norm_and_slowest_rank_counts():
    now = speed_of(
        [
            *started(1),
            mark(10, 1, 5, loss=3.0, grad_norm=0.5, slow_rank=3, slow_by=0.1),
            mark(20, 6, 9, loss=2.0, skipped=2),
        ]
    )
    assert (now.loss, now.grad_norm, now.skipped) == (2.0, 0.5, 2)
    assert (now.slow_rank, now.slow_by) == (3, 0.1)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"first": 1, "last": 0, "seconds": 1.0},
        {"first": 1, "last": 5, "seconds": 0},
        {"first": 1, "last": 5, "seconds": "nan"},
        {"first": "1", "last": None, "seconds": -1.0},
    ],
)
def test_a_mark_that_cannot_be_counted_with_is_passed_over(data):
    assert speed_of([*started(1), event_of(1.0, "steps", 1, data)]) is None
    good = speed_of([*started(1), mark(1, 1, 5, loss="nan", p50_s=None, tokens="many")])
    assert (good.loss, good.tokens_per_s, good.step_p50_s) == (None, None, 2.0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("Tesla V100-SXM2-32GB", 125e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks_are_told_for_names_that_are_known_to_the_letter(name, peak):
    assert peak_flops(name) == peak


SAMPLE = {"t": 5.0, "step": 20, "steps": 10, "wall_s": [5.0, 5.0], "data_s": [0.5, 0.25]}


def test_a_sample_of_ranks_is_read_back():
    told = {**SAMPLE, "own_s": [3, 4.5], "mem_peak_bytes": [7, 8], "mem_retries": None}
    found = rank_sample(json.dumps(told).encode(), 3)
    assert (found.attempt, found.step, found.steps) == (3, 20, 10)
    assert (found.wall_s, found.own_s, found.peak_bytes) == ((5.0, 5.0), (3.0, 4.5), (7.0, 8.0))
    assert found.busy_s == found.own_s
    assert rank_sample(json.dumps(SAMPLE).encode(), 3).busy_s == (5.0, 5.0)


@pytest.mark.parametrize(
    "change",
    [
        {"wall_s": []},
        {"wall_s": None},
        {"steps": 0},
        {"t": "soon"},
        {"wall_s": [1.0, math.nan]},
        {"wall_s": [1.0, "x"]},
    ],
)
def test_a_sample_that_says_too_little_is_none(change):
    assert rank_sample(json.dumps({**SAMPLE, **change}).encode(), 1) is None


def test_a_value_for_other_ranks_than_there_are_is_left_out():
    found = rank_sample(json.dumps({**SAMPLE, "own_s": [1.0]}).encode(), 1)
    assert found.own_s is None


def test_the_newest_whole_sample_counts():
    older, newer = (json.dumps({**SAMPLE, "step": step}).encode() for step in (10, 20))
    assert newest_sample(b"\n".join([older, newer, newer[:30]]), 1).step == 20
    assert newest_sample(b"[1]\n\n\0\0", 1) is None
