"""`hpctrain status`: one screen that tells where a run is, what happened, and what to type next."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.scheduler import base
from hpctrain.cluster.scheduler.base import Cluster
from hpctrain.cluster.scheduler.slurm.jobs import job_info
from hpctrain.core.base.records import JobInfo, JobState, Skipped
from hpctrain.core.base.text import duration, fold_nodes
from hpctrain.core.drawing import drawn
from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.launch import change, launch, live_job
from hpctrain.ledger.history.goodput import Goodput, TimeClass
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.events import read
from hpctrain.observe.status import reader as reader_module
from hpctrain.observe.status.reader import StatusReader
from hpctrain.observe.status.screen import RunsScreen, StatusScreen, _classes
from hpctrain.observe.status.status import (
    UNDER_WAY,
    Answer,
    Checkpoint,
    exit_status,
    status_of,
    with_heartbeat,
)
from hpctrain.observe.status.text import as_json
from tests.support.ledger_runs import Story, local_job

TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "train.py", line {n}, in f{n}\n' for n in range(50)
)


@pytest.fixture
def story(runs) -> Story:
    """A run that was preempted, crashed, and runs again on fewer nodes."""
    story = Story(runs / "lm-3", t=time.time() - 60)
    story.submitted("local-17").started(1, "local-17", ("n1", "n2", "n3", "n4")).restored(1)
    story.steps(1, 1, 120).saved(1, 120).add("stopped", 1, step=120)
    story.ended(1, "preempted", "requeue").add("requeued", 1, by="agent")
    torn = {"step": 130, "name": "step-0000000130", "reason": "shard a is missing"}
    story.started(2, "local-17", ("n1", "n2", "n4")).restored(2, 120, [torn]).steps(2, 121, 150)
    story.add(
        "failure", 2, rank=3, node="n2", kind_of="exception", summary="E: x", traceback=TRACEBACK
    )
    story.ended(2, "crashed", "restart", detail="E: x")
    return story.started(3, "local-17", ("n1", "n2", "n4")).restored(3, 120).steps(3, 121, 278)


def run(*argv: str, capsys) -> tuple[int, str, str]:
    code = main(["status", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def shown(
    story: Story,
    info: JobInfo | None = None,
    *,
    width: int = 80,
    all_attempts: bool = False,
    later: float = 5,
    **more,
) -> str:
    events, now = read(story.run), story.t + later
    status = status_of(RunHistory.of(events), Answer(info), name=story.run.name, now=now, **more)
    return drawn(StatusScreen(status, all_attempts), width)


def test_what_a_run_has_survived_has_its_rows_and_where_its_state_came_from(runs):
    story = Story(runs / "lm-4", t=time.time() - 60).submitted("local-17")
    story.started(1, "local-17", spares=["n9"]).restored(1).steps(1, 1, 12)
    story.add("batch_skipped", 1, step=9, first=64, last=72, why="nonfinite")
    assert " from " not in shown(story)

    story.add("node_lost", 1, node="n2", why="its connection closed", members=["n1", "n9"])
    story.ended(1, "node_failed", "restart").started(2, "local-17", ("n1", "n9"), by="restart")
    story.add("restored", 2, step=10, checkpoint="step-0000000010", read_from="memory")
    story.steps(2, 11, 20)

    text = shown(story, width=120)
    assert "round       n[1,9] in training; n2 lost (its connection closed); round 2 of" in text
    assert "guards      1 update left out; step 9: the update" in text
    lines = (line.split() for line in text.splitlines())
    head, *rows = (line for line in lines if line[:1] in (["#"], ["1"], ["2"]))
    assert "from" in head
    assert "memory" in rows[1]
    assert "memory" not in rows[0]

    value = as_json(status_of(RunHistory.of(read(story.run)), Answer(), name="lm-4"))
    assert [one["read_from"] for one in value["attempts"]] == [None, "memory"]
    assert value["mishaps"]["members"]["lost"][0]["node"] == "n2"
    assert value["mishaps"]["guarded"]["newest_left_out"]["step"] == 9
    assert value["mishaps"]["memory"] is None


def test_the_image_in_which_ranks_run_is_shown(story):
    settings = replaced(Settings(), {"container.image": "/images/torch.sif"})
    spec = Spec("lm-3", "id", 0.0, "slurm", "", Entry("recipe"), settings)
    rehearsal = replace(spec, cluster="local")  # which starts no container

    assert reader_module.image_of(spec) == "/images/torch.sif"
    assert reader_module.image_of(rehearsal) == ""
    assert "image       /images/torch.sif" in shown(story, image="/images/torch.sif").splitlines()
    assert "image  " not in shown(story)


def test_a_running_run_shows_its_step_its_attempts_and_the_next_commands(
    runs, story, tmp_path, capsys
):
    local_job(tmp_path / "local", "local-17", state="RUNNING")

    code, out, _ = run("lm-3", capsys=capsys)

    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("lm-3  running  step 278/400 (69 %)  loss 2.5  500 ms/step, about")
    assert lines[1].startswith("job local-17 on n[1-2,4], last heard of ")
    row = r"2 +local-17 +n\[1-2,4\] +.* +crashed +120-150 +30 +\d+ s"
    assert re.search(row, out)
    assert "3 attempts, 30 steps lost in all" in out
    assert "not taken   step-0000000130: shard a is missing" in out
    assert lines[-2:] == ["  hpctrain logs lm-3 -f", "  hpctrain cancel lm-3 --save"]
    assert "\033[" not in out


def test_the_screen_fits_80_columns_with_long_names_of_nodes_and_big_numbers(runs):
    story = Story(runs / ("a-long-name-" * 4), t=time.time() - 60)
    for number in range(1, 31):
        nodes = tuple(f"gpu-partition-a-node{n:04d}" for n in (1, 3, 5, 7, 9))
        story.started(number, f"48123{number}", nodes).restored(number, 1_000_000)
        story.add("steps", number, first=1_000_001, last=2_345_678, seconds=1e7, loss=0.1)
        story.ended(number, "node_failed", "requeue")
    text = shown(story)
    table = [line for line in text.splitlines() if not line.startswith("  hpctrain")]
    assert max(len(line) for line in table[1:]) <= 80
    assert "... 10 earlier attempts (--attempts shows all)" in text
    assert "1000000-2345678" in text
    assert "  1,000,000-2,345,678  " in shown(story, width=160)
    every = shown(story, all_attempts=True).splitlines()
    assert sum("node_fail" in line for line in every) == 30


def test_a_traceback_is_shown_once_and_short_with_its_log(runs, story):
    text = shown(story, JobInfo("17", "RUNNING", alive=True), attempt_log=story.run.rank_log)
    assert text.count("Traceback (most recent call last)") == 1
    assert "attempt 2 failed: rank 3 on n2: E: x" in text
    assert "... 22 lines" in text
    assert "in f49" in text
    assert len(text.split("Traceback")[1].split("log /")[0].splitlines()) <= 31
    assert str(story.run.rank_log(2, 3)) in text


def test_the_same_failure_again_is_counted_instead_of_repeated(runs, story):
    story.add("failure", 3, rank=3, node="n2", summary="E: x", traceback="Traceback\nE: x")
    story.ended(3, "crashed", "stop")
    text = shown(story)
    assert "attempt 3 failed, as in 1 other attempt: rank 3 on n2: E: x" in text
    assert text.count("Traceback") == 1


def test_a_start_that_slurm_plans_is_told_only_where_it_is_a_forecast(runs):
    """While a job without a time limit runs, SLURM plans the next one for in a year."""
    story = Story(runs / "lm", t=time.time() - 60).submitted("17")
    soon = JobInfo("17", "PENDING", alive=True, reason="Resources", start_time=time.time() + 7230)
    text = " ".join(shown(story, soon).split())
    assert re.search(r"\(Resources\), planned by SLURM for \S+ \(in 2h0\dm\), often earlier", text)
    assert "planned" not in shown(story, replace(soon, start_time=time.time() + 365 * 86400))


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (JobInfo("17", "PENDING", alive=True, reason="Priority"), "waits in the queue (Priority)"),
    ],
)
def test_a_pending_run_says_why_it_waits(runs, info, words):
    text = " ".join(shown(Story(runs / "lm").submitted("17"), info).split())
    assert "lm pending" in text
    assert words in text


@pytest.mark.parametrize("job_id", ["18", "17"])
def test_a_job_that_starts_is_not_on_the_nodes_of_the_attempt_before(runs, job_id):
    """Neither that of a resumed run, nor the next start of a requeued one."""
    story = Story(runs / "lm").submitted("17").started(1).restored(1).steps(1, 1, 50)
    story.ended(1, "preempted", "stop" if job_id == "18" else "requeue")
    if job_id == "18":
        story.submitted("18", token="tok-2")
    info = JobInfo(job_id, "RUNNING", alive=True, nodes="m[3-4]", restarts=1)
    text = " ".join(shown(story, info).split())
    assert f"job {job_id} on m[3-4]" in text
    assert f"job {job_id} on n[1-2]" not in text


@pytest.mark.parametrize(
    ("said", "since", "words"),
    [
        ("SUSPENDED", 90.0, "is suspended by SLURM since "),
        ("SUSPENDED", None, "is suspended by SLURM: its ranks stand still"),
        ("STOPPED", 90.0, "job 17 (SLURM says STOPPED) on n[1-2] is suspended by SLURM since "),
    ],
)
def test_a_suspended_run_says_since_when_and_has_no_speed(runs, said, since, words):
    story = Story(runs / "lm").submitted("17").started(1).restored(1).steps(1, 1, 50)
    info = JobInfo("17", "SUSPENDED", alive=True, said=said)
    if since is not None:
        info = replace(info, suspended_at=story.t)
    status = status_of(
        RunHistory.read(story.run), Answer(info), name="lm", cluster="slurm", now=story.t + 90
    )

    text = " ".join(drawn(StatusScreen(status), 100).split())

    assert text.startswith("lm suspended step 50")
    assert words in text
    assert ("(for 1m30s)" in text) is (since is not None)
    assert "suspended 9" in text  # percent of the goodput line
    assert "stall" not in text
    assert exit_status(status) == UNDER_WAY
    value = as_json(status)
    assert (value["state"], value["job"]["said"]) == ("suspended", said)
    assert value["goodput"]["classes"]["suspended"]["seconds"] == pytest.approx(90, abs=1)
    assert drawn(RunsScreen([status]), 80).splitlines()[1].split()[:2] == ["lm", "suspended"]


@pytest.mark.parametrize(
    ("said", "shown_too"),
    [
        ("RUNNING", False),
        ("COMPLETING", False),  # "which is ending"
        ("CONFIGURING", True),
        ("RESIZING", True),
        ("SIGNALING", True),
        ("INVENTED_NEXT_YEAR", True),
    ],
)
def test_the_scheduler_s_state_is_shown_where_it_is_another_word_than_the_run_s(
    runs, said, shown_too
):
    story = Story(runs / "lm").submitted("17").started(1).restored(1).steps(1, 1, 5)
    info = job_info({"JobId": "17", "JobState": said})

    text = " ".join(shown(story, info, cluster="slurm").split())

    assert text.startswith("lm running")
    assert (f"job 17 (SLURM says {said}) on" in text) is shown_too
    assert said == "RUNNING" or said in text or "which is ending" in text


def test_a_run_that_is_put_back_shows_what_its_job_still_does(runs):
    story = Story(runs / "lm").submitted("17").started(1).ended(1, "preempted", "requeue")
    story.add("requeued", 1, by="agent", job_id="17")
    info = job_info({"JobId": "17", "JobState": "COMPLETING", "Restarts": "1"})

    text = " ".join(shown(story, info, cluster="slurm").split())

    assert "job 17 (SLURM says COMPLETING) waits in the queue after attempt 1" in text


def test_a_held_run_names_its_release_and_no_start(runs):
    record = {"JobId": "17", "JobState": "PENDING", "Reason": "job_requeued_in_held_state"}
    info = job_info(record | {"StartTime": "4000000000", "Priority": "0", "Restarts": "1"})
    story = Story(runs / "lm").submitted("17").started(1).ended(1, "requeued", "leave")

    text = " ".join(shown(story, info).split())

    assert "lm requeued" in text
    assert (
        "(job_requeued_in_held_state): it was requeued and is held; `scontrol release 17`" in text
    )
    assert "planned by SLURM" not in text


def test_a_requeued_run_says_after_what(runs):
    story = Story(runs / "lm").submitted("17").started(1).ended(1, "preempted", "requeue")
    info = JobInfo("17", "PENDING", alive=True, reason="BeginTime", restarts=1)
    assert "job 17 waits in the queue after attempt 1 (preempted) (BeginTime)" in shown(story, info)


def test_a_lost_run_says_from_which_step_resume_goes_on(runs, story):
    newest = Checkpoint("step-0000000120", 120)
    text = " ".join(shown(story, None, checkpoint=newest, cluster="slurm").split())
    assert (
        "SLURM no longer knows job local-17; `hpctrain resume lm-3` resumes from step 120" in text
    )


def test_an_attempt_of_a_lost_run_ran_until_it_was_last_heard_of(runs):
    story = Story(runs / "lm").submitted("17").started(1).restored(1)
    story.t += 62
    text = shown(story.steps(1, 1, 5), None, later=7200)
    assert re.search(r"1m04s +unknown +0-5", text)


def test_a_job_that_is_over_without_an_end_on_record_is_named_with_its_state(runs, story):
    text = " ".join(shown(story, JobInfo("17", "COMPLETED", alive=False)).split())
    assert "job local-17 is over (COMPLETED), and the run is not" in text


def test_a_run_stopped_for_want_of_progress_says_so(runs, story):
    why = "3 attempts in a row without one new committed step (budget.no_progress is 3)"
    story.ended(3, "crashed", "stop")
    story.add("run_stopped", 3, reason="crashed", exit_code=93, detail=why)
    text = " ".join(shown(story).split())
    assert f"stopped for good: {why}" in text
    assert "hpctrain resume lm-3" in text


def test_an_asked_for_stop_is_shown_while_it_is_under_way(runs, story):
    story.add("cancel_requested", save=True, job_id="local-17")
    assert "; asked to save and stop" in shown(story, JobInfo("17", "RUNNING", alive=True))


class StillEnding(Cluster):
    """Ends the processes of job 17."""

    name = "slurm"
    on_this_machine = True

    def here(self, environ=None):
        del environ
        return ""

    def job(self, job_id):
        return JobInfo(job_id, "COMPLETING", alive=True)

    def bulk_query(self, job_ids):
        del job_ids
        return self

    def starts(self, job_ids):
        del job_ids
        return []


def test_status_and_resume_have_one_word_for_a_cancelled_run_that_still_ends(
    runs, monkeypatch, capsys
):
    story = Story(runs / "lm", t=time.time() - 60, cluster="slurm")
    story.submitted("17").started(1, "17").restored(1).steps(1, 1, 10)
    story.add("cancel_requested", save=False, job_id="17")
    scheduler = StillEnding()
    # Whatever is imported meanwhile would keep the patched name for ever.
    for module in (launch, live_job, change, base, reader_module):
        monkeypatch.setattr(module, "get_cluster", lambda _: scheduler)

    _, table, _ = run(capsys=capsys)
    _, screen, _ = run("lm", capsys=capsys)
    code, shown, _ = run("lm", "--json", "--exit-status", capsys=capsys)
    monkeypatch.setattr(live_job, "ENDING_S", 0.0)
    assert main(["resume", "lm"]) == 5

    assert "completing" in table
    assert "running" not in table
    assert "completing" in screen.splitlines()[0]
    assert "running" not in screen
    assert "job 17 was cancelled, and the cluster still ends its processes" in screen
    assert "cancel lm" not in screen
    assert (json.loads(shown)["state"], code) == ("completing", 75)
    assert json.loads(shown)["goodput"]["allocated_s"] > 80, "it still holds its two nodes"
    refused = capsys.readouterr().err
    assert "job 17 (completing)" in refused
    assert "hpctrain cancel" not in refused


def test_a_damaged_newest_checkpoint_is_shown_with_its_reason_and_the_next_as_newest(
    runs, story, capsys
):
    for step in (130, 140):
        (story.run.checkpoints / f"step-{step:010d}").mkdir(parents=True)
    code, out, _ = run("lm-3", capsys=capsys)
    assert code == 0
    assert "checkpoint  none that could be loaded" in out
    assert "not taken   step-0000000140: manifest is missing" in out


def test_a_run_that_has_not_saved_yet_has_no_damaged_checkpoint(runs):
    story = Story(runs / "lm").submitted("17").started(1).restored(1).steps(1, 1, 5)
    assert "checkpoint  none so far" in shown(story)


def test_what_the_running_attempt_is_writing_is_no_damage(runs, story, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    for attempt in (2, 3):
        (story.run.checkpoints / f"step-{200 + attempt:010d}.staged-{attempt:04d}").mkdir(
            parents=True
        )
    _, out, _ = run("lm-3", capsys=capsys)
    assert "step-0000000202.staged-0002: staged by attempt 2, never committed" in out
    assert "staged-0003" not in out


def test_a_silent_slurm_is_one_line_and_the_ledger_shows_the_rest(
    runs, tmp_path, monkeypatch, capsys
):
    story = Story(runs / "lm", cluster="slurm", t=time.time() - 60)
    story.submitted("17").started(1).restored(1).steps(1, 1, 50)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))

    code, out, _ = run("lm", capsys=capsys)

    assert code == 0
    assert "slurm gave no answer: " in out
    assert "lm  running  step 50/400" in out
    assert "0-50" in out


def test_a_run_without_its_spec_is_still_shown_from_its_ledger(runs, story, capsys):
    story.run.spec.unlink()
    code, out, _ = run("lm-3", capsys=capsys)
    assert code == 0
    assert "spec.json is not there" in " ".join(out.split())
    assert "120-150" in out


def test_json_has_everything_and_is_json(runs, story, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story.steps(3, 279, 280, loss=float("nan"))
    code, out, _ = run("lm-3", "--json", capsys=capsys)
    value = json.loads(out)
    assert code == 0
    assert value["state"] == "running"
    assert (value["step"], value["total_steps"], value["loss"]) == (280, 400, None)
    assert [one["steps_lost"] for one in value["attempts"]] == [0, 30, None]
    assert value["attempts"][0]["reason"] == "preempted"
    assert value["failure"]["rank"] == 3
    assert value["job"]["state"] == "RUNNING"
    assert value["not_taken"][0]["reason"] == "shard a is missing"


def test_all_runs_are_one_table_newest_first(runs, story, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    Story(runs / "old", t=1000).submitted("local-9").started(1).restored(1).steps(1, 1, 400).add(
        "done", 1, step=400
    )
    code, out, _ = run(capsys=capsys)
    assert code == 0
    header, first, second = out.splitlines()
    titles = ["run", "state", "step", "done", "left", "speed", "goodput", "attempts", "for"]
    assert header.split() == titles
    assert " ".join(first.split()[:8]) == "lm-3 running 278/400 69 % 1m01s 16 samples/s"
    assert second.split()[:6] == ["old", "done", "400/400", "100", "%", "-"]
    assert max(map(len, out.splitlines())) <= 80
    assert run("--json", capsys=capsys)[1].startswith("[")


def test_no_runs_at_all_says_how_to_start_one(runs, capsys):
    assert run(capsys=capsys)[1] == f"no runs in {runs}; `hpctrain submit` starts one\n"


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([("done", {"step": 3})], 0),
        ([("attempt_ended", {"reason": "stopped", "next": "stop"})], 0),
        ([("attempt_ended", {"reason": "cancelled", "next": "stop"})], 1),
        ([("run_stopped", {"exit_code": 93, "detail": "x"})], 93),
        ([("run_stopped", {"exit_code": 1, "detail": "x"})], 1),
        ([], 75),
    ],
)
def test_the_exit_status_tells_the_state_when_asked(runs, tmp_path, capsys, events, code):
    local_job(tmp_path / "local", "local-1", state="RUNNING")
    story = Story(runs / "lm").submitted("local-1").started(1, "local-1")
    for kind, fields in events:
        story.add(kind, 1, **fields)
    assert run("lm", "--exit-status", capsys=capsys)[0] == code
    assert run("lm", capsys=capsys)[0] == 0


RUNNING = JobInfo("17", "RUNNING", alive=True)
CHOSEN = {
    "seconds": 600.0,
    "why": "Daly, a save costs 0.4 s, one failure in 1d17h",
    "cost_s": 0.4,
    "mtbf_s": 147600.0,
}


def saves_of(story: Story, info: JobInfo | None = RUNNING) -> list[str]:
    """What the screen says of saves, one line each, beside the checkpoint itself."""
    part = next(part for part in shown(story, info).split("\n\n") if "checkpoint  " in part)
    assert max(map(len, part.splitlines())) <= 80
    lines = part.replace("\n" + " " * 12, " ").splitlines()
    others = ("speed", "model", "checkpoint", "goodput")
    return [line for line in lines if not line.startswith(others)]


@pytest.fixture
def training(runs) -> Story:
    """A run that has restored a checkpoint and trains; the screen is looked at 5 s later."""
    return Story(runs / "lm").submitted("17").started(1).restored(1).steps(1, 1, 250)


def test_the_next_save_is_shown_with_what_decided_when(training):
    training.saved(1, 250).add("interval", 1, **CHOSEN)
    training.t += 354
    assert saves_of(training) == [
        "next save   in about 4m00s (every 10m00s: Daly, a save costs 0.4 s, one failure in 1d17h)"
    ]


def test_the_interval_of_a_save_in_the_background_counts_from_when_training_went_on(training):
    training.add("interval", 1, **CHOSEN)
    training.add("saved", 1, step=250, bytes=1, seconds=100.4, stall_s=0.4, mode="async")
    assert saves_of(training)[0].startswith("next save   in about 8m15s (")


@pytest.mark.parametrize("kind", ["restored", "save_failed", "save_skipped"])
def test_the_interval_counts_anew_from_a_restore_and_from_a_save_that_did_not_come(training, kind):
    training.add("interval", 1, **CHOSEN)
    training.t += 300
    training.add(kind, 1, step=250, why="x")
    assert saves_of(training)[-1].startswith("next save   in about 9m55s (")


def test_a_save_that_is_due_is_not_said_to_lie_ahead(training):
    training.add("interval", 1, **CHOSEN)
    training.t += 600
    assert saves_of(training)[0].startswith("next save   due 7 s ago, or under way (every 10m00s")


def test_an_interval_in_steps_names_the_step_of_the_next_save(training):
    training.add("interval", 1, seconds=0, steps=100, why="checkpoint.interval_steps")
    expected = "next save   at step 300 (every 100 steps: checkpoint.interval_steps)"
    assert saves_of(training) == [expected]
    training.steps(1, 251, 300)
    assert saves_of(training)[0].startswith("next save   at step 400 (")


def test_the_last_save_is_at_the_last_step(training):
    training.add("submitted", total_steps=280, token="tok-1", job_id="17")
    training.add("interval", 1, steps=100, why="x")
    assert saves_of(training) == ["next save   at step 280 (every 100 steps: x)"]


def test_a_run_that_does_not_train_has_no_next_save(training):
    training.add("interval", 1, **CHOSEN).ended(1, "preempted", "requeue")
    assert saves_of(training, JobInfo("17", "PENDING", alive=True, restarts=1)) == []


def test_a_new_attempt_has_no_interval_until_it_says_so(training):
    training.add("interval", 1, **CHOSEN).ended(1, "crashed", "restart")
    training.started(2).restored(2)
    assert saves_of(training) == []
    training.add("interval", 2, **CHOSEN)
    assert len(saves_of(training)) == 1


def test_a_failed_newest_save_is_a_warning_until_one_is_committed(training):
    training.add("save_failed", 1, step=100, why="a timeout")
    training.add("save_failed", 1, step=200, why="No space left on device")
    assert saves_of(training) == ["save failed at step 200, 2 in a row: No space left on device"]
    training.saved(1, 250)
    assert saves_of(training) == []
    training.add("save_failed", 1, step=260, why="once more")
    assert saves_of(training) == ["save failed at step 260: once more"]


def test_a_save_that_failed_on_the_way_out_is_still_shown_when_the_run_is_over(training):
    training.add("save_failed", 1, step=250, why="Disk quota exceeded")
    training.add("stopped", 1, step=250).ended(1, "stopped", "stop")
    assert saves_of(training) == ["save failed at step 250: Disk quota exceeded"]


def test_skipped_saves_are_counted_against_all_that_were_due(training):
    for step in (50, 100, 150):
        training.saved(1, step).add("save_skipped", 1, step=step + 25, why="the last is written")
    training.add("save_failed", 1, step=200, why="x")
    training.saved(1, 250)
    assert saves_of(training) == [
        "skipped     3 of 7 saves, the last at step 175: the last is written"
    ]


def test_what_an_earlier_attempt_did_not_save_is_no_warning_for_the_next(training):
    training.add("save_failed", 1, step=100, why="x").add("save_skipped", 1, step=200, why="y")
    training.ended(1, "crashed", "restart").started(2)
    assert len(saves_of(training)) == 2
    training.restored(2)
    assert saves_of(training) == []


@pytest.mark.parametrize("kind", ["save_failed", "save_skipped"])
def test_a_save_that_did_not_come_is_still_a_sign_of_life_at_a_step_that_was_done(training, kind):
    training.t += 1000
    training.add(kind, 1, step=256, why="x")
    value = as_json(status_of(RunHistory.read(training.run), Answer(RUNNING), name="lm"))
    assert value["last_seen"] == training.t
    assert value["attempts"][0]["last_step"] == 256
    assert value["attempts"][0]["last_saved_step"] is None


def test_what_a_dead_attempt_says_beside_its_successor_does_not_count_as_saving(training):
    training.ended(1, "node_failed", "requeue").started(2).restored(2)
    training.add("save_failed", 1, step=260, why="fenced").add("interval", 1, **CHOSEN)
    assert saves_of(training) == []


def test_json_tells_an_interval_in_steps_from_one_in_seconds(training):
    training.add("interval", 1, seconds=0, steps=100, why="checkpoint.interval_steps")
    value = as_json(status_of(RunHistory.read(training.run), Answer(RUNNING), name="lm"))
    assert (value["interval"]["seconds"], value["interval"]["steps"]) == (None, 100)


def test_json_has_the_interval_and_the_saves(training):
    before = as_json(status_of(RunHistory.read(training.run), Answer(RUNNING), name="lm"))
    assert before["interval"] is None
    training.add("interval", 1, **CHOSEN)
    training.add("saved", 1, step=250, bytes=1, seconds=9.0, stall_s=0.4, mode="async")
    saved_t = training.t
    training.add("save_failed", 1, step=260, why="x")

    value = json.loads(
        json.dumps(
            as_json(status_of(RunHistory.read(training.run), Answer(RUNNING), name="lm")),
            allow_nan=False,
        )
    )

    assert value["interval"] == {**CHOSEN, "steps": None}
    assert value["saves"] == {
        "since": saved_t + 1,
        "committed": 1,
        "skipped": 0,
        "last_skipped": None,
        "failed": 1,
        "last_failed": {"step": 260, "why": "x"},
        "mode": "async",
        "seconds": 9.0,
        "stall_s": 0.4,
    }


def test_an_interval_without_numbers_does_not_keep_the_screen_from_being_shown(training):
    training.add("interval", 1, seconds=float("nan"), why=None, cost_s="much", mtbf_s=float("inf"))
    training.add("saved", 1, step=250, seconds=float("nan"), stall_s=None)
    assert saves_of(training) == []
    value = as_json(status_of(RunHistory.read(training.run), Answer(RUNNING), name="lm"))
    assert json.dumps(value, allow_nan=False)


def test_the_exit_status_of_all_runs_is_refused(runs, capsys):
    code, _, err = run("--exit-status", capsys=capsys)
    assert code == 2
    assert "name it" in err


def test_a_run_elsewhere_is_named_by_its_path_in_the_next_commands(runs, tmp_path, capsys):
    Story(tmp_path / "else" / "lm").submitted("local-1")
    _, out, _ = run("else/lm", capsys=capsys)
    assert f"hpctrain resume {tmp_path / 'else' / 'lm'}" in out


def test_what_comes_next_can_be_typed_for_any_folder_and_any_name(runs, capsys):
    story = Story(runs.parent / "my runs" / "a b").submitted("local-1")
    story.started(1, "local-1").ended(1, "completed", "stop")
    _, out, _ = run("a b", "--runs", "my runs", capsys=capsys)
    following = [shlex.split(line) for line in out.splitlines() if line.startswith("  hpctrain ")]
    assert [words[:-1] for words in following] == [
        ["hpctrain", "logs"], ["hpctrain", "checkpoints", "list"]
    ]  # fmt: skip
    for words in following:
        assert main(words[1:]) == 0, capsys.readouterr().err


def test_a_process_that_proc_hides_does_not_hide_the_other_runs(runs, monkeypatch, capsys):
    def hidden(pid: str) -> float | None:
        raise PermissionError(13, "Permission denied", f"/proc/{pid}/stat")

    Story(runs / "theirs").started(1, "pid-1", (os.uname().nodename,))
    Story(runs / "lm")
    monkeypatch.setattr(reader_module, "_process_start", hidden)
    code, out, _ = run(capsys=capsys)
    assert code == 0
    assert "running?" in out
    assert "no answer: pid-1 is another user's process" in out


def test_a_tilde_in_the_folder_of_runs_is_the_home(runs, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(runs.parent))
    Story(runs.parent / "mine" / "lm").submitted("local-1")
    code, out, _ = run("--runs=~/mine", capsys=capsys)
    assert code == 0
    assert out.splitlines()[1].split()[0] == "lm"


def test_the_header_says_how_long_a_run_has_waited_and_why(runs):
    story = Story(runs / "lm").submitted("17")
    why = "other jobs come first; fewer nodes or a shorter --time may slip in between"
    info = JobInfo("17", "PENDING", alive=True, reason="Priority", explained=why)
    lines = shown(story, info, later=723).splitlines()
    assert lines[0] == "lm  pending for 12m03s"
    assert " ".join(lines[1:3]).endswith(f"(Priority): {why}")


def test_the_heartbeat_counts_as_a_sign_of_life_and_as_progress(runs, story, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    beat = story.run.heartbeat(3)
    beat.parent.mkdir(parents=True)
    beat.write_text(json.dumps({"t": time.time() + 0.2, "step": 301}))
    _, out, _ = run("lm-3", capsys=capsys)
    assert out.splitlines()[0].startswith("lm-3  running  step 301/400 (75 %)")
    assert ", last heard of 0 s ago" in out
    assert "120-301" in out
    beat.write_text('{"t": 17')
    assert "step 278/400" in run("lm-3", capsys=capsys)[1]


def test_a_heartbeat_of_an_attempt_that_ended_changes_nothing(runs, story):
    story.ended(3, "crashed", "stop")
    status = status_of(RunHistory.read(story.run), Answer(), name="lm-3")
    assert with_heartbeat(status, time.time() + 1000, 399) == status


def test_an_attempt_s_row_says_how_long_it_took_to_come_back(runs):
    story = (
        Story(runs / "lm")
        .submitted("17")
        .started(1, job_started=1_763_700_003.0)
        .restored(1)
        .steps(1, 1, 5)
    )
    story.ended(1, "preempted", "requeue").add("requeued", 1, by="agent")
    story.t += 4440
    story.started(2, restarts=1, job_started=story.t).restored(2)
    story.t += 120
    story.add("phase", 2, name="first_step").steps(2, 1, 9)
    lines = shown(story, JobInfo("17", "RUNNING", alive=True), width=160).splitlines()
    row = next(line for line in lines if "preempted" in line)
    assert re.search(r"preempted +0-5 +5 +1h14m queue \+ 2m0\ds$", row)
    narrow = shown(story, JobInfo("17", "RUNNING", alive=True), width=66).splitlines()
    assert re.search(r"preempted +0-5 +5 +1h16m$", next(line for line in narrow if "pree" in line))


def test_classes_of_goodput_add_up_to_a_hundred_as_they_are_shown(runs, story):
    text = shown(story, width=160)
    goodput = next(part for part in text.split("\n\n") if "goodput" in part).splitlines()
    classes = re.findall(r"([a-z-]+) ([\d.]+) %", goodput[-1])
    assert round(sum(float(share) for _, share in classes), 1) == 100.0
    assert classes[:-1] == sorted(classes[:-1], key=lambda one: -float(one[1]))
    assert " % since submit, " in goodput[-2]
    assert dict(classes)["step"] in goodput[-2]


@pytest.mark.parametrize("step", [1 / 3, 0.0101])
def test_what_rounding_leaves_is_put_to_another_class_than_steps(step):
    others = {TimeClass.SAVE: (1 - step) / 2, TimeClass.DATA: (1 - step) / 2}
    spent = Goodput(node_seconds={TimeClass.STEP: step, **others}, allocated_s=1.0)

    shown = re.findall(r"([a-z-]+) ([\d.]+) %", _classes(spent, 80, silent=False))

    assert round(sum(float(share) for _, share in shown), 1) == 100.0
    assert dict(shown)["step"] == f"{100 * step:.1f}"


def test_speed_model_and_disk_are_lines_of_their_own(runs, training):
    training.add(
        "steps",
        1,
        first=251,
        last=270,
        seconds=60.0,
        loss=2.1,
        grad_norm=0.91,
        skipped=2,
        slow_rank=9,
        slow_by=0.041,
    )
    training.saved(1, 270)
    newest = Checkpoint("step-0000000270", 270, training.t, 10 * 2**30)
    text = shown(training, RUNNING, checkpoint=newest, disk_free_bytes=45 * 2**30, width=160)
    assert "speed       " in text
    assert "slowest rank 9 (+4 %)" in text
    assert "model       loss 2.1, gradient norm 0.91, 2 updates skipped in the last " in text
    assert "disk        45.0 GiB left, room for 4 more checkpoints" in text
    full = shown(training, RUNNING, checkpoint=newest, disk_free_bytes=2**30)
    assert "disk        1.0 GiB left, no room for another checkpoint" in full


def test_a_checkpoint_counts_as_verified_only_once_an_attempt_has_read_it(runs, story):
    def line(step: int) -> str:
        text = shown(story, checkpoint=Checkpoint(f"step-{step:010d}", step, 1.0, 4096), width=200)
        return next(line for line in text.splitlines() if line.startswith("checkpoint"))

    assert line(120).endswith("verified by attempt 3, which read every byte")
    assert line(240).endswith("not read back yet (last verified: step 120)")

    story.add("verified", step=240, name="step-0000000240")
    assert re.search(r"every byte read \S+.* ago$", line(240))
    newer = Checkpoint("step-0000000240", 240, story.t + 1, 4096)
    assert "not read back yet" in shown(story, checkpoint=newer)  # another one had the name


def test_clocks_ahead_of_ours_give_no_negative_age(runs):
    story = Story(runs / "lm", t=time.time() + 500).submitted("17").started(1).restored(1)
    story.steps(1, 1, 20).saved(1, 20).add("interval", 1, **CHOSEN).ended(1, "crashed", "restart")
    status = status_of(RunHistory.read(story.run), Answer(RUNNING), name="lm")
    text = re.sub(r"n\[1-2\]|0-20|step-\d+", "", drawn(StatusScreen(status), 80))
    assert not re.search(r"-\d", text)
    assert "next save   in about 10m00s" in text
    assert json.dumps(as_json(status), allow_nan=False)


@pytest.mark.parametrize("content", [None, "", '{"t": 17, "kind": "ste', "\0\0\0\n", "[]\n{}\n"])
def test_a_ledger_that_is_missing_empty_or_torn_is_shown_as_far_as_it_goes(runs, capsys, content):
    story = Story(runs / "lm")
    if content is not None:
        story.run.events.write_text(content)
    code, out, _ = run("lm", capsys=capsys)
    assert code == 0
    assert out.startswith("lm  created")
    assert json.loads(run("lm", "--json", capsys=capsys)[1])["speed"] is None
    assert run(capsys=capsys)[0] == 0


def test_a_torn_spec_is_one_line(runs, story, capsys):
    story.run.spec.write_text(story.run.spec.read_text()[:40])
    code, out, _ = run("lm-3", capsys=capsys)
    assert code == 0
    assert "spec.json cannot be read" in " ".join(out.split())


def test_json_has_speed_goodput_and_causes(runs, story, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    value = json.loads(run("lm-3", "--json", capsys=capsys)[1])
    spent = value["goodput"]
    assert set(spent["classes"]) == {kind.value for kind in TimeClass}
    shares = [one["share"] for one in spent["classes"].values() if one["share"] is not None]
    assert sum(shares) == pytest.approx(1)
    assert spent["classes"]["queue"]["share"] is None
    assert sum(one["seconds"] for one in spent["classes"].values()) == pytest.approx(
        spent["submitted_s"]
    )
    assert set(value["last_24h"]) == set(spent)
    assert value["speed"]["steps_per_s"] == pytest.approx(2)
    assert value["disk_free_bytes"] > 0
    assert [one["cause"] for one in value["attempts"]] == ["preempted", "crashed", None]
    assert {"allocated", "queued_s", "ready_s", "heard"} <= set(value["attempts"][0])
    assert "ranks" not in value


def test_ranks_are_a_table_of_the_newest_sample(runs, story, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    assert "has reported no times of its ranks" in run("lm-3", "--ranks", capsys=capsys)[1]
    sample = {"t": time.time() - 9, "step": 278, "steps": 10, "wall_s": [5.0] * 6}
    sample |= {"data_s": [0.1] * 6, "own_s": [3.0] * 5 + [3.6], "mem_peak_bytes": [2**30] * 6}
    path = story.run.rank_times(3)
    path.parent.mkdir(parents=True)
    path.write_text('{"t": 1, "steps": 1}\n' + json.dumps(sample) + '\n{"t": 17, "st')

    _, out, _ = run("lm-3", "--ranks", capsys=capsys)

    table = next(part for part in out.split("\n\n") if part.startswith("ranks of attempt 3"))
    assert table.splitlines()[0] == "ranks of attempt 3, 10 steps up to step 278, 9 s ago"
    slow = [" 5", "n4", "500 ms", "2.0 %", "360 ms", "+20.0 %", "1.0 GiB"]
    assert table.splitlines()[-1].split() == " ".join(slow).split()
    value = json.loads(run("lm-3", "--ranks", "--json", capsys=capsys)[1])
    assert value["ranks"]["own_s"][5] == 3.6


def test_several_runs_are_a_table_of_these_in_the_order_in_which_they_were_named(
    runs, story, capsys
):
    for name in ("lr-1", "lr-2", "other"):
        Story(runs / name).submitted("local-1").started(1).add("done", 1, step=4)

    code, out, _ = run("lr-2", "lr-1", "lr-2", capsys=capsys)

    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", "lr-2", "lr-1"]
    told = json.loads(run("lr-1", "other", "--json", capsys=capsys)[1])
    assert [one["run"] for one in told] == ["lr-1", "other"]


def test_a_pending_run_has_nothing_to_save_so_a_plain_cancel_comes_next(runs):
    story = Story(runs / "lm").submitted("17")
    waits = JobInfo("17", JobState.PENDING, alive=True)
    assert shown(story, waits).splitlines()[-1] == "  hpctrain cancel lm"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ranks"], "--ranks is about one run"),
        (["--attempts"], "--attempts is about one run"),
        (["lm-3", "-i", "3"], "--interval 3 is for --watch"),
        (["lm-3", "--watch", "-i", "0"], "0 is not in the range"),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(runs, story, capsys, argv, words):
    code, _, err = run(*argv, capsys=capsys)
    assert code == 2
    assert words in err


def test_watching_a_run_that_is_over_shows_it_once_and_ends(runs, story, capsys):
    story.add("done", 3, step=400).ended(3, "completed", "stop")
    code, out, _ = run("lm-3", "--watch", "--exit-status", capsys=capsys)
    assert code == 0
    assert out.count("lm-3  done") == 1
    assert json.loads(run("lm-3", "--watch", "--json", capsys=capsys)[1])["state"] == "done"


def test_watched_elsewhere_than_on_a_terminal_a_screen_is_printed_for_news_only(
    runs, story, tmp_path, hands, capsys
):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    happens = [
        lambda: None,
        lambda: story.steps(3, 279, 280),
        lambda: None,
        lambda: story.steps(3, 281, 400).add("done", 3, step=400),
    ]
    hands.on_sleep = lambda _: happens.pop(0)()
    code, out, _ = run("lm-3", "--watch", capsys=capsys)
    assert code == 0
    headers = [line for line in out.splitlines() if line.startswith("lm-3  ")]
    assert [line.split()[1:4] for line in headers] == [
        ["running", "step", "278/400"],
        ["running", "step", "280/400"],
        ["done", "step", "400/400"],
    ]
    assert "\033" not in out


def test_a_run_that_seems_lost_is_looked_at_twice_before_watching_ends(runs, story, hands, capsys):
    code, out, _ = run("lm-3", "--watch", "-i", "7", "--exit-status", capsys=capsys)
    assert (code, hands.slept) == (1, [7.0])
    assert out.count("lm-3  lost") == 1


def test_while_watching_accounting_is_asked_when_a_job_began_or_seldom(runs, story, monkeypatch):
    asked = []
    monkeypatch.setattr(reader_module, "job_starts", lambda *_: asked.append("starts") or ([], ""))
    monkeypatch.setattr(reader_module, "ask", lambda *_: asked.append("job") or Answer())
    reader = StatusReader(runs, ask_every_s=1000, account_every_s=1000)
    reader.look(story.run)
    reader.look(story.run)
    assert sorted(asked) == ["job", "starts"]
    story.ended(3, "crashed", "restart").started(4)
    reader.look(story.run)
    assert sorted(asked) == ["job", "job", "starts", "starts"]


def test_colour_is_for_terminals_only_and_not_with_no_color(story, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TERM": "xterm"}
    env.pop("NO_COLOR", None)

    def on_terminal(**more: str) -> bytes:
        ours, theirs = os.openpty()
        command = [sys.executable, "-m", "hpctrain", "status", "lm-3"]
        with subprocess.Popen(command, stdout=theirs, env={**env, **more}) as process:
            os.close(theirs)
            shown = b""
            # At the end of a pseudo-terminal Linux gives an error, not an end of file.
            with contextlib.suppress(OSError):
                while block := os.read(ours, 4096):
                    shown += block
            os.close(ours)
        assert process.returncode == 0
        return shown

    assert b"\033[" in on_terminal()
    assert b"\033[" not in on_terminal(NO_COLOR="1")


def test_the_table_keeps_its_columns_in_colour(runs, story):
    told = status_of(RunHistory.read(story.run), Answer(asked=False), name="running-wild")
    status = replace(told, speed=None)  # so that all fits
    plain = drawn(RunsScreen([status]), 80)
    painted = drawn(RunsScreen([status]), 80, color=True)
    assert re.sub(r"\033\[\d+m", "", painted) == plain
    assert painted.splitlines()[1].startswith("running-wild  \033[32mrunning\033[0m?")


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((), ""),
        (("n1",), "n1"),
        (("n1", "n2", "n3", "n7"), "n[1-3,7]"),
        (("gpu08", "gpu09", "gpu10"), "gpu[08-10]"),
        (("login", "n2", "n1"), "login,n[1-2]"),
        (("a1", "b1", "a2"), "a[1-2],b1"),
        (("n9", "n10", "n11"), "n[9-11]"),
        (("n08", "n9"), "n9,n08"),
        (("n" + "9" * 5000, "n1"), "n" + "9" * 5000 + ",n1"),
        (("n\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT TWO}"), "n\u00b2,\u0662"),
        (("12", "13"), "[12-13]"),
    ],
)
def test_nodes_are_folded_as_slurm_does(nodes, text):
    assert fold_nodes(nodes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (41, "41 s"), (200, "3m20s"), (27_060, "7h31m"), (187_200, "2d4h")],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def test_skipped_checkpoints_are_named_once_with_their_first_reason(runs, story):
    later = Skipped(130, "step-0000000130", "another reason")
    value = as_json(status_of(RunHistory.read(story.run), Answer(), name="lm-3", skipped=[later]))
    assert value["not_taken"] == [
        {"step": 130, "name": "step-0000000130", "reason": "shard a is missing"}
    ]


def test_status_never_imports_torch(runs, story):
    script = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
    script += "from hpctrain.cli.main import main; sys.exit(main(['status', 'lm-3']))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_program_that_tells_nothing_is_told_so_once_an_attempt_has_ended(runs):
    story = Story(runs / "plain").submitted("17").started(1)
    assert "not known" not in shown(story, RUNNING)
    story.t += 600
    story.ended(1, "preempted", "requeue")
    assert "steps       not known: the program has reported no step" in shown(story, width=200)


def test_what_a_program_does_not_tell_is_called_not_known_and_never_none(runs):
    story = Story(runs / "plain").submitted("17").started(1)
    early = shown(story, RUNNING)
    assert "started 5 s ago, no step reported so far" in early
    assert "run.at(step)" not in early
    for number in (1, 2):
        story.t += 200
        story.ended(number, "preempted", "requeue").started(number + 1)

    text = " ".join(shown(story, RUNNING, width=200).split())

    assert "# job where started ran ended" in text
    assert (
        "3 attempts steps not known: the program has reported no step; `run.at(step)` reports"
        in text
    )
    assert "checkpoint none" not in text
    assert "time " in text
    assert " running 9" in text
    assert text.count("not known") == 1
    assert not [
        claim for claim in ("0 steps", "no step so far", "none so far", "--save") if claim in text
    ]
    assert text.endswith("hpctrain cancel plain")
    assert max(map(len, shown(story, RUNNING).splitlines())) <= 80


def test_ranks_that_are_waited_for_are_named_and_an_end_without_them_is_no_plain_one(runs):
    story = Story(runs / "plain").submitted("17").started(1)
    story.add("ranks_awaited", 1, returned=3, left=[3], quiet_s=30, limit_s=300)
    running = " ".join(shown(story, RUNNING, width=200).split())
    assert "; 3 ranks returned, rank 3 not; ended after 5m00s of nothing" in running

    story.add("ranks_awaited", 1, returned=3, left=[3], quiet_s=300, limit_s=300, ended=True)
    story.ended(1, "completed", "stop", detail="3 ranks returned and rank 3 did not")
    text = " ".join(shown(story, width=200).split())

    assert "plain done it was ended at its end: 3 ranks returned and rank 3 did not;" in text
    assert " hung_end " in text


def test_ranks_that_stand_still_are_told_of_until_they_go_on(runs):
    story = Story(runs / "plain").submitted("17").started(1)
    found = {"kind_of": "behind", "ranks": [1], "summary": "3 ranks wait for rank 1"}
    story.add("hang_suspected", 1, **found, stood_s=61.2, limit_s=60)
    words = "3 ranks wait for rank 1 (nothing had moved for 1m01s); `hpctrain stacks plain` shows"
    assert f"; it may hang: {words}" in " ".join(shown(story, RUNNING, width=200).split())

    story.add("hang", 1, **found, stood_s=121)
    assert "; it hangs: 3 ranks wait" in " ".join(shown(story, RUNNING, width=200).split())

    story.add("hang_cleared", 1, seconds=130)
    assert "hang" not in shown(story, RUNNING, width=200)


def test_who_is_slower_than_the_others_is_said_until_that_is_over(runs):
    story = Story(runs / "plain").submitted("17").started(1)
    words = "rank 5 on n2 is later than the others by 18% of a step"
    story.add("straggler", 1, kind_of="rank", ranks=[5], nodes=["n2"], by=0.18, summary=words)
    assert f"; slow: {words}" in " ".join(shown(story, RUNNING, width=200).split())

    story.add("straggler_gone", 1, ranks=[3], lost_s=7)
    assert "; slow: " in shown(story, RUNNING, width=200), "another one"
    story.add("straggler_gone", 1, ranks=[5], lost_s=7)
    assert "; slow: " not in shown(story, RUNNING, width=200)


def test_json_has_no_number_for_what_a_program_does_not_tell(runs):
    story = Story(runs / "plain").submitted("17").started(1).ended(1, "preempted", "requeue")
    value = as_json(status_of(RunHistory.read(story.run), Answer(), name="plain"))
    assert (value["steps_lost"], value["step"], value["attempts"][0]["steps_lost"]) == (None,) * 3
    assert value["not_known"] == "the program has reported no step"


def test_an_attempt_that_told_nothing_between_others_is_named(runs, story):
    story.ended(3, "preempted", "requeue").started(4)
    story.t += 300
    story.ended(4, "completed", "stop")
    text = shown(story, width=200)
    assert "4 attempts, " in text
    assert "steps lost in all but what is not known (attempt 4 reported no step)" in text
    assert "run.at(step)" not in text


def test_a_program_that_tells_no_step_began_at_that_of_its_sealed_checkpoint(runs):
    story = Story(runs / "lm-9", t=time.time() - 60).submitted().started(1)
    story.add("resume_chosen", 1, step=1600, path="/out/checkpoint-1600", name="seal-000001")

    assert "1,600-?" in shown(story, RUNNING)


def test_what_a_program_says_of_its_total_counts_and_the_newest_word_of_it(runs):
    story = Story(runs / "own", steps=0).submitted("17").started(1)
    story.add("steps", 1, first=1, last=50, seconds=25.0, total=100)
    text = shown(story, RUNNING)
    assert "step 50/100 (50 %)  500 ms/step, about 25 s left" in text
    story.add("steps", 1, first=51, last=100, seconds=25.0, total=200)
    assert "step 100/200 (50 %)  500 ms/step, about 50 s left" in shown(story, RUNNING)
    story.add("steps", 1, first=101, last=200, seconds=50.0, total=200)
    assert "step 200/200 (100 %)  500 ms/step\n" in shown(story, RUNNING)
    story.add("steps", 1, first=201, last=250, seconds=25.0, total=200)
    over = shown(story, RUNNING)
    assert "step 250/200 (100 %)  500 ms/step\n" in over


def test_a_run_that_is_starting_has_no_next_save_of_its_last_attempts_plan(training):
    training.saved(1, 250).add("interval", 1, **CHOSEN)
    assert "next save" in shown(training, RUNNING)
    training.ended(1, "preempted", "requeue").started(2).add("interval", 2, **CHOSEN)
    assert "next save" not in shown(training, RUNNING)


def test_on_a_narrow_screen_columns_are_left_out_before_their_words_are_cut(runs, story):
    story.ended(3, "cancelled", "stop")
    lines = shown(story, width=50).splitlines()
    header = next(line for line in lines if line.startswith("#"))
    assert "…" not in "".join(lines)
    assert "started" not in header
    assert header.split()[-5:] == ["ended", "steps", "lost", "back", "in"]
