"""`--wait` looks on until the first step, ends with the job, and never touches it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hpctrain.cli import progress
from hpctrain.cli.main import main
from hpctrain.core.base.records import JobInfo
from hpctrain.errors import EXIT_CODES
from hpctrain.observe.status import reader
from hpctrain.observe.status.status import Answer
from tests.support.ledger_runs import Story


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "runs" / "lm").submitted()


@pytest.fixture
def world(monkeypatch, hands):
    """What happens while the command sleeps, one thing each time, and what the scheduler says."""
    at = SimpleNamespace(job=JobInfo("17", "PENDING", alive=True), happens=[], asked=0)

    def sleep(_):
        hands.advance(5.0)
        at.happens.pop(0)()

    def ask(*_):
        at.asked += 1
        return Answer(at.job)

    monkeypatch.setattr(reader, "ask", ask)
    hands.set_wall(1_763_800_000.0)
    hands.on_sleep = sleep
    return at


def conclude(story, facts=None):
    return progress.conclude(story.run, story.run.root.parent, facts, wait=True)


def job(world, state, **fields):
    def change():
        world.job = JobInfo("17", state, alive=state in {"PENDING", "RUNNING"}, **fields)

    return change


def step(story, attempt=1):
    return lambda: story.add("phase", attempt, name="first_step")


def test_it_ends_with_the_first_step_and_says_how_long_it_took(story, world, capsys):
    world.job = JobInfo("17", "PENDING", alive=True, reason="Resources")
    world.happens = [job(world, "RUNNING"), lambda: story.started(1), step(story)]

    assert conclude(story) == 0

    out, err = capsys.readouterr()
    assert out == "first step   3 s after the submission, 2 s in the queue (attempt 1)\n"
    assert err.startswith("hpctrain: job 17 waits in the queue (Resources)")


def test_a_failed_attempt_that_comes_back_is_waited_for(story, world, capsys):
    world.job = JobInfo("17", "RUNNING", alive=True)
    world.happens = [
        lambda: story.started(1).ended(1, "node_fail", "requeue"),
        lambda: story.started(2),
        step(story, 2),
    ]

    assert conclude(story) == 0
    assert "(attempt 2)" in capsys.readouterr().out


def test_a_step_of_an_earlier_submission_does_not_count(story, world):
    step(story.started(1))()
    story.ended(1, "preempted", "none").submitted(job_id="17", token="tok-2")
    world.job = JobInfo("17", "RUNNING", alive=True)
    world.happens = [lambda: story.started(2), step(story, 2)]

    assert conclude(story) == 0
    assert world.happens == []


@pytest.mark.parametrize(
    ("state", "said"),
    [("FAILED", "failed"), ("CANCELLED", "cancelled"), ("NODE_FAIL", "failed")],
)
def test_it_ends_with_the_job(story, world, capsys, state, said):
    world.happens = [job(world, state)]

    assert conclude(story) == 1
    assert f"no step      the run is {said}" in capsys.readouterr().out


def test_a_run_that_is_done_without_a_word_of_steps_is_no_failure(story, world):
    world.happens = [lambda: story.started(1).add("done", 1, step=4)]

    assert conclude(story) == 0


def test_ctrl_c_leaves_the_job_alone_and_says_so(story, world, capsys):
    def interrupt():
        raise KeyboardInterrupt

    world.happens = [interrupt]

    code = conclude(story, {"job_id": "17"})

    assert code == 130
    assert code in EXIT_CODES
    out, err = capsys.readouterr()
    assert "the job of lm continues; `hpctrain status lm" in err
    told = json.loads(out)
    assert told["job_id"] == "17"
    assert (told["waited"]["interrupted"], told["waited"]["first_step"]) == (True, False)
    assert [e for e in story.run.events.read_text().splitlines() if "cancel" in e] == []


def test_json_is_one_object_at_the_end(story, world, capsys):
    world.happens = [lambda: story.started(1), step(story)]

    assert conclude(story, {"job_id": "17"}) == 0

    assert json.loads(capsys.readouterr().out) == {
        "job_id": "17",
        "waited": {
            "first_step": True,
            "state": "running",
            "attempt": 1,
            "queued_s": 2.0,
            "seconds": 3.0,
            "interrupted": False,
        },
    }


def test_a_scheduler_is_asked_seldom_where_the_queue_is_long(story, world):
    world.happens = [*[lambda: None] * 719, step(story)]  # an hour

    conclude(story)

    assert world.asked < 3600 / 30 + 70


@pytest.mark.parametrize(
    "words", [["submit", "--dry-run"], ["submit", "--no-submit"], ["resume", "--dry-run"]]
)
def test_there_must_be_a_job_to_wait_for(words, capsys):
    assert main([*words, "--wait"]) == 2
    assert "--wait waits for a job" in capsys.readouterr().err
