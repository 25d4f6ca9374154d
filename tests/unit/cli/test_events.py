"""`hpctrain events`: every fact of the ledger as one readable line, as long as one wishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.ledger.run.events import read
from hpctrain.observe.logs import follow as log_follow
from hpctrain.observe.logs.follow import EventLines, Reading
from hpctrain.observe.status.event_lines import _WORDS, in_words, line
from tests.support.ledger_runs import Story, event_of, local_job, write_event
from tests.support.patience import PATIENCE_S


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(log_follow, "POLL_S", 0.02)
    monkeypatch.setattr(log_follow, "ASK_S", 0.1)
    yield tmp_path / "runs"
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def story(runs) -> Story:
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17", ("n1", "n2"))
    story.restored(1)
    for first in (1, 11, 21):
        story.steps(1, first, first + 9)
    story.saved(1, 30).ended(1, "preempted", "requeue", step=30)
    return story.started(2, "local-17", ("n1",)).restored(2, 30).steps(2, 31, 40, loss=2.25)


def events(*argv: str, capsys) -> tuple[int, list[str], str]:
    code = main(["events", "lm", *argv])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def words(lines: list[str]) -> list[str]:
    return [line[26:] for line in lines]


def test_each_fact_is_a_line_with_its_time_and_attempt(story, capsys):
    code, out, err = events(capsys=capsys)
    assert (code, err) == (0, "")
    assert out[0] == "2025-11-21 04:40:01       about to submit tok-1"
    assert out[2] == "2025-11-21 04:40:03  a1   started on n[1-2] (job local-17, 4 ranks)"
    assert words(out[3:]) == [
        "nothing to restore, begins at step 0",
        "steps 1 to 30, loss 2.5, 3 marks in 2 s",
        "saved step 30 (4.0 KiB in 100 ms)",
        "ended: preempted, at step 30, asks to be requeued",
        "started on n1 (job local-17, 2 ranks)",
        "restored step 30",
        "steps 31 to 40, loss 2.25, 500 ms/step",
    ]


def test_where_a_program_with_its_own_loop_goes_on_is_its_own_word(story, capsys):
    story.started(3).add("restored", 3, step=40, by="program")
    assert words(events("--kind", "restored", capsys=capsys)[1])[-1] == (
        "the program resumed from step 40"
    )


def test_all_shows_each_step_mark(story, capsys):
    out = words(events("--all", "--kind", "steps", capsys=capsys)[1])
    assert [text.split(",")[0] for text in out] == [
        "steps 1 to 10",
        "steps 11 to 20",
        "steps 21 to 30",
        "steps 31 to 40",
    ]


def test_marks_of_two_attempts_are_never_one_row(story, capsys):
    story.steps(2, 41, 50)
    write_event(story.run, "steps", attempt=3, first=41, last=42, t=story.t)
    out = words(events("--kind", "steps", capsys=capsys)[1])
    assert [text.split(",")[0] for text in out[-2:]] == ["steps 31 to 50", "steps 41 to 42"]


def test_json_is_the_ledger_itself(story, capsys):
    out = events("--json", capsys=capsys)[1]
    assert out == story.run.events.read_text().splitlines()


def test_json_of_a_line_with_half_a_character_is_text_all_the_same(story, capsys):
    with story.run.events.open("ab") as file:
        file.write(b'{"t": 1763700001.0, "kind": "mystery", "x": "\xed\xa0\x80"}\n')
    code, out, _ = events("--json", "--kind", "mystery", capsys=capsys)
    assert code == 0
    assert json.loads(out[0])["kind"] == "mystery"


def test_kinds_attempts_and_time_choose(story, capsys):
    assert words(events("--kind", "saved, attempt_ended", capsys=capsys)[1]) == [
        "saved step 30 (4.0 KiB in 100 ms)",
        "ended: preempted, at step 30, asks to be requeued",
    ]
    assert len(events("--attempt", "2", capsys=capsys)[1]) == 3
    last = read(story.run)[-1].t
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(last - 1))
    assert len(events("--since", moment, capsys=capsys)[1]) == 2


def test_a_row_of_marks_that_began_before_shows_what_came_since(story, capsys):
    times = [event.t for event in read(story.run) if event.kind == "steps"]
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(times[2]))
    out = words(events("--since", moment, "--attempt", "1", capsys=capsys)[1])
    assert out[0] == "steps 21 to 30, loss 2.5, 500 ms/step"


def test_a_tail_is_of_what_would_be_shown(story, capsys):
    assert events("--tail", "2", capsys=capsys)[1] == events(capsys=capsys)[1][-2:]
    assert events("--tail", "0", capsys=capsys)[1] == []


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--attempt", "9"], 4, "lm has no attempt 9; it has 2"),
        (["--attempt", "x"], 2, "--attempt 'x' is neither"),
        (["--since", "soon"], 2, "--since 'soon' is neither"),
    ],
)
def test_bad_input_is_one_clear_line(story, capsys, argv, code, message):
    got, out, err = events(*argv, capsys=capsys)
    assert (got, out) == (code, [])
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_kind_that_is_not_there_says_which_are(story, capsys):
    code, out, err = events("--kind", "savd", capsys=capsys)
    assert (code, out) == (0, [])
    assert "no event of kind savd" in err
    assert "saved" in err


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_a_run_without_a_ledger_is_one_clear_line(story, capsys, follow):
    story.run.events.unlink()
    code, out, err = events(*follow, capsys=capsys)
    assert (code, out) == (4, [])
    assert err == f"hpctrain: error: lm has no ledger: {story.run.events} is not there\n"


@pytest.mark.parametrize(
    ("tail", "shown", "told"),
    [
        (b'{"t": 1, "kind": "done"', 0, "the last line of its ledger is torn"),
        (b'{"t": 1, "kind": "steps", "attempt": 2, "fir', 0, "the last line of its ledger is torn"),
        (b'{"t": 1, "kind": "done", "attempt": 2}', 1, ""),
        (b'torn\n{"t": 1, "kind": "done", "attempt": 2}\n', 1, "1 line of its ledger left out"),
        (
            b'{"t": 1, "kind": "steps", "attempt": 2, "f\n\xff\n',
            0,
            "2 lines of its ledger left out",
        ),
        (b"\0\0\0\0", 0, ""),
    ],
)
def test_what_is_torn_is_left_out_and_told(story, capsys, tail, shown, told):
    before = events(capsys=capsys)[1]
    with story.run.events.open("ab") as file:
        file.write(tail)
    code, out, err = events(capsys=capsys)
    assert code == 0
    assert out[: len(before)] == before
    assert len(out) == len(before) + shown
    assert (told in err) if told else not err
    assert len(err.splitlines()) == bool(told)


# ---- words --------------------------------------------------------------------------------------


def test_a_kind_of_a_newer_version_is_shown_with_its_fields():
    event = event_of(
        0.0, "new_thing", 3, {"count": 2, "name": "x", "none": None, "long": "y" * 500}
    )
    said = in_words(event)
    assert said.startswith("new thing count=2 name=x long=yyy")
    assert "none" not in said
    assert len(said) <= 160


@pytest.mark.parametrize("junk", [None, "text", ["x"], {"a": 1}, 1.5, True])
def test_fields_that_are_missing_or_of_another_type_break_nothing(junk):
    names = ["step", "first", "last", "seconds", "nodes", "skipped", "bad", "versions", "notes"]
    names += ["bytes", "ranks", "overridden", "detail", "world_size", "checkpoint", "name", "cause"]
    for kind in [*_WORDS, "imported"]:
        for fields in ({}, dict.fromkeys(names, junk)):
            event = event_of(0.0, kind, 1, {"token": "t", "job_id": "7", "nodes": [], **fields})
            assert event is None or ("\n" not in line(event) and in_words(event))


def test_a_long_or_many_line_reason_stays_on_one_line():
    event = event_of(
        0.0, "failure", 1, {"rank": 3, "node": "n2", "summary": "bad\nworse " + "x" * 999}
    )
    said = in_words(event)
    assert said.startswith("rank 3 failed on n2: bad worse xxx")
    assert len(said) == 160


# ---- -f -----------------------------------------------------------------------------------------


def test_following_a_finished_run_shows_it_and_ends(story, capsys):
    story.add("done", 2, step=40).ended(2, "completed", "stop")
    code, out, err = events("-f", capsys=capsys)
    assert (code, err) == (0, "")
    assert words(out)[-2:] == ["done at step 40", "ended: completed, nothing follows"]


def test_following_ends_with_the_run(story, tmp_path):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    code = (
        "import sys; from hpctrain.observe.logs import follow as f; f.POLL_S, f.ASK_S = 0.02, 0.2;"
        "from hpctrain.cli.main import main; sys.exit(main(['events', 'lm', '-f']))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env
    ) as following:
        for seen in following.stdout:
            if "restored step 30" in seen:
                break
        story.add("stop_requested", 2, cause="user", rank=0)
        later = [following.stdout.readline()[26:].strip() for _ in range(2)]
        story.add("stopped", 2, step=40).ended(2, "stopped", "stop", step=40)
        later += [text[26:].strip() for text in following.stdout]
        assert following.wait(PATIENCE_S) == 0
    assert later == [
        "steps 31 to 40, loss 2.25, 500 ms/step",
        "stop requested by hpctrain cancel --save",
        "stopped at step 40",
        "ended: stopped, at step 40, nothing follows",
    ]


def test_step_marks_are_gathered_while_one_follows(story, monkeypatch):
    """A line every few seconds would hide what matters."""
    reading = Reading(story.run, EventLines(None, None, None, fold=True, as_json=False))
    assert "steps 31 to 40" not in list(reading.new(last=False))[-1]
    story.steps(2, 41, 50)
    assert list(reading.new(last=False)) == []
    story.steps(2, 51, 60)
    monkeypatch.setattr(log_follow, "CALM_S", 0.0)
    assert [text[26:] for text in reading.new(last=False)] == [
        "steps 31 to 60, loss 2.5, 3 marks in 2 s"
    ]


def test_a_ledger_of_many_marks_is_read_without_parsing_them(story, monkeypatch):
    marks = "".join(
        json.dumps({"t": 1.0 * n, "kind": "steps", "attempt": 2, "first": n, "last": n}) + "\n"
        for n in range(1000)
    )
    with story.run.events.open("a") as file:
        file.write(marks)
    parsed = []
    monkeypatch.setattr("hpctrain.ledger.run.events.parse", _counting(parsed))
    reading = Reading(story.run, EventLines(None, None, None, fold=True, as_json=False))
    assert "1001 marks" in list(reading.new(last=True))[-1]
    assert len(parsed) < 20


def _counting(parsed):
    from hpctrain.ledger.run.events import parse

    def count(raw):
        parsed.append(raw)
        return parse(raw)

    return count


def test_without_a_name_the_newest_run_is_read(story, capsys):
    named = events(capsys=capsys)
    assert main(["events"]) == 0
    assert capsys.readouterr().out.splitlines() == named[1]
