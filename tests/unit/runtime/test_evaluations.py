"""What a program says in an evaluation's job, and what it is told where it is in none."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

import hpctrain
from hpctrain.core.settings.spec import Entry, Evaluates, Spec
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.ledger.run.layout import RunDir

NAME = "step-0000000300"


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """No job: neither an evaluation's nor any other."""
    monkeypatch.setattr("hpctrain.train.runtime.evaluations.configure", lambda _: None)
    for name in ("HPCTRAIN_CHECKPOINT", "HPCTRAIN_RESULTS", "HPCTRAIN_RUN_DIR", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Where the results of an evaluation of step 300 go."""
    path = tmp_path / "results.json"
    monkeypatch.setenv("HPCTRAIN_CHECKPOINT", str(tmp_path / NAME))
    monkeypatch.setenv("HPCTRAIN_RESULTS", str(path))
    return path


def test_outside_of_an_evaluation_it_is_said_how_one_is_started():
    with pytest.raises(UsageError, match=r"HPCTRAIN_CHECKPOINT is not set.*\[evaluate\] of a run"):
        hpctrain.evaluation()


def test_in_a_job_step_and_path_are_those_of_the_runs_spec(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "parent-eval-7")
    run.root.mkdir()
    spec = Spec(run.name, "id", 0.0, "local", "", Entry("script"))
    spec.evaluates = Evaluates(str(tmp_path / "parent"), 7, str(tmp_path / "out" / "epoch7.pt"))
    spec.dump(run.spec)
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
    monkeypatch.setenv("HPCTRAIN_CHECKPOINT", spec.evaluates.checkpoint)

    evaluation = hpctrain.evaluation()

    assert (evaluation.step, evaluation.checkpoint) == (7, tmp_path / "out" / "epoch7.pt")
    with pytest.raises(UsageError, match=r"epoch7.pt was saved by the program in its own way"):
        evaluation.load(torch.nn.Linear(1, 1))


def test_a_checkpoint_named_by_hand_tells_its_step(results):
    assert hpctrain.evaluation().step == 300


def test_reports_add_up_in_a_file_that_is_always_whole(results):
    evaluation = hpctrain.evaluation()

    evaluation.report(loss=torch.tensor(2.5), n=3)
    assert json.loads(results.read_text()) == {"loss": 2.5, "n": 3.0}
    evaluation.report({"top 5": 0.5}, loss=2.0)

    assert json.loads(results.read_text()) == {"loss": 2.0, "n": 3.0, "top 5": 0.5}
    assert [path.name for path in results.parent.iterdir()] == [results.name]


def test_a_number_that_is_not_finite_is_said_and_kept_as_unknown(results, caplog):
    hpctrain.evaluation().report(loss=math.nan, top=math.inf, accuracy=0.5)

    assert json.loads(results.read_text()) == {"loss": None, "top": None, "accuracy": 0.5}
    assert caplog.messages == ["step 300: not finite, kept as unknown: loss, top"]


WRONG = {
    "text": ({"loss": "2.3"}, "loss is '2.3', which is no number"),
    "many": ({"loss": torch.ones(2)}, r"loss is tensor\(\[1., 1.\]\), which is no number"),
    "none": ({"loss": None}, "loss is None, which is no number"),
    "flag": ({"good": True}, "good is True, which is no number"),
    "name": ({"a\nb": 1}, r"'a\\nb' cannot be the name of a metric"),
    "long": ({"a" * 129: 1}, "cannot be the name of a metric"),
    "crowd": ({f"m{n}": n for n in range(257)}, "257 metrics; report 256 at most"),
}


@pytest.mark.parametrize(("metrics", "why"), WRONG.values(), ids=WRONG)
def test_what_is_no_metric_is_refused_in_a_line(results, metrics, why):
    with pytest.raises(UsageError, match=why):
        hpctrain.evaluation().report(metrics)
    assert not results.exists()


def test_only_rank_0_writes(results, monkeypatch):
    monkeypatch.setenv("RANK", "1")

    hpctrain.evaluation().report(loss=1.0)

    assert not results.exists()


def test_a_place_that_cannot_be_written_is_one_line(results, monkeypatch):
    gone = results.parent / "gone" / "results.json"
    monkeypatch.setenv("HPCTRAIN_RESULTS", str(gone))

    with pytest.raises(HpctrainError, match=rf"results cannot be written: .*{gone}"):
        hpctrain.evaluation().report(loss=1.0)


def test_by_hand_the_results_are_shown(results, monkeypatch, caplog):
    monkeypatch.delenv("HPCTRAIN_RESULTS")
    caplog.set_level(logging.INFO)

    hpctrain.evaluation().report(loss=1.0)

    assert caplog.messages == ["step 300: {'loss': 1.0}; HPCTRAIN_RESULTS is not set"]
