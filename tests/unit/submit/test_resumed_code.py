"""A resume says which code it runs, and takes the code of now where that is meant."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import NotFound, UsageError
from hpctrain.launch import resume
from hpctrain.launch.prepare import SubmitRequest, make_run, prepare
from hpctrain.launch.resume import choose_code, take_code
from hpctrain.launch.snapshot import plan_snapshot
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.ledger_runs import write_event

ENVIRON = {"PATH": "/nowhere"}


def git(folder, *words):
    author = ["-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A checkout with a program, in which one stands."""
    folder = tmp_path / "work"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("import part\n")
    (folder / "part.py").write_text("ONE = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(work):
    prepared = prepare(
        SubmitRequest(cwd=work, environ=ENVIRON, runs=Path("runs"), command=["train.py", "--lr=1"])
    )
    return make_run(prepared, plan_snapshot(prepared.spec.entry, "auto").checkout)


def choose(run, *program, new_code=False):
    spec = load_spec(run.spec)
    history = RunHistory.read(run)
    return choose_code(run, spec, history, program=program, new_code=new_code, environ=ENVIRON)


def head(work):
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=work, capture_output=True, text=True, check=True
    )
    return done.stdout[:8]


def test_the_copy_goes_on_and_it_is_said_that_nothing_differs(run, work):
    choice = choose(run)

    assert choice.line == f"the copy of commit {head(work)}; your checkout is the same"
    assert (choice.checkout, choice.changed) == (None, "")


def test_what_differs_is_named_with_the_way_to_take_it(run, work):
    old = head(work)
    (work / "part.py").write_text("ONE = 2\n")
    (work / "more.py").write_text("")
    git(work, "add", "more.py")

    assert choose(run).line == (
        f"the copy of commit {old}; your checkout differs in more.py, part.py: --new-code takes it"
    )


def test_new_code_is_copied_and_the_older_copy_stays(run, work):
    (work / "part.py").write_text("ONE = 2\n")

    choice = choose(run, new_code=True)
    take_code(run, choice)

    assert (run.snapshot / "part.py").read_text() == "ONE = 2\n"
    assert (run.root / "snapshot-before-1" / "part.py").read_text() == "ONE = 1\n"
    assert choice.spec.entry.path == str(run.snapshot / "train.py")
    assert choice.spec.entry.args == ["--lr=1"]
    assert choice.spec.snapshot.dirty
    assert choice.line == choice.changed
    assert choice.line == f"your checkout as it is now ({head(work)} with uncommitted edits)"


def test_after_an_error_before_any_step_the_code_of_now_is_taken_unasked(run, work):
    write_event(run, "attempt_started", attempt=1, job_id="7")
    write_event(run, "attempt_ended", attempt=1, reason="user_error", next="stop")
    (work / "part.py").write_text("ONE = 2\n")

    choice = choose(run)

    assert choice.checkout is not None
    assert choice.line.endswith("since the run's copy failed before its first step")


@pytest.mark.parametrize("reason", ["crashed", "preempted", "user_error"])
def test_once_a_step_was_done_or_nothing_was_the_users_fault_the_copy_goes_on(run, work, reason):
    write_event(run, "attempt_started", attempt=1, job_id="7")
    if reason == "user_error":
        write_event(run, "steps", attempt=1, step=5)
    write_event(run, "attempt_ended", attempt=1, reason=reason, next="stop", step=5)
    (work / "part.py").write_text("ONE = 2\n")

    assert choose(run).checkout is None


def test_a_program_with_other_arguments_runs_as_it_is_now_in_the_runs_folder(
    run, work, monkeypatch
):
    (work / "sub").mkdir()
    monkeypatch.chdir(work / "sub")
    (work / "part.py").write_text("ONE = 2\n")

    choice = choose(run, "../train.py", "--epochs=40", "--out={output}")
    take_code(run, choice)

    assert choice.spec.entry.args == ["--epochs=40", "--out={output}"]  # put in behind
    assert choice.spec.entry.cwd == str(work)
    assert (run.snapshot / "part.py").read_text() == "ONE = 2\n"
    assert choice.changed.startswith("train.py --epochs=40 --out=")


def test_a_program_that_is_not_there_is_refused_and_nothing_changes(run):
    before = run.spec.read_bytes()

    with pytest.raises(NotFound, match=r"no\.py"):
        choose(run, "no.py")

    assert run.spec.read_bytes() == before


def test_a_run_without_a_copy_says_that_the_code_of_now_runs(work):
    request = SubmitRequest(cwd=work, environ=ENVIRON, runs=Path("runs"), command=["train.py"])
    run = make_run(prepare(request), None)

    assert choose(run).line == "train.py as it is now (no copy)"
    assert choose(run, new_code=True).notes == (
        "--new-code has no effect: the run has no copy of its code",
    )


def test_new_code_of_a_checkout_that_is_gone_is_refused_with_the_way_out(run, work):
    (work / ".git").rename(work / "no-git")

    assert choose(run).line.startswith("the copy of commit")
    with pytest.raises(UsageError, match=r"hpctrain resume train-1 -- PROGRAM ARGS"):
        choose(run, new_code=True)


def test_a_program_that_is_gone_from_the_checkout_is_refused(run, work):
    git(work, "mv", "train.py", "main.py")

    with pytest.raises(UsageError, match=r"train\.py is gone from your checkout"):
        choose(run, new_code=True)


def test_a_copy_that_cannot_be_written_leaves_the_older_one(run, work, monkeypatch):
    (work / "part.py").write_text("ONE = 2\n")
    choice = choose(run, new_code=True)

    def fails(*_):
        run.snapshot.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume, "take_snapshot", fails)
    with pytest.raises(OSError, match="No space left"):
        take_code(run, choice)

    assert (run.snapshot / "part.py").read_text() == "ONE = 1\n"
    assert not list(run.root.glob("snapshot-before-*"))


def test_where_an_earlier_start_did_steps_the_copy_goes_on_too(run, work):
    write_event(run, "attempt_started", attempt=1, job_id="7")
    write_event(run, "steps", attempt=1, step=5)
    write_event(run, "attempt_ended", attempt=1, reason="preempted", next="requeue", step=5)
    write_event(run, "attempt_started", attempt=2, job_id="7")
    write_event(run, "attempt_ended", attempt=2, reason="user_error", next="stop")
    (work / "part.py").write_text("ONE = 2\n")

    assert choose(run).checkout is None
