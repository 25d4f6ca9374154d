"""Saves against disk, limit and notice; what only a save can tell is not known before one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.advise.check.forecast import (
    ForecastFacts,
    PastSaves,
    check_interval,
    check_lead,
    check_room_for,
)
from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.ledger.plan.interval import Costs

JOB = ForecastFacts(limit_s=3600, nodes=2, margin_s=10, lead_s=90, calls_hpctrain=True)
PAST = PastSaves("lm-1", save_s=74.0, costs=Costs(1.0, 74.0), size_bytes=1 << 30, step_s=3.0)
FOREIGN = replace(JOB, calls_hpctrain=False)


def answers(lines):
    return [(one.check, one.status) for one in lines]


def test_before_a_first_save_the_lead_is_not_known():
    (line,) = check_lead(JOB, None)

    assert line.status == "not known"
    assert "10 s margin + 1.5 x a save + 2 steps" in line.message


def test_the_sum_of_the_clock_is_shown():
    (line,) = check_lead(JOB, PAST)

    assert line.status == "ok"
    assert line.message == (
        "10 s margin + 1.5 x save 1m14s + 2 x step 3 s = 2m07s (as lm-1 saved) before the limit of "
        "1h00m"
    )


@pytest.mark.parametrize(
    ("limit_s", "status"), [(127, "fail"), (128, "note"), (253, "note"), (255, "ok")]
)
def test_a_job_must_be_longer_than_its_end(limit_s, status):
    (line,) = check_lead(replace(JOB, limit_s=limit_s), PAST)

    assert line.status == status


@pytest.mark.parametrize(("lead_s", "status"), [(113, "fail"), (114, "ok")])
def test_a_foreign_program_is_told_a_fixed_time_before_the_limit(lead_s, status):
    (line,) = check_lead(replace(FOREIGN, lead_s=lead_s), PAST)

    assert line.status == status
    assert line.hint == ("" if status == "ok" else "--set slurm.signal_lead_s=115")


@pytest.mark.parametrize(("notice_s", "status"), [(102, "note"), (103, "ok")])
def test_the_notice_of_a_preemption_is_held_against_a_save(notice_s, status):
    job = replace(JOB, notice_s=notice_s, notice_from="site x")

    _, line = check_lead(job, PAST)

    assert (line.check, line.status) == ("notice", status)
    assert "(site x)" in line.message


def test_a_chosen_interval_is_that_of_the_ranks():
    first = check_interval(CheckpointSettings(), JOB, None)
    later = check_interval(CheckpointSettings(), JOB, PAST)

    assert (first.status, first.message) == (
        "ok",
        "at first every 7m30s (a first guess, no save was measured)",
    )
    assert later.message == "every 15m00s (a quarter of the job's 1h00m)"


@pytest.mark.parametrize(
    ("interval_s", "status"), [(3600, "fail"), (3599, "note"), (901, "note"), (900, "ok")]
)
def test_an_interval_is_held_against_the_time_limit(interval_s, status):
    line = check_interval(CheckpointSettings(interval_s=interval_s), JOB, None)

    assert line.status == status


@pytest.mark.parametrize(("steps", "status"), [(1200, "fail"), (301, "note"), (300, "ok")])
def test_an_interval_in_steps_takes_the_time_of_earlier_steps(steps, status):
    settings = CheckpointSettings(interval_steps=steps)

    assert check_interval(settings, JOB, PAST).status == status
    assert check_interval(settings, JOB, None).status == "not known"
    assert check_interval(settings, JOB, replace(PAST, step_s=None)).status == "not known"


@pytest.mark.parametrize(
    ("free_gib", "status"), [(3.9, "fail"), (4.0, "note"), (4.9, "note"), (5.1, "ok")]
)
def test_the_checkpoints_that_are_kept_and_one_more_must_fit(free_gib, status):
    line = check_room_for(CheckpointSettings(keep_last=3), JOB, PAST, int(free_gib * (1 << 30)))

    assert line.status == status
    assert line.message.startswith("4 checkpoints at once (kept, and one that is being written)")
    assert "4.0 GiB;" in line.message


def test_those_kept_every_so_many_steps_count_where_the_steps_are_known():
    settings = CheckpointSettings(keep_last=3, keep_every=100)
    free = 100 << 30

    line = check_room_for(settings, replace(JOB, steps=1000), PAST, free)
    assert (line.status, line.message.partition(" ")[0]) == ("ok", "14")
    line = check_room_for(settings, JOB, PAST, free)
    assert line.status == "note"
    assert "and one more every 100 steps" in line.message


@pytest.mark.parametrize(
    ("job", "past", "free"),
    [
        (JOB, None, 1 << 40),
        (JOB, replace(PAST, size_bytes=None), 1 << 40),
        (JOB, PAST, None),
        (FOREIGN, PAST, 1 << 40),
        (replace(JOB, calls_hpctrain=None), PAST, 1 << 40),
    ],
)
def test_a_size_or_room_that_nobody_knows_is_not_known(job, past, free):
    assert check_room_for(CheckpointSettings(), job, past, free).status == "not known"


@pytest.mark.parametrize("calls_hpctrain", [False, None])
def test_the_saves_of_a_program_that_tells_nothing_are_not_known(calls_hpctrain):
    job = replace(JOB, calls_hpctrain=calls_hpctrain)

    assert check_interval(CheckpointSettings(interval_s=60), job, PAST).status == "not known"
