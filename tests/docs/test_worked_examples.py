"""The pages' worked examples: their commands are run in order, and print what is shown."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.patience import PATIENCE_S

TOP = Path(__file__).parents[2]
PAGES = ("plan", "staying-alive", "check")
SECTION = re.compile(r"^### Worked example: ([^\n]+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
SESSION = re.compile(
    r"^<!-- test: worked -->\n```sh\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
SECTIONS = dict(
    found for page in PAGES for found in SECTION.findall((TOP / "docs" / f"{page}.md").read_text())
)
HUNDRED, GROWS, STALLS, PIPELINE = SECTIONS
UNDER_WAY = 75
"""Exit code of `status --exit-status`."""
TINY = """\
[train]
steps = 30
layers = 1
dim = 16
heads = 2
seq_len = 16
data_limit_mb = 0.2

[run]
log_every_s = 0.2
"""
REFUSED = {"hpctrain lint examples/stalls.py": 3}
REFUSED |= {"hpctrain check --cluster local -- examples/stalls.py": 3}
"""Commands that are shown because they find something."""


@pytest.fixture
def machine(tmp_path):
    """Runs commands as on a laptop without a scheduler; what still runs at the end is ended."""
    (tmp_path / "hpctrain.toml").write_text(TINY)
    shutil.copytree(TOP / "examples", tmp_path / "examples")
    dropped = ("HPCTRAIN_", "SLURM_", "SBATCH_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["HPCTRAIN_LOCAL_DIR"] = str(tmp_path / "local")

    def call(line):
        return subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    yield call
    for run in json.loads(call("hpctrain status --json").stdout):
        if run["state"] == "running":
            call(f"hpctrain cancel {run['run']}")
            _await_end(call, run["run"])


def _await_end(machine, name):
    patience.until(
        lambda: machine(f"hpctrain status {name} --exit-status").returncode != UNDER_WAY, name
    )


@pytest.mark.check
@pytest.mark.parametrize("title", list(SECTIONS))
def test_the_session_prints_what_is_shown(title, machine):
    sessions = SESSION.findall(SECTIONS[title])
    assert sessions
    for block, shown in sessions:
        lines = block.replace("\\\n", " ").strip().splitlines()
        for line in lines[:-1]:
            _answer(machine, line, "")
        _answer(machine, lines[-1], shown)


def _answer(machine, line, shown):
    """Run a line until it prints what is shown: what it tells of may still be on its way."""
    words = shlex.split(line)
    asks = words[1] in {"status", "stacks", "doctor"}
    limit = time.monotonic() + PATIENCE_S
    if words[1] == "cancel":  # as a person would, when there is something to save
        _until_step(machine, words[-1])
    if words[1] == "resume":
        _await_end(machine, words[2])
    while True:
        done = machine(line)
        missing = [part for part in _parts(shown) if part not in _plain(done.stdout)]
        if not asks or not missing or time.monotonic() > limit:
            break
        time.sleep(0.2)
    assert done.returncode == REFUSED.get(" ".join(words), 0), f"{line}\n{done.stderr}"
    assert not missing, f"$ {line}\n{done.stdout}\nlacks {missing}"


def _until_step(machine, run):
    patience.until(
        lambda: json.loads(machine(f"hpctrain status {run} --json").stdout).get("step"), run
    )


def _parts(shown):
    """What is shown, without what is left out."""
    return [part for text in re.split(r"\.\.\.", shown) if (part := _plain(text))]


def _plain(text):
    """Without widths of columns and ends of lines, and with what a machine chooses as N."""
    text = re.sub(r"step-\d+|\b0-\d+|local-\d+|number \d+", "N", text)
    return " ".join(text.split())


@pytest.mark.check
def test_the_settings_that_are_shown_are_those_that_the_plan_writes(machine, tmp_path):
    [(block, _)] = SESSION.findall(SECTIONS[HUNDRED])[:1]
    [shown] = re.findall(r"```toml\n(.*?)```", SECTIONS[HUNDRED], re.DOTALL)

    assert machine(block).returncode == 0
    assert shown in (tmp_path / "hundred" / "hpctrain.toml").read_text()


@pytest.mark.check
def test_the_pipeline_passes_and_leaves_its_files(machine, tmp_path):
    lines = re.findall(r"- run: (hpctrain .+)", SECTIONS[PIPELINE])

    assert [line.split()[1] for line in lines] == ["lint", "plan", "submit", "check"]
    for line in lines:
        done = machine(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert json.loads((tmp_path / "lint.json").read_text())["errors"] == 0
    assert json.loads((tmp_path / "plan.json").read_text())["chosen"]
    assert json.loads((tmp_path / "submit.json").read_text())
    assert json.loads((tmp_path / "check.json").read_text())["exit_code"] == 0
    assert machine("hpctrain lint examples --json").returncode == 3


@pytest.mark.check
def test_the_pipeline_stops_where_nothing_fits_any_more(machine):
    [line] = re.findall(r"- run: (hpctrain plan .+) >", SECTIONS[PIPELINE])

    assert machine(line.replace("7B", "7000B")).returncode == 3
