from __future__ import annotations

import pytest

from hpctrain.ledger.shapes.queue import (
    AT_ONCE_S,
    ESTIMATE_SIGMA,
    HOLE_SIGMA,
    JobShape,
    WaitRecord,
    expected_wait,
)

SHAPE = JobShape(4, 3600)


def waited(*seconds, estimate=None, shape=SHAPE, partition=""):
    return [WaitRecord(shape, partition, one, estimate) for one in seconds]


def test_nothing_known_is_not_known():
    assert expected_wait(SHAPE, None) is None
    assert expected_wait(SHAPE, None, waited(10.0, 20.0)) is None  # too few


DAY = JobShape(4, 24 * 3600)


def test_a_job_of_the_longest_limit_waits_longer_than_its_estimate():
    """It can never end before the reservation of a wide job at the head of the queue."""
    wait = expected_wait(DAY, 9940.0, longest_s=24 * 3600)

    assert wait is not None
    assert wait.median_s == pytest.approx(1.6 * 10_000 - 60)
    assert wait.sigma == pytest.approx(ESTIMATE_SIGMA)
    assert wait.source == "SLURM's estimate x 1.6 (from simulated queues)"


@pytest.mark.parametrize(("hours", "part"), [(48, 0.21), (24, 0.177), (1, 0.08)])
def test_a_shorter_job_waits_a_part_of_its_estimate(hours, part):
    wait = expected_wait(JobShape(4, hours * 3600), 99_940.0, longest_s=96 * 3600)

    assert wait is not None
    assert wait.median_s == pytest.approx(part * 100_000 - 60, rel=0.01)


def test_an_estimate_of_now_is_certain_whatever_own_jobs_waited_elsewhere():
    records = waited(*[90_000.0] * 5, estimate=90_000.0)

    wait = expected_wait(SHAPE, AT_ONCE_S, records)

    assert wait is not None
    assert (wait.median_s, wait.sigma) == (AT_ONCE_S, HOLE_SIGMA)
    assert wait.source == "nodes are free for it now"


def test_an_estimate_is_corrected_by_what_own_waits_have_been_of_theirs():
    far = JobShape(512, 60)  # unlike this shape, so that the waits themselves do not count
    usual = 0.25 * (60 / 86_400) ** 0.25
    records = waited(*[3 * usual * 10_000 - 60] * 97, estimate=9940.0, shape=far)

    wait = expected_wait(DAY, 9940.0, records)

    assert wait is not None
    assert wait.median_s == pytest.approx(3 * 1.6 * 10_000, rel=0.04)
    assert wait.sigma < 0.35
    assert wait.source == "SLURM's estimate x 4.6 (from 97 waits)"


def test_few_own_waits_move_the_correction_a_little():
    one = waited(9940.0, estimate=9940.0, shape=JobShape(512, 60))
    alone, moved = expected_wait(SHAPE, 9940.0), expected_wait(SHAPE, 9940.0, one)

    assert alone is not None
    assert moved is not None
    assert alone.median_s < moved.median_s < 3 * alone.median_s


def test_jobs_that_found_a_hole_say_nothing_of_waits_behind_others():
    found = waited(*[5.0] * 50, estimate=0.0)

    assert expected_wait(SHAPE, 9940.0, found) == expected_wait(SHAPE, 9940.0)


def test_where_slurm_says_nothing_own_waits_of_a_like_shape_count():
    wait = expected_wait(SHAPE, None, waited(100.0, 200.0, 900.0))

    assert wait is not None
    assert wait.median_s == pytest.approx(200.0)
    assert wait.source == "3 waits of own jobs"


def test_unlike_shapes_weigh_less():
    records = [
        *waited(100.0, 110.0, 120.0),
        *waited(*[90000.0] * 4, shape=JobShape(64, 24 * 3600)),
    ]

    wait = expected_wait(SHAPE, None, records)

    assert wait is not None
    assert wait.median_s < 130


def test_waits_in_another_partition_do_not_count():
    assert expected_wait(SHAPE, None, waited(1.0, 2.0, 3.0, partition="debug"), "long") is None


def test_two_sources_meet_in_the_middle_and_the_more_certain_one_counts_more():
    wait = expected_wait(SHAPE, 4000.0, waited(100.0, 100.0, 100.0))

    assert wait is not None
    assert 100 < wait.median_s < 150
    assert wait.source == "SLURM's estimate x 0.11 (from simulated queues) and 3 waits of own jobs"


def test_a_wait_of_nothing_and_a_clock_that_went_back_are_no_trouble():
    wait = expected_wait(SHAPE, 0.0, waited(0.0, -5.0, 0.0, estimate=0.0))

    assert wait is not None
    assert wait.median_s == pytest.approx(0.0, abs=1e-6)
    assert wait.mean_s >= 0
