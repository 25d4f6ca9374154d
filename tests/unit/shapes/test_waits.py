from __future__ import annotations

import pytest

from hpctrain.shapes.candidates import JobShape
from hpctrain.shapes.waits import ESTIMATE_SIGMA, WaitRecord, expected_wait

SHAPE = JobShape(4, 3600)


def waited(*seconds, estimate=None, shape=SHAPE, partition=""):
    return [WaitRecord(shape, partition, one, estimate) for one in seconds]


def test_nothing_known_is_not_known():
    assert expected_wait(SHAPE, None) is None
    assert expected_wait(SHAPE, None, waited(10.0, 20.0)) is None  # too few


def test_slurms_estimate_alone_is_taken_with_a_wide_spread():
    wait = expected_wait(SHAPE, 1000.0)

    assert wait is not None
    assert (wait.median_s, wait.sigma) == (1000.0, ESTIMATE_SIGMA)
    assert wait.source == "SLURM's estimate"


def test_an_estimate_is_corrected_by_what_own_waits_have_been_of_theirs():
    far = JobShape(512, 60)  # unlike this shape, so that the waits themselves do not count
    records = waited(440.0, 440.0, 440.0, estimate=940.0, shape=far)

    wait = expected_wait(SHAPE, 1940.0, records)

    assert wait is not None
    assert wait.median_s == pytest.approx(940.0)
    assert "x 0.5 (as 3 waits showed)" in wait.source


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
    assert 100 < wait.median_s < 400
    assert wait.source == "SLURM's estimate and 3 waits of own jobs"


def test_a_wait_of_nothing_and_a_clock_that_went_back_are_no_trouble():
    wait = expected_wait(SHAPE, 0.0, waited(0.0, -5.0, 0.0, estimate=0.0))

    assert wait is not None
    assert wait.median_s == pytest.approx(0.0, abs=1e-6)
    assert wait.mean_s >= 0
