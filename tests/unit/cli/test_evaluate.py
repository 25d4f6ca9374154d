"""`hpctrain evaluate` submits what is due from a login node, and says what it did."""

from __future__ import annotations

import json
import shutil

import pytest

from hpctrain.cli.main import main
from hpctrain.core.settings.spec import load_spec
from hpctrain.launch.change import ResumeRequest
from hpctrain.launch.resume import prepare_resume, resume_run
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.ownership import own_spec
from tests.support.evaluated_runs import FakeCluster, finish, made, use_fake_cluster
from tests.support.ledger_runs import write_event


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    return use_fake_cluster(tmp_path, monkeypatch)


@pytest.fixture
def run(tmp_path, jobs):
    del jobs
    return made(tmp_path, "evaluate.every=3")


def evaluate(capsys, run, *words):
    """Exit code and lines."""
    code = main(["evaluate", str(run.root), *words])
    shown = capsys.readouterr()
    return code, (shown.out or shown.err).splitlines()


def test_what_is_due_is_submitted_and_what_waits_is_shown(run, jobs, capsys):
    assert evaluate(capsys, run) == (
        0,
        ["submitted    step 60: job 1 (gpt-eval-60)", "waits        step 30"],
    )
    finish(run, 60, {"loss": 2.5})

    assert evaluate(capsys, run)[1] == [
        "evaluated    step 60: loss 2.5",
        "submitted    step 30: job 2 (gpt-eval-30)",
    ]
    assert evaluate(capsys, run)[1] == ["runs         step 30: job 2 (gpt-eval-30)"]
    finish(run, 30, {"loss": 2.5})
    evaluate(capsys, run)
    assert evaluate(capsys, run) == (0, ["nothing is due"])
    assert jobs() == ["gpt-eval-60", "gpt-eval-30"]


def test_a_dry_look_submits_nothing(run, jobs, capsys):
    assert evaluate(capsys, run, "--dry-run", "--step", "70")[1] == [
        "would submit step 70: gpt-eval-70",
        "waits        step 30, 60",
    ]
    assert jobs() == []
    assert "evaluation_asked" not in run.events.read_text()


def test_a_step_that_is_asked_for_is_evaluated_though_it_was_not_due(run, jobs, capsys):
    evaluate(capsys, run, "--step", "70")
    evaluate(capsys, run, "--step", "70")

    assert jobs() == ["gpt-eval-70"]
    assert [e.kind for e in ledger.read(run)].count("evaluation_asked") == 1


def test_one_that_is_due_anyway_is_not_written_down(run, capsys):
    evaluate(capsys, run, "--step", "30")

    assert "evaluation_asked" not in run.events.read_text()


def test_a_step_without_a_checkpoint_is_refused(run, capsys):
    code, lines = evaluate(capsys, run, "--step", "71")

    assert code == 4
    assert "gpt has no checkpoint of step 71" in lines[0]


@pytest.mark.parametrize(("metrics", "again"), [({"loss": 1}, ""), (None, "repeats it")])
def test_a_step_that_was_evaluated_is_refused(run, capsys, metrics, again):
    evaluate(capsys, run)
    finish(run, 60, metrics)
    evaluate(capsys, run)
    code, lines = evaluate(capsys, run, "--step", "60")

    assert code == 2
    assert "step 60 was evaluated by gpt-eval-60" in lines[0]
    assert lines[0].endswith(again)


def test_a_checkpoint_that_was_gone_and_is_back_can_be_asked_for(run, jobs, capsys, tmp_path):
    path = run.checkpoints / "step-0000000060"
    shutil.move(path, tmp_path / "away")
    assert "no longer there" in evaluate(capsys, run)[1][0]
    shutil.move(tmp_path / "away", path)
    finish(run, 30, {"loss": 1})
    evaluate(capsys, run, "--step", "60")

    assert jobs() == ["gpt-eval-30", "gpt-eval-60"]


def test_a_refusal_is_shown_and_is_the_exit_code(run, jobs, capsys):
    (jobs.folder / "refused").write_text("Access/permission denied")

    assert evaluate(capsys, run) == (
        6,
        ["refused      step 60: Access/permission denied", "waits        step 30"],
    )


def test_a_script_gets_it_as_json(run, capsys):
    code, lines = evaluate(capsys, run, "--json")

    assert code == 0
    assert json.loads("".join(lines)) == {
        "run": "gpt",
        "run_dir": str(run.root),
        "submitted": [60],
        "alive": {"60": "1"},
        "evaluated": [],
        "refused": {},
        "waiting": [30],
    }


def test_a_run_without_an_evaluation_is_told_how_to_get_one(run, capsys):
    spec = load_spec(run.spec)
    spec.beside = {}
    spec.dump(run.spec)
    code, lines = evaluate(capsys, run)

    assert code == 2
    assert "--set evaluate.script=PROGRAM" in lines[0]


def test_a_resume_submits_what_could_not_be_submitted_from_a_job(run, jobs, capsys):
    (jobs.folder / "refused").write_text("Access/permission denied")
    evaluate(capsys, run)
    (jobs.folder / "refused").unlink()
    write_event(run, "attempt_ended", attempt=1, reason="crashed", next="stop")
    spec = own_spec(run, named="gpt")
    prepared = prepare_resume(run, spec, ResumeRequest({}), {"PATH": ""})
    _, notes = resume_run(run, prepared, None)

    assert jobs() == ["gpt", "gpt-eval-60"]
    assert notes == ["step 60 is evaluated by job 2, which waited to be submitted"]


def test_a_resume_whose_evaluations_are_refused_says_so_and_goes_on(run, jobs, monkeypatch):
    write_event(run, "attempt_ended", attempt=1, reason="crashed", next="stop")
    prepared = prepare_resume(run, own_spec(run, named="gpt"), ResumeRequest({}), {"PATH": ""})
    real = FakeCluster.submit

    def submit(self, request):
        job_id = real(self, request)
        (jobs.folder / "refused").write_text("no more jobs")
        return job_id

    monkeypatch.setattr(FakeCluster, "submit", submit)

    assert resume_run(run, prepared, None)[1] == [
        "the evaluation of step 60 could not be submitted: no more jobs"
    ]
