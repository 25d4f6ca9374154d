"""A test waits as long as it takes, and says what for where that does not come."""

from __future__ import annotations

import re

import pytest

from tests.support import patience


def test_what_was_reached_is_returned_at_the_first_look_that_finds_it():
    answers = iter([None, 0, "", "here", "too late"])

    assert patience.until(lambda: next(answers)) == "here"


def test_what_cannot_come_any_more_is_looked_for_a_last_time():
    """Who was awaited may have done it and ended between two looks."""
    done, looks = [], []

    def alive():
        done.append("written, then ended")
        return False

    assert patience.until(lambda: done, alive=alive)
    with pytest.raises(AssertionError, match="did not come") as caught:
        patience.until(lambda: looks.append(1), "a file", alive=lambda: False)

    assert looks == [1]
    assert caught.value.__notes__ == ["waited for: a file"]


def test_a_poll_ends_with_what_it_waited_for(monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)

    with pytest.raises(AssertionError) as caught:
        patience.until(lambda: False, lambda: {"log": "stuck"})

    assert caught.value.__notes__ == ["waited for: {'log': 'stuck'}"]


def test_a_time_out_of_pytests_says_what_was_waited_for():
    def interrupted():
        pytest.fail("Timeout (>240.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception) as caught:
        patience.until(interrupted, "the end of the run")

    assert re.search("the end of the run", caught.value.__notes__[0])
