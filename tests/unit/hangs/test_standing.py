"""Ranks that stand for too long are known; whoever moves, or is new, or may take long, is not."""

from __future__ import annotations

import math

import pytest

from hpctrain.node.control.heartbeat import HeartbeatSeen
from hpctrain.node.hangs.standing import (
    HangLimits,
    Stand,
    Standing,
    in_words,
    unmoved,
)

LIMITS = HangLimits(60.0, first_step_s=1800.0, save_s=600.0)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def standing(clock):
    return Standing(LIMITS, clock)


def heartbeat(mark=1, phase="step", rank=0, *, is_first=False, limit_s=None, step=3):
    return HeartbeatSeen(rank, 1, step, phase, is_first, limit_s, mark, 0.0)


def stays(standing, clock, seconds, one):
    """The last look at a heartbeat that does not change for so long."""
    standing.look([one])
    for _ in range(round(seconds / 0.5)):
        clock.now += 0.5
        (stand,) = standing.look([one])
    return stand


def test_a_rank_stands_from_its_last_change_on(standing, clock):
    stand = stays(standing, clock, 59.5, heartbeat())
    assert (stand.stood_s, stand.limit_s, stand.is_over) == (59.5, 60.0, False)
    clock.now += 0.5
    assert standing.look([heartbeat()])[0].is_over
    clock.now += 0.5
    assert standing.look([heartbeat(mark=2)])[0].stood_s == 0


@pytest.mark.parametrize(
    ("one", "limit_s"),
    [
        (heartbeat(), 60.0),
        (heartbeat(is_first=True), 1800.0),
        (heartbeat(phase="save", is_first=True), 1800.0),
        (heartbeat(phase="save"), 600.0),
        (heartbeat(phase="evaluation", limit_s=90.0), 90.0),
        (heartbeat(phase="evaluation", limit_s=0.5, is_first=True), 0.5),
        (heartbeat(phase="end"), math.inf),
        (heartbeat(phase=""), math.inf),
    ],
)
def test_each_phase_has_its_limit(standing, one, limit_s):
    assert standing.look([one])[0].limit_s == limit_s


def test_a_phase_may_take_five_times_its_longest_stay_that_ended(standing, clock):
    assert stays(standing, clock, 20, heartbeat(1, "validate")).limit_s == 60.0
    assert standing.look([heartbeat(2, "validate")])[0].limit_s == 100.0
    assert standing.look([heartbeat(3, "data")])[0].limit_s == 60.0


def test_a_short_stay_does_not_make_a_long_one_forgotten(standing, clock):
    stays(standing, clock, 20, heartbeat(1, "validate"))
    stays(standing, clock, 1, heartbeat(2, "validate"))
    assert standing.look([heartbeat(3, "validate")])[0].limit_s == 100.0


def test_what_was_before_the_first_step_is_over_teaches_nothing(standing, clock):
    stays(standing, clock, 500, heartbeat(1, is_first=True))
    assert standing.look([heartbeat(2)])[0].limit_s == 60.0


def test_time_in_which_the_whole_node_stood_does_not_count(standing, clock):
    standing.look([heartbeat()])
    clock.now += 3600
    assert standing.look([heartbeat()])[0].stood_s == 2.0


def stand(rank, stood_s=70.0, step=5, limit_s=60.0):
    return Stand(rank, step, "step", stood_s, limit_s)


@pytest.mark.parametrize(
    ("stands", "returned", "expected"),
    [
        ([stand(0), stand(1)], set(), ("all", [0, 1])),
        ([stand(0), stand(1, 10.0)], set(), ("", [0])),
        ([stand(0), stand(1, 10.0)], {1}, ("all", [0])),
        ([stand(0), stand(1, 10.0, step=7)], set(), ("behind", [0])),
        ([stand(0), stand(1, 10.0, step=6)], set(), ("", [0])),
        ([stand(0), stand(1, 900.0, limit_s=math.inf)], set(), ("", [0])),
        ([stand(0, 10.0), stand(1, 10.0, step=9)], set(), ("", [])),
        ([], set(), ("", [])),
    ],
)
def test_all_must_stand_or_the_others_be_steps_ahead(stands, returned, expected):
    how, who = unmoved(stands, returned)
    assert (how, [one.rank for one in who]) == expected


def test_it_is_said_in_words():
    assert in_words([stand(0), stand(1, 130.0, step=4)]) == "step 4, in step, for 2m10s"
