"""The evaluations of a run are made, submitted and ended once each, whoever dies on the way."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpctrain.checkpoint.store import find
from hpctrain.core.settings.spec import Evaluates, load_spec
from hpctrain.errors import ClusterUnreachable, NotFound, RunLocked
from hpctrain.launch import evaluations, resume
from hpctrain.launch.change import ResumeRequest
from hpctrain.launch.evaluations import advance
from hpctrain.launch.resume import prepare_resume, resume_run
from hpctrain.ledger.history.evaluations import evaluations_of
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import Evaluated
from hpctrain.ledger.run.layout import RunDir
from tests.support.evaluated_runs import FakeCluster, commit, finish, made, use_fake_cluster
from tests.support.ledger_runs import write_event

WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.link"}
"""What Python tells of before it is done, as far as it may change a disk."""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Names of the runs that had a job, in the order of their jobs."""
    return use_fake_cluster(tmp_path, monkeypatch)


@pytest.fixture
def run(tmp_path, jobs):
    """A run whose every third checkpoint is evaluated; it has saved seven."""
    del jobs
    return made(tmp_path, "evaluate.every=3")


def look(run, **more):
    return advance(run, load_spec(run.spec), **more)


def told(run):
    return [event.fact for event in ledger.read(run) if isinstance(event.fact, Evaluated)]


def test_the_newest_that_is_due_is_submitted_first_and_as_many_as_may_be(run, jobs):
    done = look(run)

    assert jobs() == ["gpt-eval-60"]
    assert (done.submitted, done.alive, done.left) == ([60], {60: "1"}, [30])
    assert look(run).submitted == []
    assert jobs() == ["gpt-eval-60"]


def test_an_evaluation_is_a_run_with_the_runs_settings_and_its_own_program(run):
    look(run)
    spec = load_spec(run.evaluation(60).spec)

    checkpoint = str(run.checkpoints / "step-0000000060")
    assert spec.evaluates == Evaluates(run=str(run.root), step=60, checkpoint=checkpoint)
    assert (Path(spec.entry.path).name, spec.entry.args) == ("evaluate.py", ["--all"])
    assert (spec.name, spec.settings.slurm.nodes) == ("gpt-eval-60", "4")
    assert spec.settings.notify.on == ["failed", "stopped"]


def test_nobody_else_can_look_into_an_evaluation(run):
    look(run)

    assert run.evaluations.stat().st_mode & 0o077 == 0


def test_what_an_ended_one_has_found_is_written_down_once_and_the_next_follows(run, jobs):
    look(run)
    finish(run, 60, {"loss": 2.5})

    assert look(run).said == told(run)
    assert told(run) == [Evaluated(step=60, run="gpt-eval-60", metrics={"loss": 2.5})]
    assert jobs() == ["gpt-eval-60", "gpt-eval-30"]
    look(run)
    assert len(told(run)) == 1


def test_what_they_have_found_is_a_curve_that_the_next_look_makes_good(run, monkeypatch, caplog):
    look(run)
    finish(run, 60, {"loss": 2.5})
    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "write_curves", full_disk)
        look(run)
    assert not run.evaluation_curves.exists()
    assert "No space left on device" in caplog.text

    look(run)

    board = EventAccumulator(str(run.evaluation_curves)).Reload()
    assert [(point.step, point.value) for point in board.Scalars("eval/loss")] == [(60, 2.5)]


def test_what_was_kept_for_its_evaluation_goes_once_the_training_is_over(tmp_path, jobs):
    """Steps 10 to 70 are there as rank 0 left them: 10 and 50 are of no rule, and not evaluated."""
    rules = ["checkpoint.keep_best=1", "checkpoint.best_metric=eval.loss", "evaluate.at_once=9"]
    run = made(tmp_path, "evaluate.every=2", *rules)
    look(run)
    for step, loss in ((20, 1.0), (40, 2.0)):
        finish(run, step, {"loss": loss})
    write_event(run, "restored", attempt=1, step=70)  # nothing before it is in use
    look(run)
    assert find.steps(run) == [70, 60, 50, 40, 30, 20, 10], "rank 0 does so while it trains"

    write_event(run, "done", attempt=1, step=70)
    look(run, dry=True)
    assert len(find.steps(run)) == 7
    look(run)
    assert find.steps(run) == [70, 60, 50, 30, 20, 10]
    finish(run, 60, {"loss": 0.5})
    look(run)

    assert find.steps(run) == [70, 60, 50, 30, 10]


def full_disk(run):
    raise OSError(28, "No space left on device", str(run.evaluation_curves))


def test_a_newer_one_goes_before_an_older_one_that_waits(run, jobs):
    look(run)
    commit(run, 80, 90)
    finish(run, 60, {"loss": 2.5})
    look(run)
    finish(run, 90, {"loss": 2.5})
    look(run)

    assert jobs() == ["gpt-eval-60", "gpt-eval-90", "gpt-eval-30"]


def test_so_many_are_alive_as_were_asked_for(tmp_path, jobs):
    run = made(tmp_path, "evaluate.at_once=3")
    look(run)
    assert jobs() == ["gpt-eval-70", "gpt-eval-60", "gpt-eval-50"]
    finish(run, 60, {"loss": 1})
    look(run)

    assert jobs()[3:] == ["gpt-eval-40"]
    assert sorted(look(run).alive) == [40, 50, 70]


def test_the_last_one_of_a_run_that_is_done_is_evaluated_too(run, jobs):
    write_event(run, "done", attempt=1, step=70)
    look(run)

    assert jobs() == ["gpt-eval-70"]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"reason": "crashed"}, "failed"),
        ({"reason": "stopped"}, "stopped"),
        ({"reason": "crashed", "detail": "it fell"}, "failed: it fell"),
        ({"metrics": {"loss": "high"}}, "results.json: loss is no number"),
        ({}, "results.json is not there: the program has reported nothing"),
    ],
)
def test_one_that_failed_is_over_and_is_not_repeated(run, jobs, how, why):
    look(run)
    finish(run, 60, **how)
    look(run)
    finish(run, 30, {"loss": 1})
    look(run)

    assert told(run)[0] == Evaluated(step=60, run="gpt-eval-60", why=why)
    assert jobs() == ["gpt-eval-60", "gpt-eval-30"]


def test_one_that_was_resumed_by_hand_gets_a_second_word(run, jobs):
    look(run)
    finish(run, 60, reason="crashed")
    look(run)
    child = run.evaluation(60)
    write_event(child, "submitted", token="t-2", job_id="901", by="resume")
    (jobs.folder / "901.json").write_text('{"token": "t-2", "run": "resumed", "alive": true}')
    look(run, of=60)
    assert len(told(run)) == 1
    child.results.write_text('{"loss": 2}')
    write_event(child, "attempt_started", attempt=2, job_id="901")
    write_event(child, "attempt_ended", attempt=2, reason="completed", next="stop", by="agent")
    look(run)
    assert len(told(run)) == 1
    look(run, of=60)
    look(run, of=60)

    assert [fact.metrics for fact in told(run)] == [{}, {"loss": 2}]
    assert jobs() == ["gpt-eval-60", "gpt-eval-30", "resumed"]


def test_one_that_is_repeated_holds_its_checkpoint_until_its_second_word(run, jobs, monkeypatch):
    look(run)
    finish(run, 60, reason="crashed")
    look(run)
    assert 60 not in awaited(run)
    real = resume.launch

    def launch(*args, **more):
        assert 60 in awaited(run)
        look(run)  # somebody finds it over, as it was before
        return real(*args, **more)

    monkeypatch.setattr(resume, "launch", launch)
    repeat(run, 60)

    assert 60 in awaited(run)
    assert look(run).alive == {60: "3", 30: "2"}
    assert len(told(run)) == 2
    finish(run, 60, {"loss": 2})
    look(run, of=60)
    assert 60 not in awaited(run)
    assert told(run)[-1].metrics == {"loss": 2}


def test_one_whose_checkpoint_is_gone_is_not_repeated(run, jobs):
    look(run)
    finish(run, 60, reason="crashed")
    look(run)
    shutil.rmtree(find.step_path(run, 60))

    with pytest.raises(NotFound, match=r"step 60 of gpt is no longer there: it was pruned or set"):
        repeat(run, 60)
    assert jobs() == ["gpt-eval-60", "gpt-eval-30"]


def repeat(run, step):
    """`hpctrain resume` of an evaluation that is over."""
    child = run.evaluation(step)
    job = FakeCluster.folder / f"{RunHistory.read(child).state.job_id}.json"
    job.write_text(job.read_text().replace("true", "false"))
    prepared = prepare_resume(child, load_spec(child.spec), ResumeRequest({}), {"PATH": ""})
    resume_run(child, prepared, None)


def awaited(run):
    return evaluations_of(RunHistory.read(run), load_spec(run.spec).settings.evaluate).awaited


def test_one_whose_job_is_gone_is_over(run, jobs):
    look(run)
    write_event(run.evaluation(60), "attempt_started", attempt=1, job_id="1")
    assert sorted(look(run).alive) == [60]
    (jobs.folder / "1.json").write_text('{"token": "x", "run": "gpt-eval-60", "alive": false}')
    look(run)

    assert told(run)[0].why == "its job has ended without a word"
    assert jobs() == ["gpt-eval-60", "gpt-eval-30"]


def test_one_that_was_cancelled_is_over(run, jobs):
    look(run)
    write_event(run.evaluation(60), "cancel_requested", job_id="1")
    (jobs.folder / "1.json").write_text('{"token": "x", "run": "gpt-eval-60", "alive": false}')
    look(run)

    assert told(run)[0].why == "cancelled"


def test_one_that_ends_while_the_scheduler_is_asked_is_taken_at_its_last_word(run, monkeypatch):
    look(run)

    def job(self, job_id):
        del self, job_id
        finish(run, 60, {"loss": 2.5})

    monkeypatch.setattr(FakeCluster, "job", job)
    look(run)

    assert told(run)[0].metrics == {"loss": 2.5}


def test_where_the_scheduler_is_silent_the_ledger_counts(run, jobs, monkeypatch):
    look(run)

    def job(self, job_id):
        raise ClusterUnreachable(f"{self} does not know {job_id}")

    monkeypatch.setattr(FakeCluster, "job", job)

    assert look(run).alive == {60: "1"}
    assert jobs() == ["gpt-eval-60"]


def test_nothing_new_begins_while_the_run_is_cancelled_and_what_ended_is_said(run, jobs):
    look(run)
    write_event(run, "cancel_requested", job_id="900", save=False)
    finish(run, 60, {"loss": 1})
    look(run)
    assert (jobs(), len(told(run))) == (["gpt-eval-60"], 1)
    write_event(run, "submit_intent", token="t-2")

    look(run)
    assert jobs() == ["gpt-eval-60", "gpt-eval-30"]


def test_a_run_that_is_to_save_and_leave_is_evaluated(run, jobs):
    write_event(run, "cancel_requested", job_id="900", save=True)
    look(run)

    assert jobs() == ["gpt-eval-60"]


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_a_checkpoint_that_is_no_longer_there_is_passed_over_and_said_once(run, jobs, damage):
    path = run.checkpoints / "step-0000000060"
    if damage == "gone":
        shutil.rmtree(path)
    else:
        next(path.glob("*.bin"), next(path.iterdir())).write_bytes(b"")
    done = look(run)
    look(run)

    assert jobs() == ["gpt-eval-30"]
    assert (done.submitted, done.left) == ([30], [])
    assert [(fact.step, fact.run) for fact in told(run)] == [(60, "")]
    assert told(run)[0].why.startswith("step 60 is ")


def test_one_that_is_saved_anew_after_that_is_evaluated(run, jobs):
    shutil.rmtree(run.checkpoints / "step-0000000060")
    look(run)
    commit(run, 60)
    finish(run, 30, {"loss": 1})
    look(run)

    assert jobs() == ["gpt-eval-30", "gpt-eval-60"]


def test_what_was_asked_for_is_evaluated(run, jobs):
    write_event(run, "evaluation_asked", step=70)
    look(run)

    assert jobs() == ["gpt-eval-70"]


def test_a_copy_of_a_run_evaluates_for_itself_what_the_original_is_at(run, jobs):
    look(run)
    copy = RunDir(run.root.with_name("copy"))
    shutil.copytree(run.root, copy.root)
    look(copy)
    (child,) = evaluations.children(copy).values()

    assert jobs() == ["gpt-eval-60", "gpt-eval-60"]
    assert load_spec(child.spec).evaluates.run == str(copy.root)
    assert look(copy).alive == {60: "2"}
    assert look(run).alive == {60: "1"}


# ---- submissions that fail


def test_what_was_refused_is_tried_again_after_a_while(run, jobs, hands):
    (jobs.folder / "refused").write_text("Access/permission denied")
    done = look(run)
    assert done.refused == {60: "Access/permission denied"}
    (jobs.folder / "refused").unlink()
    assert look(run).submitted == []
    hands.advance(evaluations.FIRST_PAUSE_S + 1)

    assert look(run).submitted == [60]
    assert [fact.run for fact in told(run)] == []


def test_what_was_refused_again_and_again_waits_longer_each_time(run, jobs, hands):
    (jobs.folder / "refused").write_text("no")
    tries = []
    for minute in range(120):
        if look(run).refused:
            tries.append(minute)
        hands.advance(61)

    assert tries[:4] == [0, 1, 2, 4]
    assert len(tries) < 14


def test_who_insists_does_not_wait(run, jobs):
    (jobs.folder / "refused").write_text("no")
    look(run)
    (jobs.folder / "refused").unlink()

    assert look(run, insist=True).submitted == [60]


def test_while_nobody_knows_whether_one_was_accepted_no_other_is_submitted(run, jobs):
    (jobs.folder / "silent").write_text("no answer")
    assert list(look(run).refused) == [60]
    (jobs.folder / "silent").unlink()
    commit(run, 80, 90)

    assert look(run).submitted == [60]
    assert jobs() == ["gpt-eval-60"]


def test_one_that_was_accepted_without_an_answer_is_found_and_not_submitted_again(run, jobs):
    real = FakeCluster.submit

    def deaf(self, request):
        real(self, request)
        raise ClusterUnreachable("no answer")

    FakeCluster.submit = deaf
    find, FakeCluster.find_job = FakeCluster.find_job, lambda _self, _token: None
    try:
        look(run)
    finally:
        FakeCluster.submit, FakeCluster.find_job = real, find

    assert look(run).alive == {60: "1"}
    assert jobs() == ["gpt-eval-60"]


def test_a_dry_look_changes_nothing(run, jobs, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    done = look(run, dry=True)

    assert (done.submitted, done.left, jobs()) == ([60], [30], [])
    new = set(tmp_path.rglob("*")) - set(before)
    assert {path.name for path in new} <= {"evaluations.lock"}


# ---- more than one at it, and deaths


def test_of_two_looks_at_once_one_says_what_has_ended_and_submits(run, jobs, monkeypatch):
    look(run)
    finish(run, 60, {"loss": 2.5})
    append, both = ledger.append, threading.Barrier(2)

    def together(*args, **more):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        append(*args, **more)

    monkeypatch.setattr(ledger, "append", together)
    threads = [threading.Thread(target=look, args=(run,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert jobs() == ["gpt-eval-60", "gpt-eval-30"]
    assert len(told(run)) == 1


def test_who_cannot_have_the_lock_says_so(run, hands):
    with (
        evaluations._locked(run),
        pytest.raises(RunLocked, match=r"evaluations.lock has been held"),
    ):
        look(run)
    assert hands.passed_s >= evaluations.LOCK_S


def killed_at(run, write):
    """A look in a process that dies before its n-th write; whether it died."""
    child = os.fork()
    if child == 0:
        left = [write]

        def die(event, args):
            wrong = event == "open" and not (isinstance(args[2], int) and args[2] & 3)
            if event in WRITES and not wrong:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

        code = 1
        try:
            sys.addaudithook(die)
            look(run)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, 9}
    return code == 9


def test_whoever_dies_at_whatever_write_each_is_evaluated_once(tmp_path, jobs):
    run = made(tmp_path, "evaluate.every=3")
    origin, write, seen = tmp_path / "origin", 0, 0
    shutil.copytree(run.root, origin)
    while True:
        died = killed_at(run, write)
        look(run)
        look(run)
        assert jobs() == ["gpt-eval-60"], write
        for step, died_too in ((60, True), (30, False)):
            finish(run, step, {"loss": step})
            if died_too:
                killed_at(run, write)
            look(run)
        assert jobs() == ["gpt-eval-60", "gpt-eval-30"], write
        assert [(fact.step, fact.metrics) for fact in told(run)] == [
            (60, {"loss": 60}),
            (30, {"loss": 30}),
        ], write
        if not died:
            break
        seen, write = seen + 1, write + 1
        shutil.rmtree(run.root)
        shutil.copytree(origin, run.root)
        for job in jobs.folder.iterdir():
            job.unlink()

    assert seen > 30


def test_a_run_may_keep_the_best_by_its_evaluations(tmp_path, jobs):
    run = made(tmp_path, "checkpoint.keep_best=1", "checkpoint.best_metric=eval.loss")

    look(run)

    assert jobs() == ["gpt-eval-70"]
    assert load_spec(run.evaluation(70).spec).settings.checkpoint.keep_best == 0
