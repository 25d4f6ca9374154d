"""No follower begins before its predecessors' ledgers say that they are done."""

from __future__ import annotations

import pytest

from hpctrain.core.base.records import JobInfo, JobState
from hpctrain.core.settings.spec import load_spec
from hpctrain.entry import slurm_batch
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import RunState, run_state
from hpctrain.ledger.run import events as ledger
from hpctrain.node.agent.batch_side import BatchScriptSide, JobStartFacts, held_back
from tests.support.ledger_runs import Story, write_event


class Scheduler:
    """Counts what it was asked for."""

    def __init__(self):
        self.asked = []

    def forbid_requeue(self):
        self.asked.append("forbid")

    def requeue(self):
        self.asked.append("requeue")


@pytest.fixture
def first(tmp_path):
    return Story(tmp_path / "a").submitted("17").started(1)


@pytest.fixture
def follower(first, tmp_path):
    run = Story(tmp_path / "b").submitted("18", token="b-1").run
    spec = load_spec(run.spec)
    spec.after = [str(first.run.root)]
    spec.dump(run.spec)
    return run


def before(run, monkeypatch):
    """What the batch script asks first; its exit code."""
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr(slurm_batch, "_asked", lambda *_: {})
    return slurm_batch.main(["before", str(run.root), "b-1"])


def after(run, code):
    """What the batch script does at last: its exit code, and what SLURM was asked for."""
    scheduler = Scheduler()
    start = JobStartFacts("18", 0, "b-1", ["n1"], code, term=False)
    return BatchScriptSide(run, start, scheduler).finish(), scheduler.asked


def done(story):
    story.add("done", 1).ended(1, "completed", "stop")


def test_a_job_begins_when_its_predecessor_is_done(first, follower, monkeypatch, capsys):
    done(first)

    assert before(follower, monkeypatch) == 0

    assert "export HPCTRAIN_PORT=" in capsys.readouterr().out
    assert not [e for e in ledger.read(follower) if e.kind == "held_back"]


def test_a_job_whose_predecessor_left_with_0_and_is_not_done_does_not_begin(
    first, follower, monkeypatch, capsys, caplog
):
    first.add("cancel_requested", job_id="17", save=True).ended(1, "stopped", "stop")

    code = before(follower, monkeypatch)

    assert code != 0
    assert capsys.readouterr().out == ""  # nothing to export: no agent is started
    (line,) = caplog.messages
    assert line == (
        "job 18 of b does not begin: it is to run after a, which is stopped and not done: "
        f"`hpctrain resume {first.run.typed}`, then `hpctrain resume {follower.typed}`"
    )
    assert after(follower, code) == (code, ["forbid"])
    now = RunHistory.read(follower).state
    assert (now.phase, now.job_id, now.attempt) == (RunState.FAILED, "18", None)
    assert now.detail in line
    over = JobInfo("18", JobState.FAILED, alive=False)
    assert run_state(now, over) is RunState.FAILED
    write_event(follower, "submit_intent", token="b-2")  # a resume
    write_event(follower, "submitted", token="b-2", job_id="19")
    assert RunHistory.read(follower).state.phase is RunState.PENDING


def test_where_its_ledger_has_no_room_the_job_ends_all_the_same(
    first, follower, monkeypatch, caplog
):
    monkeypatch.setattr(ledger, "record", lambda *_, **__: False)

    code = before(follower, monkeypatch)

    assert after(follower, code) == (code, ["forbid"])
    assert f"which is running: `hpctrain resume {follower.typed}` has it wait" in caplog.text


def test_one_that_was_removed_is_told(first, follower, tmp_path):
    first.run.root.rename(tmp_path / "elsewhere")

    why = held_back(follower, load_spec(follower.spec).after, "18")

    assert why == f"it is to run after a, and {tmp_path}/a is not there any more: submit it anew"


def test_every_predecessor_must_be_done(first, follower, tmp_path):
    done(first)
    other = Story(tmp_path / "c").submitted("20")
    after = [str(first.run.root), str(other.run.root)]

    assert "after c, which is pending" in held_back(follower, after, "18")
    done(other.started(1))
    assert held_back(follower, after, "18") == ""


def test_a_run_that_has_begun_goes_on_whatever_became_of_its_predecessor(first, follower):
    spec = load_spec(follower.spec)
    write_event(follower, "attempt_started", attempt=1, job_id="18", by="batch", world_size=0)
    assert held_back(follower, spec.after, "18")  # of that start no rank came so far
    write_event(follower, "attempt_started", attempt=2, job_id="18", world_size=4)

    assert held_back(follower, spec.after, "18") == ""


def test_a_ledger_that_cannot_be_read_now_is_left_to_the_end_of_the_script(
    first, follower, monkeypatch, caplog
):
    monkeypatch.setattr(
        RunHistory, "read", lambda *_, **__: (_ for _ in ()).throw(OSError("stale"))
    )

    assert before(follower, monkeypatch) == 1

    assert "a run that is to be done first: stale" in caplog.text


def test_a_job_of_an_older_submission_says_nothing_about_the_run(follower):
    write_event(follower, "submit_intent", token="b-2")
    write_event(follower, "submitted", token="b-2", job_id="19")

    write_event(follower, "held_back", job_id="18", why="of old")

    assert RunHistory.read(follower).state.phase is RunState.PENDING


def test_a_job_may_be_held_back_before_its_submission_is_on_record(follower):
    write_event(follower, "submit_intent", token="b-2")
    write_event(follower, "held_back", job_id="19", why="early")

    write_event(follower, "submitted", token="b-2", job_id="19")

    assert RunHistory.read(follower).state.detail == "early"
    assert RunHistory.read(follower).state.phase is RunState.FAILED
