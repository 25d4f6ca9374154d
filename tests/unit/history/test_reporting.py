"""What a program tells of itself, and so what can be known: also of one that tells nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.progress import NO_STEP, StepsLost, reported, steps_lost
from hpctrain.ledger.history.run_history import RunHistory

if TYPE_CHECKING:
    from tests.support.ledger_runs import Story


def lost(story: Story) -> StepsLost:
    history = RunHistory.read(story.run)
    return steps_lost(attempts(history), reported(history))


def silent(story: Story, *numbers: int, seconds: float = 30, reason: str = "preempted") -> Story:
    """Attempts that ran and told nothing."""
    for number in numbers:
        story.started(number)
        story.t += seconds
        story.ended(number, reason, "requeue").add("requeued", number, by="agent")
    return story


def test_nothing_is_said_of_a_run_that_never_began(story):
    assert reported(RunHistory.read(story.run)).not_known == ""
    assert lost(story) == StepsLost(0)


def test_what_a_program_that_tells_no_step_lost_is_not_known(story):
    silent(story, 1, 2)

    told = reported(RunHistory.read(story.run))

    assert (told.is_silent, told.silent, told.saves) == (True, (1, 2), False)
    assert lost(story) == StepsLost(None, NO_STEP)


def test_one_that_calls_init_and_tells_no_step_is_no_better_known(story):
    story.started(1).add("phase", 1, name="initialised", device="cpu")
    story.ended(1, "preempted", "requeue")
    assert lost(story) == StepsLost(None, NO_STEP)


def test_a_start_in_which_no_agent_came_is_nobodys_silence(story):
    story.started(1, nodes=(), by="batch").ended(1, "node_failed", "requeue")
    assert not reported(RunHistory.read(story.run)).is_silent


def test_it_is_worth_a_line_when_it_has_run_for_a_minute_or_returned(story):
    story.started(1)
    history = RunHistory.read(story.run)
    assert not reported(history, now=story.t + 59).is_long
    assert reported(history, now=story.t + 61).is_long

    silent(story, 2, seconds=0, reason="completed")
    assert reported(RunHistory.read(story.run)).is_long


@pytest.mark.parametrize(
    ("seconds", "reason", "counts"),
    [(1, "preempted", False), (400, "preempted", True), (1, "completed", True)],
)
def test_of_a_run_that_tells_only_what_could_have_told_is_silent(story, seconds, reason, counts):
    """An attempt that was taken away while it started has lost nothing."""
    story.started(1).restored(1)
    story.t += 10
    story.add("phase", 1, name="first_step").steps(1, 1, 50).saved(1, 50)
    story.ended(1, "preempted", "requeue")
    silent(story, 2, seconds=seconds, reason=reason)

    told = reported(RunHistory.read(story.run))

    assert (told.tells, told.saves, told.silent) == (True, True, (2,) if counts else ())
    assert lost(story) == StepsLost(0, "attempt 2 reported no step" if counts else "")


def test_an_attempt_that_came_to_its_end_lost_nothing_though_it_saved_nothing_of_ours(story):
    story.started(1).restored(1).steps(1, 1, 329).add("done", 1, step=329)
    story.ended(1, "completed", "stop")
    assert lost(story) == StepsLost(0)


def test_one_that_goes_on_from_its_own_checkpoint_lost_what_lies_between(story):
    story.started(1).restored(1).steps(1, 1, 50).ended(1, "preempted", "requeue")
    story.started(2).add("restored", 2, step=42, checkpoint=None).steps(2, 43, 60)
    assert lost(story).steps == 8


def test_the_heartbeat_of_the_newest_attempt_is_a_word_of_its_steps(story):
    story.started(1)
    told = reported(RunHistory.read(story.run)).heard_of(1)
    assert (told.tells, told.is_silent, told.not_known) == (True, False, "")
