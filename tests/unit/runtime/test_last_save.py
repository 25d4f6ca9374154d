"""The save on the way out, while another one is being written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.train.runtime.saves import LAST_SAVE_SAFETY, LastSave, last_save

seconds = st.floats(0, 1e5)
left = st.one_of(st.none(), seconds)


def fits(left_s, needed_s):
    return left_s is None or LAST_SAVE_SAFETY * needed_s <= left_s


@given(left, seconds, seconds)
def test_what_is_begun_is_done_in_time_by_its_estimate_or_it_is_the_one_in_flight(
    left_s, flight_left_s, fresh_s
):
    answer = last_save(left_s, flight_left_s=flight_left_s, fresh_s=fresh_s)

    both, fresh = fits(left_s, flight_left_s + fresh_s), fits(left_s, fresh_s)
    assert (answer is LastSave.BOTH) == both
    assert (answer is LastSave.FRESH) == (fresh and not both)
    assert (answer is LastSave.FINISH) == (not fresh and not both)


@given(seconds, seconds)
def test_where_nobody_says_when_the_end_comes_nothing_is_given_up(flight_left_s, fresh_s):
    assert last_save(None, flight_left_s=flight_left_s, fresh_s=fresh_s) is LastSave.BOTH


@pytest.mark.parametrize(
    ("left_s", "flight_left_s", "fresh_s", "answer"),
    [
        (30, 10, 10, LastSave.BOTH),
        (26, 10, 10, LastSave.BOTH),  # 1.3 times 20: to the second
        (25, 10, 10, LastSave.FRESH),
        (13, 10, 10, LastSave.FRESH),
        (12, 10, 10, LastSave.FINISH),  # ten would do if the estimate were right
        (5, 100, 10, LastSave.FINISH),  # neither is likely: the one that is further on
        (0, 10, 10, LastSave.FINISH),
        (60, 100, 10, LastSave.FRESH),  # one that hangs must not cost the newest steps
        (60, 1, 100, LastSave.FINISH),
    ],
)
def test_the_fewest_steps_are_lost(left_s, flight_left_s, fresh_s, answer):
    assert last_save(left_s, flight_left_s=flight_left_s, fresh_s=fresh_s) is answer


@given(seconds, seconds, seconds, seconds)
def test_more_time_never_makes_it_save_less(left_s, more_s, flight_left_s, fresh_s):
    kept = [LastSave.FINISH, LastSave.FRESH, LastSave.BOTH]

    now = last_save(left_s, flight_left_s=flight_left_s, fresh_s=fresh_s)
    later = last_save(left_s + more_s, flight_left_s=flight_left_s, fresh_s=fresh_s)

    assert kept.index(later) >= kept.index(now)
