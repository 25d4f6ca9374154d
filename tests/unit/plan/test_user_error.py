"""An error that comes at every start is the user's; one after hours of work is a crash."""

from __future__ import annotations

import pytest

from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan.decide import LONG_S, SOON_S, is_users, restart_pause_s
from hpctrain.ledger.run import events as ledger
from tests.support.ledger_runs import Story

ERROR = "OSError: [Errno 116] Stale file handle"


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "gpt").submitted("7")


def lived(story, attempt, seconds, *, error="", reason="crashed", following="requeue", **fields):
    """An attempt of a script that tells nothing of itself."""
    story.started(attempt)
    story.t += seconds - 2
    story.add("failure", attempt, summary=error) if error else story.add("note")
    return story.ended(attempt, reason, following, **fields)


def users(story, attempt, *, after_s, error=ERROR):
    events = ledger.read(story.run)
    began = next(e.t for e in events if e.kind == "attempt_started" and e.attempt == attempt)
    return is_users(RunHistory.of(events), attempt, error, began + after_s)


def test_a_script_that_raises_at_once_is_its_users(story):
    story.started(1)

    assert users(story, 1, after_s=2.0)
    assert users(story, 1, after_s=SOON_S - 1)


def test_one_that_tells_nothing_gets_a_second_start_which_shows_whose_error_it_was(story):
    lived(story, 1, 60.0, error="ValueError: x")
    assert not users(story, 1, after_s=SOON_S)
    story.started(2)
    assert users(story, 2, after_s=61.0, error="ValueError: x")
    assert not users(story, 2, after_s=61.0, error="ValueError: another")


def test_one_that_ran_longer_than_another_needed_to_its_first_step_crashed(story):
    story.started(1)
    story.t += 3
    story.add("phase", 1, name="first_step").ended(1, "preempted", "requeue")
    lived(story, 2, 3.0, error=ERROR).started(3)
    assert users(story, 3, after_s=2.0)
    assert not users(story, 3, after_s=9.0)


@pytest.mark.parametrize(
    ("others", "pause_s"),
    [([], 0), ([ERROR], 1), ([ERROR] * 3, 4), ([ERROR] * 40, 60), ([ERROR, "CUDA error: x"], 0)],
)
def test_pauses_between_restarts_of_one_cause_grow(story, others, pause_s):
    for number, error in enumerate([*others, ERROR], start=1):
        lived(story, number, 9.0, error=error, following="restart")
    history = RunHistory.of(ledger.read(story.run))
    assert restart_pause_s(history, len(others) + 1, 60.0) == pause_s
    assert restart_pause_s(history, len(others) + 1, 0.0) == 0


def test_a_script_that_raises_after_hours_crashed(story):
    story.started(1)

    assert not users(story, 1, after_s=LONG_S)
    assert not users(story, 1, after_s=7200.0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("phase", {"name": "first_step"}), ("saved", {"step": 3}), ("steps", {"first": 1, "last": 2})],
)
def test_one_that_has_done_a_step_crashed(story, kind, fields):
    story.started(1).add(kind, 1, **fields)

    assert not users(story, 1, after_s=2.0)


@pytest.mark.parametrize("kind", ["phase", "restored"])
def test_a_restore_is_no_step(story, kind):
    story.started(1).add(kind, 1, name="initialised", step=0)

    assert users(story, 1, after_s=2.0)


def test_after_an_attempt_that_worked_for_long_a_start_that_fails_is_tried_again(story):
    lived(story, 1, 3600.0, reason="preempted").started(2)

    assert not users(story, 2, after_s=2.0)


def test_after_attempts_that_never_came_to_work_it_is_still_the_users(story):
    lived(story, 1, 20.0, reason="preempted")
    lived(story, 2, 20.0, reason="node_failed").started(3)

    assert users(story, 3, after_s=2.0)


def test_the_same_error_at_two_starts_in_a_row_is_the_users(story):
    lived(story, 1, 3600.0, reason="preempted")
    lived(story, 2, 5.0, error=ERROR).started(3)

    assert users(story, 3, after_s=2.0)
    assert not users(story, 3, after_s=2.0, error="RuntimeError: another")


def worked(story, attempt):
    return story.started(attempt).add("phase", attempt, name="first_step")


def at_step(story, attempt, step, error=ERROR):
    worked(story, attempt).add("failure", attempt, summary=error)
    return story.ended(attempt, "crashed", "requeue", step=step)


@pytest.mark.parametrize(
    ("step", "error", "is_users_now"),
    [(32, ERROR, True), (33, ERROR, False), (32, "ValueError: x", False), (None, ERROR, False)],
)
def test_the_same_error_at_the_same_step_twice_in_a_row_is_the_users(
    story, step, error, is_users_now
):
    worked(at_step(story, 1, 32), 2)
    history = RunHistory.of(ledger.read(story.run))

    assert is_users(history, 2, error, story.t + 9, step) is is_users_now


def test_between_them_another_end_or_a_resume_begins_the_count_anew(story):
    worked(at_step(story, 1, 32), 2).ended(2, "preempted", "requeue", step=40)
    worked(story, 3)
    assert not is_users(RunHistory.of(ledger.read(story.run)), 3, ERROR, story.t + 9, 32)

    worked(at_step(story, 4, 32).submitted("8"), 5)
    assert not is_users(RunHistory.of(ledger.read(story.run)), 5, ERROR, story.t + 9, 32)


def test_the_same_error_after_hours_of_work_each_time_is_a_crash(story):
    lived(story, 1, 3600.0, error=ERROR).started(2)

    assert not users(story, 2, after_s=3600.0)
    assert not users(story, 2, after_s=2.0), "it ran for an hour before"


def test_who_resumes_by_hand_begins_anew(story):
    lived(story, 1, 3600.0, error=ERROR).submitted("8", "tok-2").started(2, "8")

    assert users(story, 2, after_s=2.0)


@pytest.mark.parametrize(("told", "expected"), [({}, True), ({"heard": 5.0}, True)])
def test_the_end_that_a_successor_wrote_down_late_is_no_long_life(story, told, expected):
    lived(story, 1, 9000.0, reason="unknown", by="successor", **told).started(2)

    assert users(story, 2, after_s=2.0) is expected


def test_what_a_successor_heard_of_it_counts(story):
    began = story.t + 1
    lived(story, 1, 9000.0, reason="unknown", by="successor", heard=began + LONG_S).started(2)

    assert not users(story, 2, after_s=2.0)


def test_an_attempt_of_which_nothing_is_known_proves_nothing(story):
    assert is_users(RunHistory(), 4, ERROR, 1e9)
