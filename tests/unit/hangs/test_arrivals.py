"""When ranks came to their collectives says what each took by itself, where they waited."""

from __future__ import annotations

import random
import statistics

import pytest

from hpctrain.node.hangs.evidence import Collective
from hpctrain.node.hangs.outliers import calls_of, own_work, period_of

TRIP_S = 0.001


def job(steps, work, *, each=1, runs_ahead=False):
    """Moments at which ranks come to collectives, `each` of them a step.

    Args:
        steps: How many.
        work: Seconds of a rank before each of its collectives, by rank and step.
        each: Collectives of a step.
        runs_ahead: Only the last of a step is waited for.
    """
    ranks = range(len(work(0)))
    now, arrivals = [0.0 for _ in ranks], [[] for _ in ranks]
    for step in range(steps):
        for number in range(each):
            for rank in ranks:
                now[rank] += work(step)[rank]
                arrivals[rank].append(now[rank])
            if not runs_ahead or number == each - 1:
                now = [max(now) + TRIP_S for _ in ranks]
    return arrivals


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["FSDP waits", "DDP runs ahead"])
@pytest.mark.parametrize("each", [1, 3, 8])
@pytest.mark.parametrize("by", [0.0, 0.04, 0.2, 0.8])
def test_the_slow_rank_s_work_is_longer_by_what_it_is_slower(each, runs_ahead, by):
    noise = random.Random(each)

    def work(_step):
        return [noise.gauss(0.1, 0.004) * (1 + by * (rank == 2)) / each for rank in range(4)]

    steps = own_work(job(200, work, each=each, runs_ahead=runs_ahead), each)

    assert len(steps) >= 150
    assert all(step.step_s > 0.08 for step in steps), "a part of a step is none"
    usual, slow = (statistics.fmean(step.seconds[rank] for step in steps) for rank in (0, 2))
    assert slow - usual == pytest.approx(0.1 * by, abs=0.003)
    assert statistics.fmean(step.step_s for step in steps) == pytest.approx(slow, abs=0.01)


def test_ranks_that_never_wait_for_each_other_say_nothing():
    arrivals = [[0.1 * n for n in range(60)], [5 + 0.1 * n for n in range(60)]]
    assert own_work(arrivals, 1) == []
    assert own_work([], 1) == own_work([[], []], 1) == []


def test_what_one_rank_has_not_come_to_counts_for_none():
    noise = random.Random(1)
    long, short = job(30, lambda _: (noise.gauss(0.1, 0.01), noise.gauss(0.1, 0.01)))
    assert len(own_work([long, short[:10]], 1)) == len(own_work([long[:10], short[:10]], 1)) > 5


@pytest.mark.parametrize(
    ("signatures", "period"),
    [
        ("a" * 40, 1),
        ("abc" * 20, 3),
        ("aab" * 20, 3),
        ("ab" * 30 + "x" + "ab" * 30, 2),
        ("abcdefghijklmnopqrstuvwxyz", 0),
        ("", 0),
        ("a", 0),
    ],
)
def test_a_step_is_what_comes_again_and_again(signatures, period):
    assert period_of(signatures) == period


def test_what_was_called_last_in_the_busiest_group_of_all_is_taken_without_a_gap():
    def calls(group, *numbers):
        return [Collective(group, number, "all_reduce", (), ()) for number in numbers]

    heard = calls("part", *range(50)) + calls("0", 1, 2, 5, 6, 7) + calls("1", 1, 2)
    assert [call.number for call in calls_of(heard, {"0", "1"})] == [5, 6, 7]
    assert calls_of(heard, {"none"}) == calls_of([], {"0"}) == []
