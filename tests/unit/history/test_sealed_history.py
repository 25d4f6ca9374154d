"""What the ledger of a program with its own checkpoints tells: lost steps, progress, crashes."""

from __future__ import annotations

import pytest

from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.progress import reported, steps_lost
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan.decide import LONG_S, attempts_without_progress, is_users
from hpctrain.ledger.plan.interval import costs
from hpctrain.ledger.run import events as ledger
from tests.support.ledger_runs import Story


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "nano").submitted()


def history(story):
    return RunHistory.of(ledger.read(story.run))


def sealed(story, attempt, step, **fields):
    path = f"/out/ckpt-{step}.pt"
    return story.add("sealed", attempt, step=step, path=path, bytes=7, by="agent", **fields)


def resumed(story, attempt, step, path="/out/ckpt.pt"):
    return story.add("resume_chosen", attempt, step=step, path=path, name="seal-000001")


def test_steps_that_were_told_beyond_the_one_that_was_taken_are_lost(story):
    story.started(1).steps(1, 1, 73)
    sealed(story, 1, 50)
    story.ended(1, "preempted", "requeue")
    story.started(2)
    resumed(story, 2, 50)

    first, second = attempts(history(story))

    assert (first.steps_lost, second.first_step) == (23, 50)
    assert second.from_checkpoint == "/out/ckpt.pt"


def test_of_a_program_that_tells_no_step_nobody_knows_what_was_lost(story):
    story.started(1)
    sealed(story, 1, 50)
    story.ended(1, "preempted", "requeue")
    story.started(2)
    resumed(story, 2, 50)
    now = history(story)

    assert attempts(now)[0].steps_lost is None
    assert steps_lost(attempts(now), reported(now)).steps is None


def test_where_the_step_of_what_was_taken_is_not_known_nobody_knows_what_was_lost(story):
    story.started(1).steps(1, 1, 73)
    story.add("sealed", 1, path="/out/ckpt.pt", bytes=7, by="agent")
    story.ended(1, "preempted", "requeue")
    story.started(2)
    resumed(story, 2, None)
    story.steps(2, 51, 90).ended(2, "preempted", "requeue")
    story.started(3)
    resumed(story, 3, 80)

    assert [one.steps_lost for one in attempts(history(story))] == [None, 10, None]


def test_the_newest_is_known_and_one_that_was_gone_back_behind_is_not(story):
    story.started(1)
    sealed(story, 1, 50)
    sealed(story, 1, 100)
    assert history(story).kept_save[0] == 100
    assert history(story).sealed_path == "/out/ckpt-100.pt"
    story.started(2)
    resumed(story, 2, 50, "/out/ckpt-50.pt")

    assert history(story).kept_save[0] == 50
    assert history(story).sealed_path == "/out/ckpt-50.pt"


def test_one_that_has_sealed_came_to_its_work_so_an_error_is_a_crash(story):
    story.started(1)
    assert is_users(history(story), 1, "OSError: stale", story.t + 5)
    sealed(story, 1, 50)

    assert not is_users(history(story), 1, "OSError: stale", story.t + 5)


@pytest.mark.parametrize("step", [50, None])
def test_attempts_that_had_time_and_sealed_nothing_new_made_no_progress(story, step):
    story.started(1)
    sealed(story, 1, step)
    story.ended(1, "crashed", "requeue")
    for number in (2, 3):
        story.started(number)
        resumed(story, number, step)
        story.t += LONG_S
        story.ended(number, "crashed", "requeue")
    assert attempts_without_progress(history(story)) == 2
    story.started(4)
    resumed(story, 4, step)
    story.ended(4, "preempted", "requeue")
    assert attempts_without_progress(history(story)) == 2, "it was taken away at once"
    story.started(5)
    sealed(story, 5, step and step + 1)
    assert attempts_without_progress(history(story)) == 0


def test_what_a_seal_takes_says_nothing_of_our_own_saves(story):
    story.started(1)
    sealed(story, 1, 50, seconds=100.0)

    assert costs(history(story)) is None
