"""`hpctrain cancel`: what was cancelled stays cancelled, and --save loses nothing."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hpctrain.cli import runs as cancelling
from hpctrain.cli.main import main
from hpctrain.core.settings.spec import load_spec
from hpctrain.launch import live_job
from hpctrain.ledger.run.event_types import Followed
from hpctrain.ledger.run.events import append, read
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import Story, all_fields, local_job, write_event
from tests.support.terminal import Keyboard
from tests.support.users import OWNER

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def running(runs, tmp_path) -> Story:
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17").restored(1)
    return story.steps(1, 1, 50).saved(1, 50)


def cancel(*argv: str, capsys) -> tuple[int, str, str]:
    code = main(["cancel", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def requests(tmp_path: Path) -> list[dict]:
    folder = tmp_path / "local" / "local-17"
    return [json.loads(path.read_text()) for path in folder.glob("request-*.json")]


def newest(story: Story):
    return read(story.run)[-1]


@pytest.fixture
def unanswered(runs, tmp_path, monkeypatch) -> Story:
    """A run whose submission had no answer, where the scheduler is silent."""
    story = Story(runs / "lm", cluster="slurm")
    story.add("submit_intent", token="tok-1", script="tok-1.sh")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return story


def test_a_run_whose_submission_had_no_answer_can_be_given_up(unanswered, capsys):
    """Should its job come all the same, it leaves: it sees that its submission was given up."""
    code, out, _ = cancel("lm", capsys=capsys)
    assert code == 0
    assert newest(unanswered).kind == "submit_failed"
    assert all_fields(newest(unanswered)).get("token") == "tok-1"
    assert "lm has no job to cancel: it is failed" in out
    assert cancel("lm", capsys=capsys)[0] == 0
    assert removed("lm", "-y", capsys=capsys)[0] == 0
    assert not unanswered.run.root.exists()


def test_a_running_run_is_cancelled_after_it_is_on_record(running, tmp_path, capsys):
    code, out, _ = cancel("lm", capsys=capsys)

    assert code == 0
    assert newest(running).kind == "cancel_requested"
    assert all_fields(newest(running)) == {"save": False, "job_id": "local-17"}
    [request] = requests(tmp_path)
    assert request["operation"] == "cancel"
    assert "cancelled job local-17 of lm; its newest checkpoint is of step 50" in out
    assert "hpctrain resume lm" in out
    assert not running.run.stop_request.exists()


def test_save_leaves_a_request_for_rank_0_and_cancels_nothing(running, tmp_path, capsys):
    code, out, _ = cancel("lm", "--save", capsys=capsys)

    assert code == 0
    request = json.loads(running.run.stop_request.read_text())
    assert (request["job_id"], request["token"]) == ("local-17", "tok-1")
    assert all_fields(newest(running)) == {"save": True, "job_id": "local-17"}
    assert requests(tmp_path) == []
    assert "asked lm (job local-17) to save and stop; it is not requeued" in out
    assert "hpctrain.init()" not in out
    assert list(running.run.root.glob("*.new")) == []


def test_resume_meanwhile_says_that_the_job_was_asked_to_leave(running, capsys, hands):
    assert main(["resume", "lm"]) == 5
    assert "end it with `hpctrain cancel lm`" in capsys.readouterr().err
    cancel("lm", "--save", capsys=capsys)

    assert main(["resume", "lm"]) == 5

    assert hands.passed_s >= live_job.ENDING_S, "its save takes longer than that"
    err = capsys.readouterr().err
    assert "lm has job local-17 (running)" in err
    assert "it was asked to save and leave: try again when it has" in err
    assert "hpctrain cancel" not in err


def test_save_warns_where_the_program_may_not_hear_it(runs, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    Story(runs / "lm").submitted("local-17").started(1, "local-17")
    _, out, _ = cancel("lm", "--save", capsys=capsys)
    assert "has not called hpctrain.init() so far" in out


def test_what_a_program_that_tells_nothing_has_saved_is_not_said_to_be_nothing(
    runs, tmp_path, capsys
):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    Story(runs / "lm").submitted("local-17").started(1, "local-17")
    _, out, _ = cancel("lm", capsys=capsys)
    assert "hpctrain does not know what its program has saved" in out
    assert "nothing" not in out


def test_a_program_of_ours_that_was_cancelled_before_its_first_save_has_saved_nothing(
    runs, tmp_path, capsys
):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    Story(runs / "lm").submitted("local-17").started(1, "local-17").restored(1)
    assert "it had saved nothing yet" in cancel("lm", capsys=capsys)[1]


def test_save_asks_a_suspended_run_too_which_hears_it_when_it_goes_on(running, tmp_path, capsys):
    """It would be cancelled without a save, as a run that only waits is."""
    local_job(tmp_path / "local", "local-17", state="SUSPENDED")

    code, out, _ = cancel("lm", "--save", capsys=capsys)

    assert code == 0
    assert json.loads(running.run.stop_request.read_text())["job_id"] == "local-17"
    assert all_fields(newest(running)) == {"save": True, "job_id": "local-17"}
    assert "asked lm (job local-17) to save and stop" in out


def test_a_pending_run_has_nothing_to_save_and_is_simply_cancelled(runs, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="PENDING")
    story = Story(runs / "lm").submitted("local-17")
    code, out, _ = cancel("lm", "--save", capsys=capsys)
    assert code == 0
    assert all_fields(newest(story)) == {"save": False, "job_id": "local-17"}
    assert len(requests(tmp_path)) == 1
    assert not story.run.stop_request.exists()
    assert "nothing more to save" in out


def test_a_job_whose_submission_was_never_confirmed_is_found_by_its_token(runs, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="PENDING")
    story = Story(runs / "lm").add("submit_intent", token="tok-1", script="tok-1.sh")
    assert cancel("lm", capsys=capsys)[0] == 0
    assert all_fields(newest(story))["job_id"] == "local-17"
    assert len(requests(tmp_path)) == 1


@pytest.mark.parametrize("flags", [[], ["--save"]])
def test_a_run_that_is_over_is_one_line_and_no_error_and_nothing_is_written(
    runs, tmp_path, capsys, flags
):
    local_job(tmp_path / "local", "local-17", state="COMPLETED")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17").add("done", 1, step=4)
    before = story.run.events.read_bytes()

    code, out, err = cancel("lm", *flags, capsys=capsys)

    assert (code, out, err) == (0, "lm has no job to cancel: it is done\n", "")
    assert story.run.events.read_bytes() == before
    assert not story.run.stop_request.exists()


def test_a_silent_slurm_is_an_error_but_the_wish_is_on_record(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    story = Story(runs / "lm", cluster="slurm").submitted("17").started(1)
    code, _, err = cancel("lm", capsys=capsys)
    assert code == 6
    assert "job 17 was not cancelled" in err
    assert "not to be requeued" in err
    assert len(err.splitlines()) == 1
    assert newest(story).kind == "cancel_requested"


def test_save_works_while_slurm_is_silent_since_rank_0_reads_a_file(
    runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    story = Story(runs / "lm", cluster="slurm").submitted("17").started(1)
    assert cancel("lm", "--save", capsys=capsys)[0] == 0
    assert json.loads(story.run.stop_request.read_text())["job_id"] == "17"


def test_a_run_in_a_terminal_is_told_from_one_that_has_ended(runs, capsys):
    here = os.uname().nodename
    story = Story(runs / "lm").add(
        "attempt_started", 1, job_id=f"pid-{os.getpid()}", nodes=[here], t=4e9
    )
    code, _, err = cancel("lm", capsys=capsys)
    assert code == 2
    assert "press Ctrl-C there, or use --save" in err
    assert cancel("lm", "--save", capsys=capsys)[0] == 0
    assert story.run.stop_request.exists()
    Story(runs / "gone").add("attempt_started", 1, job_id="pid-999999999", nodes=[here])
    assert "it is lost" in cancel("gone", capsys=capsys)[1]


def test_json_says_what_was_done(running, capsys):
    _, out, _ = cancel("lm", "--save", "--json", capsys=capsys)
    assert json.loads(out) == {
        "run": "lm",
        "job_id": "local-17",
        "action": "asked to save and stop",
        "saves": True,
    }


def ended_run(runs: Path, name: str) -> None:
    local_job(runs.parent / "local", "local-16", state="COMPLETED")
    Story(runs / name).submitted("local-16").started(1, "local-16").add("done", 1, step=4)


def test_several_runs_are_cancelled_and_what_one_refuses_stops_no_other(running, runs, capsys):
    ended_run(runs, "old")

    code, out, err = cancel("old", "none", "lm", capsys=capsys)

    assert code == 4
    assert out.startswith("old has no job to cancel: it is done\ncancelled job local-17 of lm")
    assert "no run or job 'none'" in err
    assert newest(running).kind == "cancel_requested"


def test_several_runs_as_json_are_a_list(running, runs, capsys):
    ended_run(runs, "old")
    code, out, _ = cancel("old", "lm", "--json", capsys=capsys)
    assert code == 0
    told = [(one["run"], one["job_id"], one["action"]) for one in json.loads(out)]
    assert told == [("old", None, "none"), ("lm", "local-17", "cancelled")]


@pytest.mark.parametrize("verb", ["cancel", "resume", "evaluate"])
def test_without_a_name_and_a_terminal_the_newest_is_named_and_nothing_is_done(
    running, monkeypatch, capsys, verb
):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))

    assert main([verb]) == 2

    err = capsys.readouterr().err
    assert "no run is named; the newest is lm (running for " in err
    assert f"Type `hpctrain {verb} lm`, or add --yes to take the newest" in err
    assert newest(running).kind == "saved"


@pytest.mark.parametrize(
    ("typed", "code", "last"), [("n\n", 130, "saved"), ("y\n", 0, "cancel_requested")]
)
def test_on_a_terminal_the_newest_is_shown_and_its_user_asked(running, capsys, typed, code, last):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", Keyboard(typed))
        assert main(["cancel"]) == code

    assert "cancel lm (running for " in capsys.readouterr().err
    assert newest(running).kind == last


def test_that_the_newest_was_cancelled_already_is_said(running, capsys):
    cancel("lm", capsys=capsys)
    assert main(["resume"]) == 2
    assert ", cancelled). Type" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--yes"], ["-y"], ["-"]])
def test_a_script_takes_the_newest_by_yes_or_by_its_sign(running, monkeypatch, capsys, words):
    monkeypatch.setattr("sys.stdin", None)
    assert cancel(*words, capsys=capsys)[0] == 0
    assert newest(running).kind == "cancel_requested"


# ---- rm


def removed(*argv: str, capsys) -> tuple[int, str, str]:
    code = main(["rm", *argv])
    return (code, *capsys.readouterr())


@pytest.fixture
def ended(runs) -> RunDir:
    ended_run(runs, "old")
    (runs / "old" / "big").write_bytes(bytes(2048))
    return RunDir(runs / "old")


def test_a_run_that_is_over_is_deleted_with_all_of_it_once_its_user_has_agreed(
    ended, runs, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", Keyboard("n\n"))
    assert removed("old", capsys=capsys)[0] == 130
    assert ended.root.exists()
    monkeypatch.setattr("sys.stdin", Keyboard("y\n"))

    code, out, err = removed("old", capsys=capsys)

    assert code == 0
    assert f"delete {ended.root}: " in err
    assert re.search(r"deleted .*/runs/old: \d\.\d KiB in 4 files", out)
    assert list(runs.iterdir()) == []


def test_a_script_has_to_say_yes_and_may_name_several(ended, runs, monkeypatch, capsys):
    ended_run(runs, "older")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = removed("old", "older", capsys=capsys)
    assert (code, ended.root.exists()) == (2, True)
    assert "nobody is there to ask: add --yes" in err
    assert removed("old", "older", "--yes", capsys=capsys)[0] == 0
    assert list(runs.iterdir()) == []


def test_a_run_that_lives_is_kept_and_the_others_with_it(ended, running, capsys):
    code, out, err = removed("old", "lm", "-y", capsys=capsys)
    assert (code, out) == (5, "")
    assert "lm is running (job local-17): `hpctrain cancel lm` first" in err
    assert ended.root.exists()


def test_where_nobody_can_say_whether_it_lives_it_is_kept(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    story = Story(runs / "lm", cluster="slurm").submitted("17").started(1)
    code, _, err = removed("lm", "-y", capsys=capsys)
    assert (code, story.run.root.exists()) == (6, True)
    assert "nobody can say whether lm has a job" in err


def test_a_damaged_run_that_is_over_can_be_deleted(ended, capsys):
    ended.spec.write_text("{")
    assert removed("old", "-y", capsys=capsys)[0] == 0
    assert not ended.root.exists()


def test_a_run_that_another_one_waits_for_is_kept(ended, runs, tmp_path, capsys):
    local_job(tmp_path / "local", "local-18", state="PENDING")
    follower = Story(runs / "next").submitted("local-18")
    spec = load_spec(follower.run.spec)
    replace(spec, after=[str(ended.root)]).dump(follower.run.spec)
    append(ended, Followed(run=str(follower.run.root)))

    code, _, err = removed("old", "-y", capsys=capsys)

    assert (code, ended.root.exists()) == (5, True)
    assert "next waits for old; cancel that first" in err


def test_a_link_is_not_deleted_nor_what_it_points_to(ended, runs, capsys):
    (runs / "link").symlink_to("old")
    code, _, err = removed("link", "-y", capsys=capsys)
    assert (code, ended.root.exists(), (runs / "link").exists()) == (3, True, True)
    assert "is a link to old" in err


def test_what_is_cut_short_leaves_no_half_under_its_name(ended, runs, monkeypatch, capsys):
    def fails(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(cancelling.shutil, "rmtree", fails)
    code, _, err = removed("old", "-y", capsys=capsys)
    assert code == 1
    assert not ended.root.exists()
    assert ".removed-old-" in err
    assert main(["status"]) == 0


def test_a_run_whose_job_is_submitted_while_its_user_thinks_is_kept(
    ended, runs, tmp_path, monkeypatch
):
    class Thinks(Keyboard):
        def readline(self, *_):
            local_job(tmp_path / "local", "local-19", state="RUNNING")
            again = {"token": "tok-1", "job_id": "local-19", "by": "resume", "cluster": "local"}
            write_event(ended, "submit_intent", token="tok-1", script="tok-1.sh")
            write_event(ended, "submitted", **again)
            return "y\n"

    monkeypatch.setattr("sys.stdin", Thinks())
    assert main(["rm", "old"]) == 5
    assert ended.root.exists()


@pytest.mark.two_users
def test_another_users_run_is_not_deleted(ended, capsys):
    os.chown(ended.root, OWNER.uid, OWNER.gid)
    code, _, err = removed("old", "-y", capsys=capsys)
    assert (code, ended.root.exists()) == (3, True)
    assert "who alone may change it" in err
