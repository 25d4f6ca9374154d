"""`hpctrain logs`: every line once, across attempts, until the run ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain.cli import log_follow
from hpctrain.cli.main import main
from hpctrain.ledger.events import read
from hpctrain.rundir.logs import LogFile, tail_offset
from tests.support.ledger_runs import Story, local_job


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setattr(log_follow, "POLL_S", 0.02)
    monkeypatch.setattr(log_follow, "ASK_S", 0.1)
    return tmp_path / "runs"


@pytest.fixture
def story(runs) -> Story:
    story = Story(runs / "lm").submitted("local-17")
    story.started(1, "local-17", ("n1", "n2", "n3"))
    story.log(1, 0, "a1\na2\n")
    story.log(1, 1, "b1\n")
    story.log(1, 10, "k1\n")
    story.ended(1, "preempted", "requeue").started(2, "local-17", ("n1",))
    story.log(2, 0, "a3\na4 without end")
    return story


def logs(*argv: str, capsys) -> tuple[int, list[str], str]:
    code = main(["logs", "lm", *argv])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


FIRST = "--- attempt 1 \N{MIDDLE DOT} job local-17 \N{MIDDLE DOT} n1,n2,n3 ---"
SECOND = "--- attempt 2 \N{MIDDLE DOT} job local-17 \N{MIDDLE DOT} n1 ---"
ENDED = "--- attempt 1 ended: preempted, next: requeue ---"


# ---- without -f ---------------------------------------------------------------------------------


def test_rank_0_is_shown_attempt_by_attempt_with_markers(story, capsys):
    code, out, err = logs(capsys=capsys)
    assert (code, err) == (0, "")
    assert out == [FIRST, "a1", "a2", ENDED, SECOND, "a3", "a4 without end"]


def test_all_ranks_are_told_apart_by_a_prefix(story, capsys):
    _, out, _ = logs("--rank", "all", "--attempt", "1", capsys=capsys)
    assert out == [FIRST, "[r0] a1", "[r0] a2", "[r1] b1", "[r10] k1", ENDED]


def test_one_or_several_ranks_can_be_chosen(story, capsys):
    assert logs("--rank", "1", capsys=capsys)[1] == [FIRST, "b1", ENDED, SECOND]
    out = logs("--rank", "10,0", "--attempt", "1", capsys=capsys)[1]
    assert out == [FIRST, "[r0] a1", "[r0] a2", "[r10] k1", ENDED]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("0", [SECOND]),
        ("1", [SECOND, "a4 without end"]),
        ("2", [SECOND, "a3", "a4 without end"]),
        ("3", [FIRST, "a2", ENDED, SECOND, "a3", "a4 without end"]),
        ("99", [FIRST, "a1", "a2", ENDED, SECOND, "a3", "a4 without end"]),
    ],
)
def test_a_tail_reaches_back_over_attempts(story, capsys, count, expected):
    assert logs("--tail", count, capsys=capsys)[1] == expected


def test_the_batch_sides_output_is_shown_submission_by_submission(story, capsys):
    story.submitted("local-170", "tok-10")
    story.run.jobs.mkdir()
    for name, text in {"tok-1.out": "x\n", "tok-1-0.out": "y\n", "tok-10.out": "z\n"}.items():
        (story.run.jobs / name).write_text(text)
    _, out, _ = logs("--rank", "batch", capsys=capsys)
    first = "--- job local-17 \N{MIDDLE DOT} tok-1 ---"
    second = "--- job local-170 \N{MIDDLE DOT} tok-10 ---"
    assert out == [first, "[0] y", "[batch] x", second, "z"]


def test_bytes_that_are_no_text_come_through(story, capfdbinary):
    story.run.rank_log(2, 0).write_bytes(b"\xff\xfe progress\r100%\n")
    main(["logs", "lm", "--attempt", "2"])
    sys.stdout.flush()
    assert b"\xff\xfe progress\r100%\n" in capfdbinary.readouterr().out


def test_a_run_that_has_not_started_says_so(runs, capsys):
    Story(runs / "lm").submitted("local-17")
    code, out, err = logs(capsys=capsys)
    assert (code, out) == (0, [])
    assert "lm has not started yet" in err


def test_a_rank_that_printed_nothing_is_named(story, capsys):
    _, _, err = logs("--rank", "7", capsys=capsys)
    assert "rank 7 has printed nothing" in err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--rank", "zero"], 2, "'zero' is neither a rank"),
        (["--rank", ""], 2, "'' is neither a rank"),
        (["--attempt", "9"], 4, "lm has no attempt 9; it has 2"),
        (["--attempt", "0"], 2, "0 is not in the range"),
    ],
)
def test_bad_input_is_one_clear_line(story, capsys, argv, code, message):
    got, _, err = logs(*argv, capsys=capsys)
    assert got == code
    assert message in err
    assert len(err.splitlines()) == 1


# ---- files --------------------------------------------------------------------------------------


def test_a_line_is_given_when_it_is_whole_and_the_rest_at_the_end(tmp_path):
    log = LogFile(tmp_path / "x")
    assert list(log.lines()) == []
    (tmp_path / "x").write_bytes(b"one\ntw")
    assert list(log.lines()) == [b"one"]
    with (tmp_path / "x").open("ab") as file:
        file.write(b"o\nthree")
    assert list(log.lines()) == [b"two"]
    assert log.rest() == [b"three"]
    assert log.rest() == []


def test_a_log_that_was_begun_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a long first line\nhalf")
    log = LogFile(path)
    assert list(log.lines()) == [b"a long first line"]
    path.write_bytes(b"new\n")
    assert list(log.lines()) == [b"new"]


def test_a_progress_bar_that_never_ends_its_line_is_shown_all_the_same(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"5%\r" * 50_000)
    assert b"".join(LogFile(path).lines()) == path.read_bytes()


@pytest.mark.parametrize("size", [1, 7, 70_000])
@pytest.mark.parametrize("ending", [b"", b"\n"])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 50])
def test_the_last_lines_begin_where_they_should(tmp_path, size, ending, count):
    lines = [bytes([97 + n]) * size for n in range(6)]
    path = tmp_path / "x"
    path.write_bytes(b"\n".join(lines) + ending)
    offset, seen = tail_offset(path, count)
    rest = path.read_bytes()[offset:].removesuffix(ending)
    assert rest == (b"\n".join(lines[-count:]) if count else b"")
    assert seen == min(count, 6)


def test_a_file_that_is_not_there_has_no_last_lines(tmp_path):
    assert tail_offset(tmp_path / "none", 5) == (0, 0)


def test_lines_that_are_seen_only_after_an_attempts_end_are_still_printed(runs):
    """Over NFS the ledger may be ahead of another node's log."""
    story = Story(runs / "lm").submitted("17").started(1, "17").ended(1, "crashed", "requeue")
    out = io.BytesIO()
    printer = log_follow.Printer(story.run, out, frozenset({0}))
    printer.show(read(story.run), over=False)
    story.log(1, 0, "late\n")
    printer.show(read(story.run), over=False)
    printer.show(read(story.run), over=True)
    assert out.getvalue().decode().splitlines()[1:] == [
        "late",
        "--- attempt 1 ended: crashed, next: requeue ---",
    ]


# ---- -f -----------------------------------------------------------------------------------------


class Following:
    """`hpctrain logs -f` in a process of its own, beside a test that writes the run's files."""

    def __init__(self, *argv: str) -> None:
        script = (
            "import sys; from hpctrain.cli import log_follow as f; f.POLL_S, f.ASK_S = 0.02, 0.2;"
            "import signal as s; s.signal(s.SIGINT, s.default_int_handler);"
            "from hpctrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "logs", "lm", "-f", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.seen: list[str] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._arrived:
                self.seen.append(line.rstrip("\n"))
                self._arrived.notify_all()

    def wait_for(self, text: str, timeout_s: float = 20) -> None:
        with self._arrived:
            found = self._arrived.wait_for(lambda: any(text in s for s in self.seen), timeout_s)
        assert found, self.seen

    def end(self, timeout_s: float = 20) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        self.errors = self.process.stderr.read()
        self.process.stderr.close()
        self.process.stdout.close()
        return code


@pytest.fixture
def follow():
    started: list[Following] = []

    def start(*argv: str) -> Following:
        started.append(Following(*argv))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


def test_following_goes_across_a_requeue_and_ends_with_the_run(runs, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="PENDING")
    story = Story(runs / "lm").submitted("local-17")
    following = follow()
    story.started(1, "local-17", ("n1", "n2", "n3"))
    story.log(1, 0, "one\ntwo with")
    following.wait_for("one")
    assert "two with" not in following.seen
    story.log(1, 0, " an end\nlast words")
    following.wait_for("two with an end")
    story.ended(1, "preempted", "requeue").add("requeued", 1, by="agent")
    following.wait_for("ended: preempted")
    story.started(2, "local-17", ("n1",))
    story.log(2, 0, "three\n")
    following.wait_for("three")
    story.add("done", 2, step=400)
    story.log(2, 0, "four\n")
    story.ended(2, "completed", "stop")

    assert following.end() == 0
    assert following.seen == [
        FIRST,
        "one",
        "two with an end",
        "last words",
        ENDED,
        SECOND,
        "three",
        "four",
        "--- attempt 2 ended: completed, next: stop ---",
        "--- lm: done ---",
    ]


def test_following_a_run_whose_job_vanished_ends_and_says_lost(runs, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17")
    following = follow()
    story.log(1, 0, "one\n")
    following.wait_for("one")
    (tmp_path / "local" / "local-17" / "job.json").unlink()
    assert following.end() == 0
    assert following.seen[-1] == "--- lm: lost ---"


def test_following_a_cancelled_pending_run_ends(runs, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="PENDING")
    story = Story(runs / "lm").submitted("local-17")
    following = follow()
    story.add("cancel_requested", save=False, job_id="local-17")
    local_job(tmp_path / "local", "local-17", state="CANCELLED")
    assert following.end() == 0
    assert following.seen == ["--- lm: cancelled ---"]


def test_following_an_attempt_ends_with_it(runs, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17", ("n1", "n2", "n3"))
    story.log(1, 0, "one\n")
    following = follow("--attempt", "1")
    following.wait_for("one")
    story.ended(1, "preempted", "requeue")
    assert following.end() == 0
    assert following.seen == [FIRST, "one", ENDED]


def test_following_from_the_tail_shows_only_what_is_new(story, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    following = follow("--tail", "0")
    following.wait_for(SECOND)
    story.log(2, 0, "\nnew\n")
    following.wait_for("new")
    assert following.seen == [SECOND, "", "new"]


def test_ctrl_c_ends_following_quietly_with_130(story, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    following = follow()
    following.wait_for("a3")
    following.process.send_signal(signal.SIGINT)
    assert following.end() == 130
    assert following.errors.strip() == ""


def test_following_a_finished_run_shows_it_and_ends(story, runs, capsys):
    story.add("done", 2, step=1).ended(2, "completed", "stop")
    started = time.monotonic()
    code, out, _ = logs("-f", capsys=capsys)
    assert code == 0
    assert out[-1] == "--- lm: done ---"
    assert "a4 without end" in out
    assert time.monotonic() - started < 5


def test_a_new_ranks_log_is_noticed_while_following(runs, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17")
    following = follow("--rank", "all")
    story.log(1, 0, "x\n")
    following.wait_for("[r0] x")
    story.log(1, 3, "y\n")
    following.wait_for("[r3] y")
    story.add("done", 1, step=1).ended(1, "completed", "stop")
    assert following.end() == 0
