"""No sequence that a run's files hold is obeyed by a terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import pytest

from hpctrain.cli.main import main
from hpctrain.core.terminal import CleanedStream, border, clean, clean_log
from tests.support.ledger_runs import Story, write_event

EVIL = "\x1b]52;c;SGFjaw==\x07\x1b[1A\x1b[2K\x9b2J\x1b[8mhidden\u202e\r"
OBEYED = re.compile(
    r"\x1b(?!\[(?:[01234]|1;3[1-6]|3[1-6])?m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x7f-\x9f]"
)
COMMANDS = (
    "status", "status RUN", "status RUN --json --ranks", "events RUN", "events RUN --json",
    "logs RUN", "logs RUN --rank all --tail 2", "logs RUN --err", "logs RUN --rank batch",
    "report RUN --text", "report RUN -o PAGE", "checkpoints list RUN",
    "checkpoints verify RUN", "resume RUN --dry-run", "cancel RUN --save", "profile RUN",
    "tensorboard RUN --dry-run", "status NEAR", "checkpoints prune RUN --dry-run", "status NONE",
)  # fmt: skip
DRIVER = """
import sys
from hpctrain.cli.main import main
for words in sys.argv[1:]:
    print("returned:", main(words.split("\\1")), flush=True)
"""


@pytest.fixture
def run(tmp_path):
    """A run in whose files a stranger's sequence stands wherever text can stand."""
    story = Story(tmp_path / "runs" / f"lm{EVIL.replace('/', '')}x")
    story.submitted("7").started(1, "7", (f"n{EVIL}", "n2"), by=EVIL).restored(
        1, 0, [{"step": 3, "name": EVIL, "reason": EVIL}]
    )
    story.add("phase", 1, name="first_step", device=EVIL).add("mesh", 1, engine=EVIL, dp_shard=4)
    story.steps(1, 1, 8).add(EVIL, 1, **{EVIL: EVIL}).add("save_failed", 1, step=8, why=EVIL)
    story.add("failure", 1, rank=0, node=EVIL, kind_of=EVIL, summary=EVIL, traceback=f"a\n{EVIL}")
    story.ended(1, "crashed", "stop", detail=EVIL, step=8)
    story.add("run_stopped", 1, reason="crashed", exit_code=93, detail=EVIL)
    logged = EVIL.replace("\x1b[8m", "")  # a program's own colours stay, whatever they are
    story.log(1, 0, f"Error {logged} \x1b[31mred\x1b[0m\nlast {logged}\n")
    (story.run.checkpoints / f"step-0000000008.{EVIL}").mkdir(parents=True)
    (story.run.checkpoints / "step-0000000004").mkdir()
    story.run.jobs.mkdir()
    (story.run.jobs / "tok-1.out").write_text(f"{logged}\n")
    write_event(story.run, "cancel_requested", save=True, job_id="7")
    return story.run


def _on_a_terminal(commands, **env):
    """What a terminal gets of these commands, and how each one ended."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *commands], stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm"} | env,
    )  # fmt: skip
    os.close(theirs)
    got = b""
    while True:
        try:
            got += os.read(ours, 65536)
        except OSError:  # the terminal is gone: all have left it
            break
    os.close(ours)
    process.wait()
    return got


def test_no_command_lets_a_sequence_through_to_a_terminal(run, tmp_path):
    put = {"RUN": str(run.root), "PAGE": str(tmp_path / "page.html"), "NEAR": "lm-near"}
    lines = ["\1".join(put.get(word, word) for word in one.split()) for one in COMMANDS]
    lines = [f"{one}\1--runs\1{run.root.parent}" if "RUN" not in one else one for one in lines]
    got = _on_a_terminal(lines, HPCTRAIN_RUNS=str(run.root.parent)).decode(errors="replace")
    assert "Traceback" not in got
    assert got.count("returned:") == len(COMMANDS)
    assert len(re.findall(r"\?\]52;c;", got)) > len(COMMANDS)
    assert "\x1b[31mred\x1b[0m" in got
    assert [got[max(0, m.start() - 60) : m.end() + 20] for m in OBEYED.finditer(got)] == []


def test_a_file_gets_a_ranks_lines_as_they_are_and_titles_without_sequences(run, capfdbinary):
    assert main(["logs", str(run.root)]) == 0
    out = capfdbinary.readouterr().out
    assert b"last \x1b]52;c;SGFjaw==\x07\x1b[1A" in out
    for line in out.splitlines():
        assert b"last" in line or b"Error" in line or not OBEYED.search(line.decode())


def test_what_the_terminal_has_no_character_for_is_a_question_mark(run):
    got = _on_a_terminal([f"status\1{run.root}"], PYTHONIOENCODING="latin-1")
    assert b"Traceback" not in got
    assert b"returned: 0" in got


def test_a_bugs_traceback_is_cleaned_too():
    code = "from hpctrain.core.terminal import border\nwith border(): raise ValueError('\\x1b[2J')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert told.stderr.endswith("ValueError: ?[2J\n")


def test_an_ascii_terminal_is_no_way_round(run):
    got = _on_a_terminal([f"events\1{run.root}"], PYTHONIOENCODING="ascii")
    assert b"Traceback" not in got
    assert not OBEYED.search(got.decode("ascii"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"), ("\x1b[1mbold\x1b[0m", "\x1b[1mbold\x1b[0m"), ("\x1b[8mx", "?[8mx"),
        ("\x1b[2Jx", "?[2Jx"), ("a\rb\x08", "a?b?"), ("\x9b2J", "?2J"), ("ü→", "ü→"),
    ],
)  # fmt: skip
def test_colours_as_ours_pass_and_nothing_else(text, shown):
    assert clean(text) == shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"\x1b[38;5;9mx\x1b[0m", b"\x1b[38;5;9mx\x1b[0m"), (b"\x1b]0;t\x07", b"?]0;t?"),
        (b" 1%\r 2%\r 3%\r", b" 1% ..  3%"), (b"\xc3\xbc\xff\xc2\x9b2J", b"\xc3\xbc\xff?2J"),
    ],
)  # fmt: skip
def test_a_ranks_line_keeps_its_colours(line, shown):
    assert clean_log(line) == shown


def test_the_border_is_put_up_once_and_taken_down(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    with border(), border():
        assert isinstance(sys.stdout, CleanedStream)
        assert sys.stdout.stream is out
        print("\x1b[2J→")
    assert sys.stdout is out
    out.flush()
    assert out.buffer.getvalue() == b"?[2J?\n"
