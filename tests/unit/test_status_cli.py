"""`hpctrain status`: one screen that tells where a run is, what happened, and what to type next."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.ledger.events import read
from hpctrain.ledger.format import duration, fold_nodes
from hpctrain.ledger.status import Answer, Checkpoint, status_of
from hpctrain.ledger.view import as_json, as_text, runs_as_text
from hpctrain.records import JobInfo, Skipped
from tests.support.ledger_runs import Story, local_job

TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "train.py", line {n}, in f{n}\n' for n in range(50)
)


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path / "runs"


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


def shown(story: Story, info: JobInfo | None = None, **more) -> str:
    status = status_of(read(story.run), Answer(info), name=story.run.name, now=story.t + 5, **more)
    return as_text(status)


def test_a_running_run_shows_its_step_its_attempts_and_the_next_commands(
    runs, story, tmp_path, capsys
):
    local_job(tmp_path / "local", "local-17", state="RUNNING")

    code, out, _ = run("lm-3", capsys=capsys)

    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("lm-3  running  step 278/400 (69 %)  loss 2.5  500 ms/step, about")
    assert lines[1].startswith("job local-17 on n[1-2,4], last heard of ")
    row = r"2 +local-17 +n\[1-2,4\] +.* +crashed +120-150 +30 +restart"
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
    assert "... 10 earlier attempts (--json shows all)" in text
    assert "1000000-2345678" in text


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
    assert "attempt 3 failed, as in 1 other attempt(s): rank 3 on n2: E: x" in text
    assert text.count("Traceback") == 1


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (JobInfo("17", "PENDING", alive=True, reason="Priority"), "waits in the queue (Priority)"),
        (
            JobInfo("17", "PENDING", alive=True, reason="Resources", start_time=2e9),
            "(Resources), expected to start 2033-05-18",
        ),
    ],
)
def test_a_pending_run_says_why_it_waits(runs, info, words):
    text = " ".join(shown(Story(runs / "lm").submitted("17"), info).split())
    assert "lm pending" in text
    assert words in text


def test_a_requeued_run_says_after_what(runs):
    story = Story(runs / "lm").submitted("17").started(1).ended(1, "preempted", "requeue")
    info = JobInfo("17", "PENDING", alive=True, reason="BeginTime", restarts=1)
    assert "job 17 waits in the queue after attempt 1 (preempted) (BeginTime)" in shown(story, info)


def test_a_lost_run_says_from_which_step_resume_goes_on(runs, story):
    newest = Checkpoint("step-0000000120", 120)
    text = " ".join(shown(story, None, checkpoint=newest, cluster="slurm").split())
    assert (
        "SLURM no longer knows job local-17; `hpctrain resume lm-3` goes on from step 120" in text
    )


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
    assert "spec.json is not there" in out
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
    assert header.split() == ["run", "state", "step", "nodes", "attempts", "job", "for"]
    assert first.split()[:6] == ["lm-3", "running", "278/400", "3", "3", "local-17"]
    assert second.split()[:3] == ["old", "done", "400/400"]
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
    return part.replace("\n" + " " * 12, " ").splitlines()[1:]


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
    value = as_json(status_of(read(training.run), Answer(RUNNING), name="lm"))
    assert value["last_seen"] == training.t
    assert value["attempts"][0]["last_step"] == 256
    assert value["attempts"][0]["last_saved_step"] is None


def test_what_a_dead_attempt_says_beside_its_successor_does_not_count_as_saving(training):
    training.ended(1, "node_failed", "requeue").started(2).restored(2)
    training.add("save_failed", 1, step=260, why="fenced").add("interval", 1, **CHOSEN)
    assert saves_of(training) == []


def test_json_tells_an_interval_in_steps_from_one_in_seconds(training):
    training.add("interval", 1, seconds=0, steps=100, why="checkpoint.interval_steps")
    value = as_json(status_of(read(training.run), Answer(RUNNING), name="lm"))
    assert (value["interval"]["seconds"], value["interval"]["steps"]) == (None, 100)


def test_json_has_the_interval_and_the_saves(training):
    before = as_json(status_of(read(training.run), Answer(RUNNING), name="lm"))
    assert before["interval"] is None
    training.add("interval", 1, **CHOSEN)
    training.add("saved", 1, step=250, bytes=1, seconds=9.0, stall_s=0.4, mode="async")
    saved_t = training.t
    training.add("save_failed", 1, step=260, why="x")

    value = json.loads(
        json.dumps(
            as_json(status_of(read(training.run), Answer(RUNNING), name="lm")), allow_nan=False
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
    value = as_json(status_of(read(training.run), Answer(RUNNING), name="lm"))
    assert json.dumps(value, allow_nan=False)


def test_the_exit_status_of_all_runs_is_refused(runs, capsys):
    code, _, err = run("--exit-status", capsys=capsys)
    assert code == 2
    assert "name it" in err


def test_a_run_elsewhere_is_named_by_its_path_in_the_next_commands(runs, tmp_path, capsys):
    Story(tmp_path / "else" / "lm").submitted("local-1")
    _, out, _ = run("else/lm", capsys=capsys)
    assert f"hpctrain resume {tmp_path / 'else' / 'lm'}" in out


def test_colour_is_for_terminals_only_and_not_with_no_color(story, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"}
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
    status = status_of(read(story.run), Answer(asked=False), name="running-wild")
    plain = runs_as_text([status], color=False)
    painted = runs_as_text([status], color=True)
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
    value = as_json(status_of(read(story.run), Answer(), name="lm-3", skipped=[later]))
    assert value["not_taken"] == [
        {"step": 130, "name": "step-0000000130", "reason": "shard a is missing"}
    ]


def test_status_never_imports_torch(runs, story):
    script = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
    script += "from hpctrain.cli.main import main; sys.exit(main(['status', 'lm-3']))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
