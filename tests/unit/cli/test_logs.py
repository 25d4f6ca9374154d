"""`hpctrain logs`: every line once, across attempts, until the run ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.cli.options import parse_since
from hpctrain.core.base.records import JobInfo
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import RunState
from hpctrain.ledger.run.attempt_files import LogFile, LogMark, mark_line, tail_offset, times_path
from hpctrain.ledger.run.events import Tail, read
from hpctrain.observe.logs import follow as log_follow
from hpctrain.observe.logs.sections import LogSelection, Printer, Trouble, is_trouble
from hpctrain.observe.status import reader
from hpctrain.observe.status.status import Answer
from tests.support.fuzzing import Faults, cases, chances
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


def marker(*parts: str) -> str:
    dot, rule = " \N{MIDDLE DOT} ", "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * 2
    return f"{rule} {dot.join(parts)} {rule}"


FIRST = marker("attempt 1 on n[1-3]", "job local-17")
SECOND = marker("attempt 2 on n1", "job local-17")
ENDED = marker("attempt 1 ended: preempted", "requeued")


@cases(short=12, long=1200)
def test_whatever_the_logs_hold_they_are_shown(story, capsysbinary, begin, end):
    faults = Faults()
    log = story.run.rank_log(1, 0)
    words = (
        *(b"Traceback (most recent call last):", b"error", b"\n", b"  ", b"9" * 5000, b"a" * 9000),
        *(b"nccl warn", b"\xff\xfe", b"\0", b"0: None", b"\r", b"|", b"+", b"\x1b[2J"),
    )
    for number, chance in chances(begin, end):
        content = b"".join(chance.choices(words, k=chance.randrange(1, 40)))
        log.write_bytes(content)
        times_path(log).write_bytes(chance.choice((b"", b"[", b"1 2\n", b"9" * 5000, content)))
        for options in ((), ("--err",), ("--grep", "[0-9]"), ("--tail", "3"), ("--json",),
                        ("--rank", "all", "--since", "1h"), ("--err", "-C", "2")):  # fmt: skip
            faults.of(f"case {number} {options}", lambda o=options: main_ends_well(*o))
        capsysbinary.readouterr()

    assert faults.found == []


def main_ends_well(*options):
    if main(["logs", "lm", *options]):
        raise AssertionError


# ---- without -f ---------------------------------------------------------------------------------


def test_rank_0_is_shown_attempt_by_attempt_with_markers(story, capsys):
    code, out, err = logs(capsys=capsys)
    assert (code, err) == (0, "")
    assert out == [FIRST, "a1", "a2", ENDED, SECOND, "a3", "a4 without end"]


def test_all_ranks_are_told_apart_by_a_prefix(story, capsys):
    _, out, _ = logs("--rank", "all", "--attempt", "1", capsys=capsys)
    assert out == [FIRST, "[a1 r0 n1] a1", "[a1 r0 n1] a2", "[a1 r1 n1] b1", "[a1 r10] k1", ENDED]


def test_one_or_several_ranks_can_be_chosen(story, capsys):
    assert logs("--rank", "1", capsys=capsys)[1] == [FIRST, "b1", ENDED, SECOND]
    out = logs("--rank", "10,0", "--attempt", "1", capsys=capsys)[1]
    assert out == [FIRST, "[a1 r0 n1] a1", "[a1 r0 n1] a2", "[a1 r10] k1", ENDED]


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
    texts = {"tok-1.out": "x\n", "tok-1-0.out": "y\n", "tok-10.out": "z\n"}
    for order, (name, text) in enumerate(texts.items()):
        (story.run.jobs / name).write_text(text)
        os.utime(story.run.jobs / name, (story.t + order, story.t + order))
    _, out, _ = logs("--rank", "batch", capsys=capsys)
    first, second = marker("job local-17", "tok-1"), marker("job local-170", "tok-10")
    assert out == [first, "[batch] x", "[agent 0] y", second, "z"]


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
    _, _, err = logs("--rank", "5", capsys=capsys)
    assert "rank 5 has printed nothing" in err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--rank", "zero"], 2, "'zero' is neither a rank"),
        (["--rank", ""], 2, "'' is neither a rank"),
        (["--attempt", "9"], 4, "lm has no attempt 9; it has 2"),
        (["--attempt", "0"], 2, "--attempt '0' is neither"),
        (["--attempt", "last"], 2, "--attempt 'last' is neither"),
        (["--since", "yesterday"], 2, "--since 'yesterday' is neither a span like 10m"),
        (["--grep", "(loss"], 2, "--grep '(loss' is no regular expression: missing )"),
        (["-C", "2"], 2, "neither is given"),
    ],
)
def test_bad_input_is_one_clear_line(story, capsys, argv, code, message):
    got, _, err = logs(*argv, capsys=capsys)
    assert got == code
    assert message in err
    assert len(err.splitlines()) == 1


# ---- what stands between attempts ---------------------------------------------------------------


def test_markers_tell_the_cause_the_loss_and_what_was_restored(runs, capsys):
    story = Story(runs / "lm").submitted("17").started(1, "17", ("gpu03", "gpu04"))
    story.restored(1).steps(1, 1, 300).saved(1, 300).steps(1, 301, 310)
    story.add("failure", 1, rank=3, node="gpu04", kind_of="exception", summary="ValueError: x")
    story.ended(1, "crashed", "requeue", step=310).started(2, "17", ("gpu03",))
    story.add(
        "restored", 2, step=300, checkpoint="step-0000000300",
        from_world_size=4, world_size=2, seconds=38.2,
    )  # fmt: skip
    story.log(2, 0, "on\n")
    story.ended(2, "node_failed", "stop", detail="no sign of life from gpu03")

    assert logs(capsys=capsys)[1] == [
        marker("attempt 1 on gpu[03-04]", "job 17"),
        marker("attempt 1 ended: crashed (rank 3: ValueError: x)", "10 steps lost", "requeued"),
        marker(
            "attempt 2 on gpu03", "job 17", "restored step 300 (4\N{RIGHTWARDS ARROW}2 ranks, 38 s)"
        ),
        "on",
        marker("attempt 2 ended: node_fail (no sign of life from gpu03)", "0 steps lost"),
    ]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"step": 0, "checkpoint": None, "seconds": 0.0}, "no checkpoint, begins at step 0"),
        ({"step": 1200, "by": "program"}, "the program resumed from step 1,200"),
        (
            {"step": 30, "checkpoint": "a", "read_from": "memory", "from_world_size": 2},
            "restored step 30 (from memory, 2\N{RIGHTWARDS ARROW}2 ranks)",
        ),
        ({"step": 30, "checkpoint": "a"}, "restored step 30"),
    ],
)
def test_what_was_restored_is_told_once_when_it_comes_after_the_title(runs, fields, told):
    story = Story(runs / "lm").submitted("17").started(1, "17").ended(1, "preempted", "requeue")
    story.started(2, "17", ("n1",))
    out = io.BytesIO()
    printer = Printer(story.run, out, LogSelection(), live=True)
    printer.show(RunHistory.read(story.run), over=False)
    story.add("restored", 2, **fields)
    printer.show(RunHistory.read(story.run), over=False)
    printer.show(RunHistory.read(story.run), over=False)
    assert out.getvalue().decode().splitlines()[1:] == [
        marker("attempt 2 on n1", "job 17"),
        marker("attempt 1 ended: preempted", "requeued"),
        marker(f"attempt 2: {told}"),
    ]


# ---- several ranks: the order of time -----------------------------------------------------------


def times(story: Story, attempt: int, rank: int, *marks: tuple[float, int]) -> None:
    path = times_path(story.run.rank_log(attempt, rank))
    path.write_bytes(b"".join(mark_line(LogMark(*mark)) for mark in marks))


@pytest.fixture
def pair(runs) -> Story:
    """Ranks 0 and 1 of one attempt, begun at `story.t`; rank 1 printed between rank 0's lines."""
    story = Story(runs / "lm").submitted("17").started(1, "17", ("n1",))
    story.log(1, 0, "a1\na2\na3\n")
    story.log(1, 1, "b1\nb2\n")
    times(story, 1, 0, (story.t + 10, 3), (story.t + 30, 6), (story.t + 300, 6), (story.t + 301, 9))
    times(story, 1, 1, (story.t + 20, 3), (story.t + 100, 3), (story.t + 101, 6))
    story.t += 400
    return story.ended(1, "preempted", "requeue")


def test_lines_of_several_ranks_come_in_the_order_of_time(pair, capsys):
    out = logs("--rank", "all", capsys=capsys)[1]
    assert [line.split()[-1] for line in out[1:-1]] == ["a1", "b1", "a2", "b2", "a3"]


def test_a_line_as_json_says_whose_it_is_and_about_when_it_came(pair, capsys):
    begun = read(pair.run)[-2].t
    found = [json.loads(line) for line in logs("--rank", "1", "--json", capsys=capsys)[1]]
    assert found == [
        {"attempt": 1, "rank": 1, "node": "n1", "source": "a1 r1 n1", "t": begun + t, "text": text}
        for t, text in [(20, "b1"), (101, "b2")]
    ]


def test_a_line_whose_time_is_not_on_record_has_none_as_json(story, capsys):
    found = [json.loads(line) for line in logs("--attempt", "1", "--json", capsys=capsys)[1]]
    assert [(one["text"], one["t"]) for one in found] == [("a1", None), ("a2", None)]


def test_ranks_that_are_followed_take_turns_in_each_look(runs):
    """Not file after file: what came between two looks is laid over each other."""
    story = Story(runs / "lm", t=time.time() - 100).submitted("17").started(1, "17", ("n1",))
    out = io.BytesIO()
    printer = Printer(story.run, out, LogSelection(ranks="all"), live=True)
    for look in range(3):
        for rank in (0, 1):
            story.log(1, rank, f"{look}.1\n{look}.2\n")
        printer.show(RunHistory.read(story.run), over=False)
    told = [line.split()[1:] for line in out.getvalue().decode().splitlines()[1:]]
    assert [text for _, _, text in told] == [
        f"{look}.{part}" for look in range(3) for part in (1, 1, 2, 2)
    ]
    assert {rank for rank, _, _ in told} == {"r0", "r1"}


# ---- --since ------------------------------------------------------------------------------------


def since(t: float) -> tuple[str, str]:
    return "--since", datetime.fromtimestamp(t, tz=UTC).isoformat()


def test_since_takes_the_lines_that_may_be_of_that_time(pair, capsys):
    begun = read(pair.run)[-2].t
    code, out, err = logs("--rank", "all", *since(begun + 50), capsys=capsys)
    assert (code, err) == (0, "")
    assert [line.split()[-1] for line in out[1:-1]] == ["b2", "a3"]
    out = logs("--rank", "all", *since(begun + 200), capsys=capsys)[1]
    assert [line.split()[-1] for line in out[1:-1]] == ["a3"]


def test_since_passes_over_attempts_that_ended_before(pair, capsys):
    pair.started(2, "17", ("n1",)).log(2, 0, "new\n")
    assert logs(*since(pair.t - 0.5), capsys=capsys)[1][1:] == ["new"]


def test_since_a_half_line_shows_the_whole_line(runs, capsys):
    story = Story(runs / "lm").submitted("17").started(1, "17", ("n1",))
    story.log(1, 0, "old\nthis is a long line\n")
    times(story, 1, 0, (story.t + 10, 9), (story.t + 70, 24))
    assert logs(*since(story.t + 20), capsys=capsys)[1][1:] == ["this is a long line"]


def test_since_says_so_where_times_are_not_on_record(story, capsys):
    log = story.run.rank_log(2, 0)
    changed = log.stat().st_mtime
    code, out, err = logs(*since(changed - 5), capsys=capsys)
    assert code == 0
    assert out == [SECOND, "a3", "a4 without end"]
    assert "which line is not on record" in err
    assert len(err.splitlines()) == 1


def test_a_log_that_was_last_changed_before_needs_no_times(story, capsys):
    log = story.run.rank_log(2, 0)
    code, out, err = logs(*since(log.stat().st_mtime + 5), capsys=capsys)
    assert (code, out) == (0, [SECOND])
    assert "nothing was printed since then" in err


@pytest.mark.parametrize(
    ("text", "ago"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("1.5h", 5400)]
)
def test_spans_of_time(text, ago):
    assert parse_since(text, now=1_000_000.0) == 1_000_000.0 - ago


def test_a_time_of_day_is_the_last_one_that_has_been():
    now = datetime(2026, 1, 2, 0, 10).astimezone().timestamp()
    assert parse_since("0:05", now) == now - 300
    assert parse_since("23:50:00", now) == now - 1200


@pytest.mark.parametrize("today", ["2026-03-29", "2026-10-25"])
def test_a_time_of_yesterday_is_by_the_clock_where_summer_time_begins_or_ends(today, monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        now = datetime.fromisoformat(f"{today}T12:00").timestamp()
        yesterday = f"{today[:-2]}{int(today[-2:]) - 1}"
        for text in ("23:50", "23:50:00"):
            assert parse_since(text, now) == parse_since(f"{yesterday}T23:50")
        assert parse_since("4:15:30", now) == parse_since(f"{today}T04:15:30")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_time_with_a_zone_is_of_that_zone():
    assert parse_since("1970-01-01T01:00:00+01:00") == 0
    assert parse_since("1970-01-01T00:00:00Z") == 0


# ---- --grep and --err ---------------------------------------------------------------------------


def test_grep_shows_the_lines_that_match_and_the_titles_above_them(story, capsys):
    assert logs("--grep", r"a\d$", capsys=capsys)[1] == [FIRST, "a1", "a2", ENDED, SECOND, "a3"]
    assert logs("--grep", "with", capsys=capsys)[1] == [SECOND, "a4 without end"]
    code, out, err = logs("--grep", "zebra", capsys=capsys)
    assert (code, out) == (0, [])
    assert "no line of that kind" in err


def test_context_is_of_the_same_rank_and_no_line_comes_twice(runs, capsys):
    story = Story(runs / "lm").submitted("17").started(1, "17", ("n1",))
    story.log(1, 0, "1\n2\nhit\n3\n4\nhit\n5\n6\n")
    out = logs("--grep", "hit", "-C", "1", capsys=capsys)[1]
    assert out[1:] == ["2", "hit", "3", "4", "hit", "5"]


def test_the_tail_of_a_filter_is_of_what_it_lets_through(story, capsys):
    story.log(1, 0, "hit 1\nhit 2\n")
    story.log(2, 0, "\nhit 3\nno\n")
    assert logs("--grep", "hit", "--tail", "1", capsys=capsys)[1] == [SECOND, "hit 3"]
    out = logs("--grep", "hit", "--tail", "2", capsys=capsys)[1]
    assert out == [FIRST, "hit 2", ENDED, SECOND, "hit 3"]


TRACE = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     step()
[rank1]: RuntimeError: shapes differ
"""


def test_err_shows_whole_tracebacks_of_all_ranks_and_the_batch_side(story, capsys):
    story.log(2, 1, f"step 1: loss 2.0\n{TRACE}step 2: loss 1.9\n")
    story.run.jobs.mkdir()
    (story.run.jobs / "tok-1.out").write_text(
        "srun: ok\nslurmstepd: error: *** NODE n2 FAILED ***\n"
    )
    out = logs("--err", capsys=capsys)[1]
    traced = [f"[a2 r1 n1] {line}" for line in TRACE.splitlines()]
    batch = "[job local-17 batch] slurmstepd: error: *** NODE n2 FAILED ***"
    assert out == [SECOND, *traced, marker("job local-17", "tok-1"), batch]
    assert logs("--err", "--rank", "0", capsys=capsys)[1] == []


@pytest.mark.parametrize(
    ("line", "trouble"),
    [
        ("ValueError: x", True),
        ("n1: slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", True),
        ("n1:1:2 [0] ... NCCL WARN Cuda failure", True),
        ("CUDA error: an illegal memory access", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to", True),
        ("Killed", True),
        ("Segmentation fault (core dumped)", True),
        ("srun: error: Node failure on n2", True),
        ("step 10: loss 2.0, error rate 0.1", True),
        ("0 errors, 3 warnings", False),
        ("errors=0", False),
        ("last_error: None", False),
        ("no exceptions so far", False),
        ("error_rate 0.2", False),
        ("skilled workers", False),
        ("step 10: loss 2.0", False),
    ],
)
def test_which_lines_tell_of_trouble(line, trouble):
    assert is_trouble(line.encode()) is trouble


def shown(text: str) -> list[str]:
    wanted = Trouble()
    return [line for line in text.splitlines() if wanted(line.encode())]


def test_a_chained_traceback_is_whole_and_what_follows_is_not_part_of_it():
    text = (
        "before\nTraceback (most recent call last):\n  File 1\n    x = 1\n    ~~^~~\nKeyError\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 2\n\n    y()\nMyProblem\nafter\n"
    )
    assert shown(text) == [
        line for line in text.splitlines() if line and line not in {"before", "after"}
    ]


def test_a_line_of_another_kind_within_a_prefixed_traceback_does_not_end_it():
    lines = TRACE.splitlines()
    text = "\n".join([*lines[:2], "step 7: loss 1.0", *lines[2:], "[rank1]: bye"])
    assert shown(text) == lines


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
    printer = Printer(story.run, out, LogSelection())
    printer.show(RunHistory.read(story.run), over=False)
    story.log(1, 0, "late\n")
    printer.show(RunHistory.read(story.run), over=False)
    printer.show(RunHistory.read(story.run), over=True)
    assert out.getvalue().decode().splitlines()[1:] == [
        "late",
        marker("attempt 1 ended: crashed", "requeued"),
    ]


def test_a_following_terminal_gets_colour_and_a_pipe_does_not(story, monkeypatch, capsys):
    out = io.BytesIO()
    printer = Printer(story.run, out, LogSelection(ranks="all", attempt=1, color=True))
    printer.show(RunHistory.read(story.run), over=True)
    assert b"\033[2m[a1 r0 n1]\033[0m a1\n" in out.getvalue()
    assert "\033" not in "".join(logs("--rank", "all", capsys=capsys)[1])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_enough_ends_it_quietly(story, unbuffered):
    story.log(1, 0, "x\n" * 200_000)
    code = "import sys; from hpctrain.cli.main import main; sys.exit(main(['logs', 'lm']))"
    paths = {"PYTHONPATH": str(Path(__file__).parents[3])}
    env = {**os.environ, **paths, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


# ---- -f -----------------------------------------------------------------------------------------


class Following:
    """`hpctrain logs -f` in a process of its own, beside a test that writes the run's files."""

    def __init__(self, *argv: str) -> None:
        script = (
            "import sys; from hpctrain.observe.logs import follow as f;"
            " f.POLL_S, f.ASK_S = 0.02, 0.2;"
            "import signal as s; s.signal(s.SIGINT, s.default_int_handler);"
            "from hpctrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "logs", "lm", "-f", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
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
    assert [line for line in following.seen if "waits in the queue" not in line] == [
        FIRST,
        "one",
        "two with an end",
        "last words",
        ENDED,
        SECOND,
        "three",
        "four",
        marker("attempt 2 ended: completed"),
        marker("lm: done"),
    ]


def test_what_is_waited_for_stands_below_the_end_of_the_attempt_before(runs, monkeypatch):
    story = Story(runs / "lm").submitted("17").started(1, "17", ("n1",))
    story.ended(1, "preempted", "requeue")
    out = io.BytesIO()
    printer = Printer(story.run, out, LogSelection(), live=True)
    watch = log_follow.EndWatch(story.run, None, log_follow.notes_to(printer))
    watch.add(read(story.run))
    start = time.time() + 3600
    job = JobInfo("17", "PENDING", alive=True, reason="Resources", restarts=1, start_time=start)
    monkeypatch.setattr(reader, "ask", lambda *_: Answer(job))
    assert not watch.is_over()
    follower = log_follow.Follower(printer, Tail(story.run.events), watch)
    for _ in range(3):
        follower._show_and_wait()
    when = time.strftime("%H:%M:%S", time.localtime(start))
    assert out.getvalue().decode().splitlines()[1:] == [
        marker("attempt 1 ended: preempted", "requeued"),
        marker(f"job 17 waits in the queue (Resources), expected start {when}"),
    ]


def test_a_job_that_is_suspended_is_told_of_while_its_logs_stand_still(runs, monkeypatch):
    story = Story(runs / "lm").submitted("17").started(1, "17", ("n1",))
    out = io.BytesIO()
    printer = Printer(story.run, out, LogSelection(), live=True)
    watch = log_follow.EndWatch(story.run, None, log_follow.notes_to(printer))
    watch.add(read(story.run))
    job = JobInfo("17", "SUSPENDED", alive=True)
    monkeypatch.setattr(reader, "ask", lambda *_: Answer(job))

    monkeypatch.setattr(log_follow, "ASK_S", 0.0)

    for _ in range(3):
        assert not watch.is_over()

    told = marker("job 17 is suspended, and stands still")
    assert out.getvalue().decode().splitlines().count(told) == 1
    assert watch.state is RunState.SUSPENDED


def test_a_scheduler_is_not_asked_while_the_run_is_heard_of(runs, monkeypatch):
    asked = []
    monkeypatch.setattr(reader, "ask", lambda *_: asked.append(1) or Answer(None))
    story = Story(runs / "lm").submitted("17").started(1, "17", ("n1",))
    watch = log_follow.EndWatch(story.run, None, lambda _text: None)
    watch.add(read(story.run))
    assert not watch.is_over(heard=True)
    assert not asked
    assert not watch.is_over()
    assert asked


def test_following_a_run_whose_job_vanished_ends_and_says_lost(runs, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17")
    following = follow()
    story.log(1, 0, "one\n")
    following.wait_for("one")
    (tmp_path / "local" / "local-17" / "job.json").unlink()
    assert following.end() == 0
    assert following.seen[-1] == marker("lm: lost")


def test_following_a_cancelled_pending_run_ends(runs, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="PENDING")
    story = Story(runs / "lm").submitted("local-17")
    following = follow()
    following.wait_for("job local-17 waits in the queue")
    story.add("cancel_requested", save=False, job_id="local-17")
    local_job(tmp_path / "local", "local-17", state="CANCELLED")
    assert following.end() == 0
    assert following.seen == [marker("job local-17 waits in the queue"), marker("lm: cancelled")]


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
    code, out, _ = logs("-f", capsys=capsys)
    assert code == 0
    assert out[-1] == marker("lm: done")
    assert "a4 without end" in out


def test_a_new_ranks_log_is_noticed_while_following(runs, tmp_path, follow):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17")
    following = follow("--rank", "all")
    story.log(1, 0, "x\n")
    following.wait_for("[a1 r0 n1] x")
    story.log(1, 3, "y\n")
    following.wait_for("[a1 r3 n2] y")
    story.add("done", 1, step=1).ended(1, "completed", "stop")
    assert following.end() == 0


def test_without_a_name_the_newest_run_is_read(story, capsys):
    named = logs(capsys=capsys)
    assert main(["logs"]) == 0
    assert capsys.readouterr().out.splitlines() == named[1]


def test_a_rank_that_the_run_never_had_is_named_with_those_that_it_has(story, capsys):
    code, out, err = logs("--rank", "6,7", capsys=capsys)
    assert (code, out) == (4, [])
    assert err == "hpctrain: error: lm has no rank 6; it has ranks 0 to 5\n"
