"""The simulated queue keeps SLURM's rules: order, backfill, limits, preemption, failures."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest

from tests.support.queue_sim.controller import (
    COMPLETED,
    TIMEOUT,
    Controller,
    Partition,
    Request,
    Settings,
    starts_with_ends,
)
from tests.support.queue_sim.profile import Profile
from tests.support.queue_sim.training import REQUEUE_S, Shape, Training, train
from tests.support.queue_sim.workload import DAY_S, HOUR_S, lublin, read_swf, scaled_to_load

FOUR = Settings(4, bf_interval_s=30, bf_resolution_s=1)


def ask(nodes: int, limit_s: float, run_s: float | None = None, at_s: float = 0) -> Request:
    return Request(at_s, nodes, limit_s, limit_s if run_s is None else run_s)


def test_a_short_job_goes_into_a_hole_and_delays_nobody() -> None:
    queue = Controller(FOUR)
    queue.submit(ask(3, 1000))
    large = queue.submit(ask(4, 500))
    short = queue.submit(ask(1, 900))
    queue.run(30)
    assert short.started_s == 30  # the first backfill pass
    queue.run()
    assert large.started_s == 1000


def test_a_job_that_would_delay_the_first_reservation_waits() -> None:
    queue = Controller(FOUR)
    queue.submit(ask(3, 1000))
    large = queue.submit(ask(4, 500))
    long = queue.submit(ask(1, 1100))
    queue.run()
    assert (large.started_s, long.started_s) == (1000, 1500)


def test_a_job_that_would_delay_the_second_reservation_waits_too() -> None:
    """SLURM's backfill is conservative: each waiting job has its place, not the first alone."""
    queue = Controller(FOUR)
    queue.submit(ask(3, 1000))
    first = queue.submit(ask(2, 500))
    second = queue.submit(ask(4, 100))
    late = queue.submit(ask(1, 1550))
    queue.run()
    assert (first.started_s, second.started_s, late.started_s) == (1000, 1500, 1600)


def test_jobs_of_equal_priority_start_in_the_order_of_submission() -> None:
    queue = Controller(FOUR)
    jobs = [queue.submit(ask(4, 100)) for _ in range(5)]
    queue.run()
    assert [job.started_s for job in jobs] == [0, 100, 200, 300, 400]


def test_a_limit_ends_a_job() -> None:
    queue = Controller(FOUR)
    late, good = queue.submit(ask(1, 100, 1000)), queue.submit(ask(1, 100, 60))
    queue.run()
    assert (late.ended, late.ended_s) == (TIMEOUT, 100)
    assert (good.ended, good.ended_s) == (COMPLETED, 60)


def test_an_early_end_moves_all_that_wait_forward() -> None:
    queue = Controller(FOUR)
    queue.submit(ask(4, 1000, 300))
    job = queue.submit(ask(4, 10))
    assert queue.planned_start(4, 10) == 1010
    queue.run()
    assert job.started_s == 300


def test_no_reservation_lies_beyond_the_window() -> None:
    """SLURM's own trap: with a window shorter than the limits, small jobs overtake a large one."""
    queue = Controller(Settings(4, bf_window_s=500, bf_resolution_s=1))
    queue.submit(ask(3, 1000))
    large = queue.submit(ask(4, 500))
    small = queue.submit(ask(1, 2000))
    queue.run()
    assert (small.started_s, large.started_s) == (30, 2030)


def test_only_the_first_jobs_are_tried_for_backfill() -> None:
    queue = Controller(Settings(4, bf_max_job_test=1, bf_resolution_s=1))
    queue.submit(ask(3, 1000))
    queue.submit(ask(4, 500))
    small = queue.submit(ask(1, 10))
    queue.run()
    assert small.started_s == 1500


def test_the_end_of_a_reservation_is_rounded_down_to_the_resolution() -> None:
    queue = Controller(Settings(4, bf_resolution_s=600))
    queue.submit(ask(3, 1000))
    queue.submit(ask(4, 500))  # from 1000 to 1500, kept free to 1200
    assert queue.planned_start(1, 1000) == 0
    assert queue.planned_start(1, 1001) == 1200


def test_partitions_limit_what_is_submitted() -> None:
    queue = Controller(Settings(4, (Partition("work", max_nodes=2, max_time_s=100),)))
    with pytest.raises(ValueError, match="3 nodes"):
        queue.submit(ask(3, 50))
    with pytest.raises(ValueError, match="MaxTime"):
        queue.submit(ask(1, 101))


def test_a_higher_tier_preempts_the_youngest_and_they_are_queued_again() -> None:
    parts = (Partition(), Partition("urgent", tier=10, preempts=True))
    queue = Controller(Settings(4, parts))
    old = queue.submit(ask(2, 1000))
    queue.run(10)
    young = queue.submit(ask(2, 1000))
    queue.run(20)
    urgent = queue.submit(Request(20, 2, 100, 100, partition="urgent"))
    assert (old.starts, urgent.starts, young.started_s) == ([0], [20], None)
    queue.run()
    assert (young.starts, young.ended_s) == ([10, 120], 1120)


def test_a_user_who_used_much_comes_later_with_fair_share() -> None:
    queue = Controller(Settings(4, fairshare_weight=1000))
    queue.submit(Request(0, 4, 1000, 1000, "much"))
    queue.run(1000)
    queue.submit(Request(1000, 4, 100, 100, "third"))
    much = queue.submit(Request(1000, 4, 100, 100, "much"))
    little = queue.submit(Request(1000, 4, 100, 100, "little"))
    queue.run()
    assert (little.started_s, much.started_s) == (1100, 1200)


def test_a_dead_node_takes_its_job_along_and_comes_back() -> None:
    settings = Settings(2, failures_per_node_day=20, repair_s=600, seed=3)
    queue = Controller(settings)
    job = queue.submit(ask(2, 4 * HOUR_S, 2 * HOUR_S))
    queue.run_until_ended(job)
    assert len(job.starts) > 1
    assert job.ended == COMPLETED
    queue.run(queue.now_s + 100)
    assert queue.free + queue.down == 2


def test_what_test_only_says_is_what_was_seen_of_the_real_one() -> None:
    """Of SLURM 22.05: `1 node x 5 min` beside 3 nodes busy and 4 x 20 min, 4 x 30 min waiting.

    It said 50 minutes from now, although backfill would start the job at once; with 2 nodes it said
    50 minutes after the running job's limit.
    """
    queue = Controller(FOUR)
    queue.submit(ask(3, 600))
    queue.submit(ask(4, 1200))
    queue.submit(ask(4, 1800))
    queue.run(4)
    assert queue.start_estimate(1, 300) == 4 + 3000
    assert queue.start_estimate(2, 300) == 600 + 3000
    assert queue.planned_start(1, 300) == 4


RECORDED = {
    "five": (
        *((3, 4, 0.1, 12.14), (1, 5, 0.1, 3.14), (2, 2, 12.39, 22.42), (1, 2, 4.1, 7.13)),
        *((3, 2, 29.42, 39.45), (1, 2, 8.11, 18.14), (1, 1, 13.11, 17.15), (1, 8, 19.12, 29.14)),
        *((2, 8, 40.13, 46.16), (1, 8, 31.12, 34.16), (1, 1, 18.11, 30.15)),
        *((2, 3, 40.13, 44.17), (1, 3, 44.44, 50.48)),
    ),
    "six": (
        *((3, 4, 0.18, 12.37), (1, 1, 0.18, 5.34), (4, 3, 23.71, 33.73), (2, 1, 13.21, 23.25)),
        *((1, 5, 33.77, 45.8), (4, 2, 46.84, 56.88), (2, 5, 57.24, 65.29), (1, 2, 6.2, 16.23)),
        *((1, 3, 34.22, 40.26), (2, 5, 57.24, 67.28), (1, 2, 34.22, 46.27)),
        *((2, 3, 41.23, 44.28), (1, 1, 13.21, 17.25)),
    ),
}
"""Nodes, limit in minutes, start and end in seconds: SLURM 22.05 on four nodes, by
tests/slurm/test_queue_sim.py on 2026-11-28."""


@pytest.mark.parametrize("jobs", RECORDED.values(), ids=RECORDED)
def test_a_real_slurm_started_the_same_jobs_as_soon(
    jobs: tuple[tuple[int, int, float, float], ...],
) -> None:
    requests = [
        Request(at * 0.01, nodes, minutes * 60, end_s - start_s, name=str(at))
        for at, (nodes, minutes, start_s, end_s) in enumerate(jobs)
    ]
    ended = {str(at): end_s for at, (*_, end_s) in enumerate(jobs)}
    seen = starts_with_ends(Settings(4, bf_interval_s=1), requests, ended)
    assert [seen[str(at)] for at in range(len(jobs))] == pytest.approx(
        [start_s for *_, start_s, _ in jobs], abs=1.5
    )


def test_the_nodes_are_never_given_twice() -> None:
    queue = Controller(Settings(64), lublin(64, 0.9, 10, seed=5))
    queue.run()
    changes = [(job.started_s, job.request.nodes) for job in queue.jobs]
    changes += [(job.ended_s, -job.request.nodes) for job in queue.jobs]
    busy = 0
    for _, nodes in sorted(changes, key=lambda change: (change[0] or 0, change[1])):
        busy += nodes
        assert 0 <= busy <= 64
    assert queue.free == 64


def test_two_runs_of_one_seed_are_alike_and_a_fork_goes_on_as_its_original() -> None:
    settings = Settings(32, failures_per_node_day=0.1, seed=2)
    first = Controller(settings, lublin(32, 0.9, 6, seed=6))
    second = Controller(settings, lublin(32, 0.9, 6, seed=6))
    second.run(3 * DAY_S)
    third = second.fork()
    for queue in (first, second, third):
        queue.run()
    starts = [(job.number, job.started_s) for job in first.jobs]
    assert starts == [(job.number, job.started_s) for job in second.jobs]
    assert starts[-len(third.jobs) :] == [(job.number, job.started_s) for job in third.jobs]


def test_ten_thousand_jobs_end() -> None:
    jobs = lublin(128, 0.7, 100, seed=7)
    assert len(jobs) > 7_000
    queue = Controller(Settings(128), jobs)
    queue.run()
    assert len(queue.jobs) == len(jobs)


def test_a_profile_finds_the_first_hole_that_is_long_enough() -> None:
    profile = Profile(0, 1, [(100, 3)])
    profile.take(50, 80, 1)
    assert profile.earliest(1, 50) == 0
    assert profile.earliest(1, 51) == 80
    assert profile.earliest(4, 1) == 100
    assert profile.earliest(5, 1) == float("inf")


# -- workloads


def test_the_model_meets_its_load_and_its_shares() -> None:
    jobs = lublin(128, 0.8, 120, seed=8)
    work_s = sum(job.nodes * job.run_s for job in jobs)
    assert work_s / (128 * 120 * DAY_S) == pytest.approx(0.8, rel=0.02)
    serial = sum(job.nodes == 1 for job in jobs) / len(jobs)
    powers = sum(job.nodes & (job.nodes - 1) == 0 for job in jobs) / len(jobs)
    assert serial == pytest.approx(0.244, abs=0.03)
    assert powers > 0.244 + 0.576 - 0.03
    assert all(before.submit_s <= after.submit_s for before, after in pairwise(jobs))
    assert all(job.run_s <= job.limit_s <= 48 * HOUR_S for job in jobs)


def test_the_model_has_quiet_nights() -> None:
    hours = [int(job.submit_s % DAY_S // HOUR_S) for job in lublin(128, 0.8, 120, seed=9)]
    assert sum(hours.count(hour) for hour in (11, 12, 13)) > 4 * sum(
        hours.count(hour) for hour in (3, 4, 5)
    )


LOG = """\
; Version: 2.2
; MaxNodes: 4
1 100 5 50 16 -1 -1 16 120 -1 1 7 1 1 1 1 -1 -1
2 90 5 60 3 -1 -1 -1 -1 -1 1 8 1 1 1 1 -1 -1
3 200 5 -1 8 -1 -1 8 60 -1 5 7 1 1 1 1 -1 -1 ; cancelled
"""


def test_a_log_in_the_standard_workload_format_is_read() -> None:
    first, second = read_swf(LOG.splitlines(), processors_per_node=4)
    assert first == Request(0, 1, 60, 60, "8", name="4")
    assert second == Request(10, 4, 120, 50, "7", name="3")


def test_a_line_that_is_no_job_names_itself() -> None:
    with pytest.raises(ValueError, match="line 2 of the log: 3 fields"):
        read_swf(["; Version: 2.2", "1 2 3"])
    with pytest.raises(ValueError, match="line 1 of the log: could not convert"):
        read_swf(["x" + " 1" * 17])


def test_recorded_jobs_are_scaled_to_a_load() -> None:
    jobs = [ask(2, 100, at_s=at) for at in range(0, 1000, 100)] + [ask(9, 100, at_s=500)]
    scaled = scaled_to_load(sorted(jobs, key=lambda job: job.submit_s), 4, 0.5)
    assert len(scaled) == 10
    assert scaled[-1].submit_s == pytest.approx(10 * 2 * 100 / (0.5 * 4))


# -- a run cut into jobs


def test_a_run_alone_takes_its_steps_and_its_restarts() -> None:
    training = Training(8, overhead=0, restart_s=360)
    outcome = train(Controller(FOUR), training, lambda _: Shape(4, 3600))
    assert len(outcome.parts) == 3  # 54 minutes of steps in each hour
    assert outcome.result_s == pytest.approx(2 * HOUR_S + 3 * 360 + 2 * REQUEUE_S)
    assert outcome.node_hours == pytest.approx(8 + 3 * 0.1 * 4)


def test_a_run_loses_the_work_since_its_checkpoint_with_a_node() -> None:
    training = Training(20, overhead=0, restart_s=360)
    settings = Settings(4, failures_per_node_day=2, repair_s=60, seed=1)
    outcome = train(Controller(settings), training, lambda _: Shape(2, 24 * HOUR_S))
    useful = sum(
        part.shape.nodes * max(0, part.ended_s - part.started_s - 360 - 900 * (part is not last))
        for last in [outcome.parts[-1]]
        for part in outcome.parts
    )
    assert len(outcome.parts) > 1
    assert useful / HOUR_S == pytest.approx(20)


def test_short_jobs_wait_less_than_long_ones_on_a_busy_cluster() -> None:
    queue = Controller(Settings(64, bf_window_s=4 * DAY_S), lublin(64, 0.9, 25, seed=10))
    rng, waits = random.Random(1), {1: [], 24: []}
    for day in range(5, 20):
        queue.run((day + rng.random()) * DAY_S)
        for hours, seen in waits.items():
            other = queue.fork()
            job = other.submit(ask(4, hours * HOUR_S))
            other.run_until_ended(job)
            seen.append(job.wait_s)
    assert statistics.mean(waits[1]) < 0.7 * statistics.mean(waits[24])
