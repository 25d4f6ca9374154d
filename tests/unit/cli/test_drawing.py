"""Tables and screens are drawn by rich, which nobody imports who draws nothing."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console
from rich.text import Text

from hpctrain.core.drawing import Column, Framed, drawn, echo_table, facts, fitted
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.observe.status.screen import StatusScreen
from hpctrain.observe.status.status import Answer, status_of
from tests.support.ledger_runs import Story

MARKUP = "[red]lm[/red] :warning: [link=file:///etc/passwd]x[/link]"


@pytest.fixture
def story(tmp_path, monkeypatch) -> Story:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    story = Story(tmp_path / "runs" / "lm").submitted("local-1").started(1, "local-1")
    return story.restored(1).steps(1, 1, 9).ended(1, "crashed", "stop")


@pytest.mark.parametrize(
    "command",
    [
        "--help", "status --help", "status lm --json", "status --json", "logs lm", "events lm",
        "submit --json --dry-run --cluster local train.py",
        "checkpoints list lm --json", "checkpoints verify lm --json",
    ],
)  # fmt: skip
def test_a_command_that_draws_nothing_does_without_rich(story, command):
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from hpctrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, *command.split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.stdout or done.returncode


def test_status_imports_only_what_its_screen_needs(story):
    code = (
        "import sys; from hpctrain.cli.main import main; code = main(['status', 'lm'])\n"
        "heavy = {'rich.live', 'rich.progress', 'rich.syntax', 'rich.markdown', 'pygments'}\n"
        "sys.exit(code or ', '.join(heavy & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lm  stopped" in done.stdout or "lm  failed" in done.stdout


def test_names_are_no_markup(story, capsys):
    table = fitted([Column(MARKUP, [MARKUP])], 100)
    assert drawn(table, 100, color=False).splitlines() == [MARKUP, MARKUP]
    assert drawn(facts([("label", MARKUP)]), 100) == f"label       {MARKUP}"
    echo_table([(MARKUP, 1)], header=(MARKUP, "n"))
    assert capsys.readouterr().out.count(MARKUP) == 2
    story.add("failure", 1, rank=0, node=MARKUP, summary=MARKUP, traceback=MARKUP)
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(
        StatusScreen(status_of(RunHistory.read(story.run), Answer(), name=MARKUP)), crop=False
    )
    assert console.file.getvalue().count(MARKUP) > 3


def test_a_live_screen_obeys_no_sequence_of_a_name():
    console = Console(file=io.StringIO(), width=60, height=9, force_terminal=True)
    lines = [f"{number} \x1b]52;c;SGFjaw==\x07\x1b[2J\x9b1A" for number in range(20)]
    console.print(Framed(Text("\n".join(lines)), "again every 5 s"))
    shown = console.file.getvalue()
    assert "0 ?]52;c;SGFjaw==?[2J?1A" in shown
    assert "... 14 more lines in a taller terminal" in shown
    assert not re.search(r"\x1b(?!\[[0-9;]*m)|\x9b", shown)


def test_a_screen_can_be_drawn_to_a_picture(story):
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(
        StatusScreen(status_of(RunHistory.read(story.run), Answer(), name="lm")), crop=False
    )
    picture = console.export_svg(title="hpctrain status lm")
    assert "crashed" in picture
    assert "hpctrain&#160;resume&#160;lm" in picture


COLUMNS = (
    Column("name", ["a-long-name-of-a-run"], shrink=True),
    Column("job", ["4711"], drop=1),
    Column("size", ["12,345"], short=Column("size", ["12345"])),
    Column("for", [Text("7h31m", "green")], right=True, drop=2),
)


@pytest.mark.parametrize(
    ("width", "row"),
    [
        (41, "a-long-name-of-a-run  4711  12,345  7h31m"),
        (40, "a-long-name-of-a-run  12,345  7h31m"),
        (34, "a-long-name-of-a-run  12345  7h31m"),
        (33, "a-long-name-of-a-..  12345  7h31m"),
        (22, "a-long..  12345  7h31m"),
        (21, "a-long-name-..  12345"),
        (15, "a-long..  12345"),
    ],
)
def test_what_can_be_missed_is_shortened_cut_and_left_out_in_this_order(width, row):
    lines = drawn(fitted(COLUMNS, width), width).splitlines()
    assert lines[-1] == row
    assert max(map(len, lines)) <= width


def test_a_wide_character_takes_two_columns():
    columns = [Column("where", ["節点節点節点"], shrink=True), Column("n", ["1"])]
    assert drawn(fitted(columns, 12), 12).splitlines()[-1] == "節点節 ..  1"
