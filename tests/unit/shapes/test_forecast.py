from __future__ import annotations

import math
import random

import pytest

from hpctrain.ledger.shapes.choose import REQUEUE_S, RunFacts, StepPoint, forecast, step_at
from hpctrain.ledger.shapes.queue import JobShape, QueueWait

HOUR = 3600
NOW = QueueWait(0.0, 0.3, "SLURM's estimate")


def waits(seconds, sigma=0.3):
    return QueueWait(seconds, sigma, "SLURM's estimate")


def facts(**more):
    given = {
        "points": [StepPoint(2, 1.0, "attempt 1")],
        "remaining_steps": 7000,
        "restart_s": 100.0,
    }
    return RunFacts(**{**given, **more})


def test_a_measured_size_is_taken_as_it_is_and_the_first_source_wins():
    points = [StepPoint(4, 2.0, "attempt 2"), StepPoint(4, 9.0, "an earlier run")]

    assert step_at(points, 4) == points[0]
    assert step_at([], 4) is None


def test_from_one_size_the_others_follow_by_an_assumption_that_is_named():
    step = step_at([StepPoint(4, 2.0, "attempt 2", sigma=0.05)], 8)

    assert step is not None
    assert step.seconds == pytest.approx(2.0 / 1.8)
    assert step.source == "attempt 2 on 4, assumed 1.8 times as fast on twice the nodes"
    assert step.sigma == pytest.approx(0.05 + 0.15)


def test_from_two_sizes_the_others_follow_by_what_was_measured():
    step = step_at([StepPoint(2, 4.0, "attempt 1"), StepPoint(4, 3.0, "attempt 2")], 8)

    assert step is not None
    assert step.seconds == pytest.approx(3.0 * 0.75)
    assert "scaled as between 2 and 4 nodes" in step.source


def test_more_nodes_are_never_taken_to_be_slower_or_better_than_linear():
    slower = step_at([StepPoint(2, 1.0, "a"), StepPoint(4, 1.5, "b")], 8)
    better = step_at([StepPoint(2, 8.0, "a"), StepPoint(4, 1.0, "b")], 8)

    assert slower is not None
    assert better is not None
    assert slower.seconds == pytest.approx(1.5)
    assert better.seconds == pytest.approx(0.5)


def test_one_job_that_does_all_of_it():
    row = forecast(JobShape(2, 8000), facts(), NOW)

    assert row.jobs == 1
    assert row.node_hours == pytest.approx(2 * 7100 / 3600)
    assert row.mean_s == pytest.approx(7100 + NOW.mean_s)
    assert row.refused == ""


def test_every_further_job_waits_and_restarts():
    one = forecast(JobShape(2, 8000), facts(), waits(500))
    three = forecast(JobShape(2, 3000), facts(), waits(500))

    assert three.jobs == 3
    assert one.mean_s is not None
    assert three.mean_s is not None
    mean = waits(500).mean_s
    assert three.mean_s - one.mean_s == pytest.approx(2 * (100 + REQUEUE_S + mean))


def test_work_that_fits_exactly_takes_no_further_job():
    assert forecast(JobShape(2, 7100), facts(), NOW).jobs == 1
    assert forecast(JobShape(2, 7099), facts(), NOW).jobs == 2


def test_preemptions_cost_restarts_and_lost_work():
    calm = forecast(JobShape(2, 8000), facts(), NOW)
    rough = forecast(JobShape(2, 8000), facts(preemptions_per_hour=1.0, lost_s=50.0), NOW)

    assert calm.node_hours is not None
    assert rough.node_hours is not None
    often = 7100 / 3600
    assert rough.node_hours - calm.node_hours == pytest.approx(2 * often * 150 / 3600)


def test_a_restart_share_above_a_tenth_is_refused():
    assert forecast(JobShape(2, 1000), facts(), NOW).refused == ""
    refused = forecast(JobShape(2, 999), facts(restart_s=100.0), NOW).refused
    assert refused == "its restart would take 10 % of each job (at most 10 %)"


def test_a_wait_that_nobody_knows_refuses_the_shape_and_gives_no_finish():
    row = forecast(JobShape(2, 8000), facts(), None)

    assert row.refused == "its wait is not known"
    assert (row.mean_s, row.low_s, row.high_s) == (None, None, None)
    assert row.node_hours is not None


@pytest.mark.parametrize("lacks", [{"points": []}, {"remaining_steps": None}])
def test_without_steps_or_their_time_there_is_no_finish_and_a_speed_all_the_same(lacks):
    row = forecast(JobShape(2, 8000), facts(**lacks), NOW)

    assert (row.mean_s, row.jobs, row.node_hours) == (None, None, None)
    assert 0 < row.speed < 2


def test_speed_counts_waits_and_restarts():
    shape = JobShape(1, HOUR)
    best = forecast(shape, facts(restart_s=0.0, requeue_s=0.0), QueueWait(0.0, 0.0, "")).speed

    assert best == pytest.approx(1.0)
    assert forecast(shape, facts(requeue_s=0.0), waits(HOUR, 0.0)).speed < 0.51


def test_the_interval_holds_the_median_and_is_never_shorter_than_the_steps():
    row = forecast(JobShape(2, 3000), facts(), waits(3000, 1.0))

    assert row.low_s is not None
    assert row.median_s is not None
    assert row.high_s is not None
    assert 0.9 * 7300 < row.low_s < row.median_s < row.high_s


def test_the_interval_holds_about_eight_of_ten_where_the_model_is_true():
    """One wait and a step time, drawn as the model has them: the moments are matched well."""
    row = forecast(JobShape(2, 8000), facts(), waits(3000, 0.8))
    rng = random.Random(1)
    assert row.low_s is not None
    assert row.high_s is not None
    inside = 0
    for _ in range(4000):
        wait = math.exp(rng.gauss(math.log(3060), 0.8)) - 60
        took = wait + 100 + 7000 * math.exp(rng.gauss(0, 0.05))
        inside += row.low_s <= took <= row.high_s

    assert 0.75 <= inside / 4000 <= 0.85


def test_a_limit_for_all_the_work_has_little_to_spare_where_the_step_time_is_a_guess():
    """It would reach the longest limit, and wait for days; a second job is short."""
    known = RunFacts([StepPoint(1, 3600.0, "attempt 1")], 100, 100.0)

    assert known.whole_s(1) == pytest.approx(360_000 * 1.10 + 100)
    far = known.whole_s(16)
    work = known.work_s(16)
    assert far is not None
    assert work is not None
    assert far == pytest.approx(work * 1.25 + 100)


def test_a_step_time_that_is_hardly_known_makes_no_finish_before_now():
    unsure = facts(points=[StepPoint(2, 1.0, "attempt 1", sigma=1.0)])
    row = forecast(JobShape(2, 3000), unsure, waits(3000, 1.0))

    assert row.low_s is not None
    assert row.median_s is not None
    assert row.high_s is not None
    assert 0 < row.low_s < row.median_s < row.high_s
    assert row.high_s > row.median_s + 7000
