"""Which checkpoints are due to be evaluated, by the ledger alone."""

from __future__ import annotations

import json

import pytest

from hpctrain.ledger.history.evaluations import due, waiting
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from tests.support.ledger_runs import Story


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "gpt").submitted().started(1)


def history(story):
    return RunHistory.of(ledger.read(story.run))


def saved(story, *steps, attempt=1):
    for step in steps:
        story.saved(attempt, step)
    return history(story)


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [10, 20, 30, 40, 50]), (2, [20, 40]), (3, [30]), (6, []), (0, [])]
)
def test_every_nth_that_was_saved_is_due(story, every, steps):
    assert due(saved(story, 10, 20, 30, 40, 50), every, last=True) == steps


def test_a_step_that_is_saved_again_is_counted_once(story):
    saved(story, 10, 20)
    story.ended(1, "preempted", "requeue").started(2).restored(2, 10)

    assert due(saved(story, 20, 30, 40, attempt=2), 2, last=False) == [20, 40]


def test_what_was_counted_before_a_preemption_counts_after_it(story):
    saved(story, 10, 20)
    story.ended(1, "preempted", "requeue").started(2).restored(2, 20)

    assert due(saved(story, 30, attempt=2), 3, last=False) == [30]


def test_steps_count_in_the_order_in_which_they_were_first_saved(story):
    saved(story, 10, 20, 30)
    story.ended(1, "preempted", "requeue").started(2).restored(2, 10)

    assert due(saved(story, 15, 20, 30, attempt=2), 4, last=False) == [15]


def test_the_last_is_due_once_the_run_is_done(story):
    saved(story, 10, 20, 30, 40)
    assert due(history(story), 3, last=True) == [30]
    story.add("done", 1, step=40)

    assert due(history(story), 3, last=True) == [30, 40]
    assert due(history(story), 0, last=True) == [40]
    assert due(history(story), 3, last=False) == [30]


def test_a_run_that_has_saved_nothing_has_nothing_due(story):
    story.add("done", 1, step=40)

    assert due(history(story), 1, last=True) == []


def test_sealed_checkpoints_saves_that_failed_and_imports_are_not_due(story):
    story.add("sealed", 1, step=10, path="/out/a").add("save_failed", 1, step=20)
    story.add("imported", step=30)

    assert due(history(story), 1, last=True) == []


def test_what_was_asked_for_is_due_too(story):
    saved(story, 10, 20, 30)
    story.add("evaluation_asked", step=10)

    assert due(history(story), 3, last=True) == [10, 30]


def test_what_is_due_waits_until_something_is_said_of_it(story):
    saved(story, 10, 20, 30)
    story.add("evaluated", step=20, run="gpt-eval-20", metrics={"loss": 2.5})
    story.add("evaluated", step=30, run="gpt-eval-30", why="the evaluation crashed")

    assert waiting(history(story), 1, last=True) == [10]
    assert history(story).evaluations[20].metrics == {"loss": 2.5}
    assert history(story).evaluations[30].why == "the evaluation crashed"


def test_the_last_word_on_a_step_counts(story):
    saved(story, 10)
    story.add("evaluated", step=10, run="gpt-eval-10", why="it crashed")
    story.add("evaluated", step=10, run="gpt-eval-10", metrics={"loss": 2.5})

    assert (history(story).evaluations[10].why, waiting(history(story), 1, last=True)) == ("", [])


def test_a_checkpoint_that_was_gone_and_is_saved_anew_is_evaluated_after_all(story):
    saved(story, 10)
    story.add("evaluated", step=10, why="step 10 is no longer there")
    assert waiting(history(story), 1, last=True) == []

    assert waiting(saved(story, 10), 1, last=True) == [10]


def test_one_that_was_evaluated_is_not_evaluated_again_when_it_is_saved_anew(story):
    saved(story, 10)
    story.add("evaluated", step=10, run="gpt-eval-10", metrics={"loss": 2.5})

    assert waiting(saved(story, 10), 1, last=True) == []


def test_metrics_are_finite_numbers_by_name_whatever_the_ledger_says():
    line = {
        "t": 1.0,
        "kind": "evaluated",
        "step": 10,
        "metrics": {"a": 1, "b": 2.5, "c": "nan", "d": None, "e": True, "f": 1e301, "g": [1]},
    }

    assert ledger.parse(json.dumps(line).encode()).fact.metrics == {"a": 1, "b": 2.5}
    assert ledger.parse(json.dumps(line | {"metrics": [1]}).encode()).fact.metrics == {}
    assert ledger.parse(json.dumps(line | {"step": -1}).encode()) is None
