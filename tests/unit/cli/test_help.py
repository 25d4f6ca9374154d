"""`hpctrain help`, `completion` and the completions behind Tab."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpctrain.cli.main import _PAGES, COMMANDS, EXIT_CODES_TOPIC, main, pages
from hpctrain.errors import EXIT_CODES
from tests.support.ledger_runs import Story

TOP = Path(__file__).parents[3]


def helped(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["help", *words])
    return (code, *capsys.readouterr())


@pytest.mark.parametrize("name", ["submit", "rm", "completion"])
def test_help_of_a_command_is_its_own(capsys, name):
    _, out, _ = helped(capsys, name)
    assert main([name, "--help"]) == 0
    assert out == capsys.readouterr().out


def test_help_of_a_command_of_a_group_and_of_nothing(capsys):
    assert helped(capsys, "sites", "validate")[1].startswith("Usage: hpctrain sites validate ")
    assert helped(capsys)[1].startswith("Usage: hpctrain ")


def test_a_page_and_the_exit_codes_are_printed(capsys):
    assert helped(capsys, "watching")[1].startswith("# Watch a run")
    assert helped(capsys, "docs/watching.md")[1].startswith("# Watch a run")
    out = helped(capsys, "exit-codes")[1]
    assert [line.split()[0] for line in out.splitlines()] == [str(code) for code in EXIT_CODES]
    assert re.search("^getting-started +Getting started", helped(capsys, "topics")[1], re.MULTILINE)


def test_a_command_that_has_a_page_too_names_it(capsys):
    assert helped(capsys, "doctor")[1].endswith("More: hpctrain help doctor.md\n")
    assert helped(capsys, "doctor.md")[1].startswith("# Why a job died")
    assert helped(capsys, "lint")[1].endswith("More: hpctrain help check.md\n")


def test_each_command_that_names_a_page_of_another_name_leads_to_one():
    assert set(_PAGES) <= set(COMMANDS) - set(pages())
    assert set(_PAGES.values()) <= set(pages())


def test_what_is_neither_is_one_line_with_the_nearest(capsys):
    code, _, err = helped(capsys, "wachting")
    assert code == 4
    assert "no command and no page is called 'wachting'; did you mean watching?" in err


def _messages(path: Path) -> list[str]:
    """The strings of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    bodies = (getattr(node, "body", None) for node in ast.walk(tree))
    found = (below for body in bodies if isinstance(body, list) for below in body)
    docs = {id(below.value) for below in found if isinstance(below, ast.Expr)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [n.value for n in nodes if isinstance(n.value, str) and id(n) not in docs]


@pytest.mark.check
def test_no_message_names_a_file_that_is_not_installed_and_each_page_that_is_named_is_there():
    named = re.compile(r"hpctrain help ([a-z][a-z-]+(?:\.md)?)")
    for path in sorted((TOP / "hpctrain").rglob("*.py")):
        for text in _messages(path):
            if path.name != "rule.py":  # the anchor of a rule, for programs
                assert not re.search(r"docs/[a-z-]+\.md|examples/\w+\.py", text), (path, text)
            for topic in named.findall(text) if path.parent.name != "cli" else ():
                page = topic.removesuffix(".md")
                assert page in {*pages(), EXIT_CODES_TOPIC}, (path, topic)
                assert topic.endswith(".md") == (page in COMMANDS), (path, topic)


def test_every_page_is_in_the_wheel():
    build = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    carried = build["targets"]["wheel"]["force-include"]
    wanted = {f"docs/{path.name}": f"hpctrain/_data/docs/{path.name}" for path in pages().values()}
    assert wanted.items() <= carried.items()


# ---- Tab


def completed(line: str, cwd: Path, **env: str) -> list[str]:
    """What bash would be offered for the last word of a line."""
    words = line.split(" ")
    code = "import sys; from hpctrain.cli.main import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            **env,
            "_HPCTRAIN_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "PYTHONPATH": str(TOP),
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return [found.partition(",")[2] for found in done.stdout.splitlines() if found]


@pytest.mark.parametrize("verb", ["status", "logs", "cancel", "resume", "rm", "checkpoints list"])
def test_tab_completes_the_names_of_runs(tmp_path, verb):
    for name in ("lm-1", "lm-2", "other"):
        Story(tmp_path / "runs" / name)
    (tmp_path / "runs" / "lm-3").mkdir()
    assert completed(f"hpctrain {verb} lm", tmp_path) == ["lm-1", "lm-2"]


def test_tab_completes_the_runs_of_the_folder_that_is_named(tmp_path):
    Story(tmp_path / "runs" / "lm-1")
    Story(tmp_path / "else" / "lm-2")
    assert completed("hpctrain logs --runs else lm", tmp_path) == ["lm-2"]


def test_tab_completes_settings(tmp_path):
    found = completed("hpctrain submit --set checkpoint.keep_l", tmp_path)
    assert found == ["checkpoint.keep_last="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_has_to_read_is_printed(capsys, shell):
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert f"{shell}_complete" in out
    assert "_HPCTRAIN_COMPLETE" in out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)
