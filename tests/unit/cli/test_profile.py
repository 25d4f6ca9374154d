"""`hpctrain profile`: the verdict on one screen, and one clear line where nothing can be done."""

from __future__ import annotations

import gzip
import json

import pytest

from hpctrain.cli.main import main
from hpctrain.observe.profile.trace import ProfileRequest, StepWindow, file_name, read_request
from tests.support.ledger_runs import Story, local_job
from tests.support.traces import CPU, GPU

STEP_100 = StepWindow(100, 100)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path / "runs"


@pytest.fixture
def running(runs, tmp_path):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17").restored(1)
    return story.steps(1, 1, 50)


def profile(*argv, capsys):
    code = main(["profile", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def traced(story, *texts):
    folder = story.run.profile / "attempt-0001"
    folder.mkdir(parents=True, exist_ok=True)
    for rank, text in enumerate(texts):
        path = folder / file_name(rank, STEP_100, "pt.trace.json.gz")
        path.write_bytes(gzip.compress(text.encode()))
    return folder


def test_the_verdict_and_each_ranks_shares_fit_a_terminal(running, capsys):
    folder = traced(running, GPU, CPU)

    code, out, _ = profile("lm", capsys=capsys)

    assert code == 0
    assert "attempt 1, steps" not in out
    assert "attempt 1, step 100" in out
    assert "the other ranks wait for rank 0" in out
    assert "   0   0.001    35 %    30 %    10 %     9 %    10 %     6 %  -" in out
    lines = [line for line in out.splitlines() if str(folder) not in line]
    assert max(map(len, lines)) <= 80


def test_json_has_everything(running, capsys):
    traced(running, GPU, CPU)
    told = json.loads(profile("lm", "--json", capsys=capsys)[1])

    assert told["run"] == "lm"
    [one] = told["profiles"]
    assert one["verdict"]["waited_for"] == 0
    for shares in (one["verdict"]["shares"], one["ranks"]["0"]["shares"]):
        assert sum(shares.values()) == pytest.approx(1)
    assert one["ranks"]["1"]["device"] == "cpu"
    assert one["ranks"]["0"]["steps"] == {"100": 0.001}


def test_what_cannot_be_read_is_told_beside_the_rest(running, capsys):
    folder = traced(running, GPU)
    (folder / file_name(4, STEP_100, "pt.trace.json.gz")).write_bytes(b"torn")
    (folder / file_name(5, STEP_100, "problem.txt")).write_text("RuntimeError: no CUPTI\n")
    (folder / file_name(6, STEP_100, "memory.pickle")).touch()

    code, out, _ = profile("lm", capsys=capsys)

    assert code == 0
    assert "rank 4: no trace:" in out
    assert "rank 5: no trace: RuntimeError: no CUPTI" in out
    assert "not written yet: rank 6" in out


def test_a_run_without_profiles_says_how_to_take_one(running, capsys):
    code, out, _ = profile("lm", capsys=capsys)
    assert code == 0
    assert "hpctrain profile lm --now --wait" in out
    assert json.loads(profile("lm", "--json", capsys=capsys)[1])["profiles"] == []


def test_what_is_under_way_is_said_while_the_run_runs(running, capsys):
    running.add("profile_requested", 1, first=60, last=62, ranks=[0], token="x")
    assert "steps 60 to 62 are being profiled" in profile("lm", capsys=capsys)[1]

    running.ended(1, "crashed", "stop")
    assert "being profiled" not in profile("lm", capsys=capsys)[1]


def test_now_leaves_a_request_for_rank_0(running, capsys):
    code, out, _ = profile("lm", "--now", "--ranks", "3,0", "--memory", capsys=capsys)

    assert code == 0
    request = read_request(running.run.profile_request, "local-17")
    assert (request.steps, request.ranks, request.memory) == (3, (0, 3), True)
    assert "asked lm (job local-17) to profile 3 steps of ranks 0,3" in out
    assert read_request(running.run.profile_request, "local-18") is None


def test_a_second_request_is_refused_until_the_first_is_done(running, capsys):
    profile("lm", "--now", capsys=capsys)
    code, _, err = profile("lm", "--now", capsys=capsys)
    assert code == 2
    assert "has been asked for a profile already" in err

    running.run.profile_request.unlink()  # rank 0 has taken it
    running.add("profile_requested", 1, first=60, last=62, ranks=[0], token="x")
    code, _, err = profile("lm", "--now", capsys=capsys)
    assert code == 2
    assert "is being profiled already, steps 60 to 62" in err

    running.add("profiled", 1, first=60, last=61, ranks=[0], folder="f")  # cut by a stop
    assert profile("lm", "--now", capsys=capsys)[0] == 0


def test_a_request_that_nobody_took_for_long_does_not_hold(running):
    ProfileRequest("local-17", "x", 3, (0,), memory=False, t=1.0).write(running.run.profile_request)
    assert read_request(running.run.profile_request, "local-17") is None
    running.run.profile_request.write_text('{"job_id": ')
    assert read_request(running.run.profile_request, "local-17") is None


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--steps", "5"], "--steps needs --now"),
        (["--now", "--steps", "0"], "--steps is 0; it takes 1 to 100"),
        (["--now", "--ranks", "4"], "--ranks names 4; lm has ranks 0 to 3"),
        (["--now", "--ranks", "x"], '--ranks is "x"'),
    ],
)
def test_what_cannot_be_asked_is_one_line(running, capsys, argv, why):
    code, out, err = profile("lm", *argv, capsys=capsys)
    assert (code, out) == (2, "")
    assert why in err
    assert len(err.splitlines()) == 1
    assert not running.run.profile_request.exists()


def test_a_run_that_does_not_run_is_refused(runs, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="COMPLETED")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17").add("done", 1, step=4)

    code, _, err = profile("lm", "--now", capsys=capsys)

    assert code == 5
    assert err == ("hpctrain: error: lm does not run, so there is nothing to look at: it is done\n")
    assert not story.run.profile_request.exists()


def test_a_program_without_hpctrain_cannot_hear(runs, tmp_path, capsys):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    Story(runs / "lm").submitted("local-17").started(1, "local-17")
    assert "has not called hpctrain.init()" in profile("lm", "--now", capsys=capsys)[2]


def test_waiting_ends_with_the_run(running, tmp_path, monkeypatch, hands, capsys):
    from hpctrain.cli import profile as command

    def ends(_seconds):
        local_job(tmp_path / "local", "local-17", state="COMPLETED")
        running.add("done", 1, step=60)

    hands.on_sleep = ends
    monkeypatch.setattr(command, "LOOK_S", 0.0)
    code, _, err = profile("lm", "--now", "--wait", capsys=capsys)

    assert code == 1
    assert "lm was not profiled: it does not run any more" in err
    assert not running.run.profile_request.exists()


def test_waiting_shows_the_new_profile_once_every_rank_has_written(running, hands, capsys):
    traced(running, GPU, CPU, CPU, CPU)
    later = StepWindow(160, 162)

    def writes(_seconds):
        folder = running.run.profile / "attempt-0001"
        rank = 0 if not (folder / file_name(0, later, "pt.trace.json.gz")).exists() else 3
        path = folder / file_name(rank, later, "pt.trace.json.gz")
        path.write_bytes(gzip.compress(CPU.encode()))

    hands.on_sleep = writes
    code, out, _ = profile("lm", "--now", "--ranks", "0,3", "--wait", "--json", capsys=capsys)

    assert code == 0
    (one,) = json.loads(out)["profiles"]
    assert (one["first"], list(one["ranks"])) == (160, ["0", "3"])
