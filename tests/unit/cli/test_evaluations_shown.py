"""Where a run's evaluations are seen: status, checkpoints, events; as text and as JSON."""

from __future__ import annotations

import json

import pytest

from hpctrain.checkpoint.store import commit
from hpctrain.cli.main import main
from hpctrain.core.base.text import LABEL
from hpctrain.core.drawing import drawn
from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import load_spec
from hpctrain.launch import evaluations
from hpctrain.ledger.run.layout import RunDir
from hpctrain.observe.status.event_lines import LAST
from hpctrain.observe.status.reader import StatusReader
from hpctrain.observe.status.screen import StatusScreen
from tests.support import checkpoints
from tests.support.ledger_runs import Story


@pytest.fixture
def story(runs):
    """Seven saves, of which each is due; two wait, one runs, one failed."""
    story = Story(runs / "gpt").submitted("local-17").started(1, "local-17").restored(1)
    spec = load_spec(story.run.spec)
    wanted = {"evaluate.script": "eval.py", "checkpoint.best_metric": "eval.loss"}
    spec.settings = replaced(spec.settings, wanted)
    spec.dump(story.run.spec)
    for step in range(100, 900, 100):
        story.saved(1, step)
    story.ended(1, "completed", "stop").add("done", 1, step=800)
    for step, loss in ((100, 2.5), (200, 2.25), (300, 2.75), (400, 2.5)):
        evaluated(story, step, loss=loss, accuracy=0.5)
    evaluated(story, 500, why="failed: ValueError: no such split")
    Story(story.run.evaluation(600).root).submitted("local-18").started(1, "local-18")
    return story


def evaluated(story, step, why="", **metrics):
    run = story.run.evaluation(step).name
    return story.add("evaluated", step=step, run=run, metrics=metrics, why=why)


def lines_of(run, runs, width=80):
    text = drawn(StatusScreen(StatusReader(runs).look(run)), width)
    labels = ("evaluat", "eval failed", " " * LABEL)
    return [line.rstrip() for line in text.splitlines() if line.startswith(labels)]


def test_status_has_the_last_ones_the_best_and_what_is_under_way(story, runs):
    shown = lines_of(story.run, runs)

    assert shown[:5] == [
        "evaluated   step 400, loss 2.5, accuracy 0.5",
        "            step 300, loss 2.75, accuracy 0.5",
        "            step 200 (best), loss 2.25, accuracy 0.5",
        "            ... 1 more (--json shows all)",
        "evaluating  running step 600; waiting steps 700, 800",
    ]
    failed = " ".join(" ".join(line.split()) for line in shown[5:7])
    assert failed == (
        "eval failed step 500 (hpctrain logs gpt --evaluation 500): "
        "failed: ValueError: no such split"
    )


def test_a_best_one_that_is_long_ago_is_shown_too(story, runs):
    for step in (600, 700, 800):
        evaluated(story, step, loss=3.0)

    shown = lines_of(story.run, runs)

    assert [line[LABEL:].split(",")[0] for line in shown[:LAST + 1]] == [
        "step 800", "step 700", "step 600", "step 200 (best)"
    ]  # fmt: skip
    assert "waiting" not in "".join(shown)


def test_json_has_all_of_them(story, capsys):
    assert main(["status", "gpt", "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)["evaluations"]
    assert [row["step"] for row in rows] == [800, 700, 600, 500, 400, 300, 200, 100]
    assert [row["state"] for row in rows[:5]] == [
        "waiting", "waiting", "running", "failed", "evaluated"
    ]  # fmt: skip
    assert rows[6] == {
        "step": 200,
        "state": "evaluated",
        "run": "gpt-eval-200",
        "metrics": {"loss": 2.25, "accuracy": 0.5},
        "why": "",
        "is_best": True,
    }
    assert [row["step"] for row in rows if row["is_best"]] == [200]


def test_evaluations_of_another_user_are_shown_as_far_as_the_ledger_goes(story, runs, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(evaluations, "children", refuse)

    shown = lines_of(story.run, runs)

    assert shown[0] == "evaluated   step 400, loss 2.5, accuracy 0.5"
    assert shown[4] == "evaluating  waiting or running steps 600, 700, 800"


def test_a_run_without_evaluations_has_no_line_of_them(runs):
    story = Story(runs / "quiet").submitted("local-17").started(1, "local-17").saved(1, 100)

    assert "eval" not in "".join(lines_of(story.run, runs))


def test_the_list_of_checkpoints_has_what_was_found(story, capsys):
    attempt = checkpoints.next_attempt(story.run)
    for step in (200, 600):
        staged, listed = checkpoints.stage(story.run, attempt, step)
        commit.publish(story.run, staged, listed, attempt)

    assert main(["checkpoints", "list", "gpt"]) == 0

    header, newest, older = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["EVALUATION", "STATE"]
    assert older.rstrip().endswith("loss 2.25, accuracy 0.5  ok")
    assert "loss" not in newest
    assert main(["checkpoints", "list", "gpt", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["evaluation"] for row in rows] == [{}, {"loss": 2.25, "accuracy": 0.5}]


def test_events_have_words_for_them(story, capsys):
    evaluated(story, 700, why="results.json: top is not finite", loss=1.0)
    story.add("evaluation_asked", step=150)

    assert main(["events", "gpt"]) == 0

    said = [line.split(maxsplit=2)[2].strip() for line in capsys.readouterr().out.splitlines()]
    assert said[-3:] == [
        "step 500 was not evaluated: failed: ValueError: no such split",
        "step 700 evaluated: loss 1 (results.json: top is not finite)",
        "asked to evaluate step 150",
    ]


def test_a_spec_that_is_torn_leaves_what_the_ledger_has(story, runs):
    RunDir(story.run.root).spec.write_text("{")

    shown = lines_of(story.run, runs)

    assert shown[0] == "evaluated   step 400, loss 2.5, accuracy 0.5"
    assert not any("best" in line for line in shown)


def test_the_logs_of_an_evaluation_are_found_by_its_step(story, capsys):
    child = story.run.evaluation(600)
    child.rank_log(1, 0).parent.mkdir(parents=True)
    child.rank_log(1, 0).write_text("loss 2.5\n")

    assert main(["logs", "gpt", "--evaluation", "600"]) == 0
    assert "loss 2.5" in capsys.readouterr().out
    assert main(["logs", "gpt", "--evaluation", "500"]) == 4
    assert capsys.readouterr().err == (
        "hpctrain: error: gpt has no evaluation of step 500; there are: 600\n"
    )
