"""Commands in the documents work: those marked `test: run` are run, the others are parsed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from hpctrain.cli.main import COMMANDS, cli
from tests.support import patience

TOP = Path(__file__).parents[2]
PAGES = sorted([TOP / "README.md", *(TOP / "docs").glob("**/*.md")])
BLOCK = re.compile(r"(?:^<!-- test: ([^\n]*) -->\n)?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`hpctrain ([a-z][a-z-]*)")
RUN = "run"
NOT_RUN = {
    "make demo": "tests/e2e/test_demo.py runs what it calls",
    "make test": "is what runs this test",
    "hpctrain submit --nodes 2 --gpus-per-node 4 --time 12h --partition gpu --account lab -- "
    "train.py --lr 3e-4": "tests/unit/cli/test_job_options.py types such lines",
    "hpctrain submit --nodes 2 --checkpoint out/last.pt '--resume-args=--resume {checkpoint}' -- "
    "train.py": "tests/slurm/test_programs.py runs such a program",
    "hpctrain check --rehearse -- train.py": "tests/unit/check/test_rehearsal.py rehearses",
}
TINY = """\
[train]
steps = 100000
layers = 1
dim = 16
heads = 2
seq_len = 16
data_limit_mb = 0.2
step_delay_s = 0.02

[run]
log_every_s = 0.2
"""


def commands(page, marked=None):
    """Command lines of a page's shell blocks, without comments."""
    return [
        shlex.join(words)
        for mark, block in BLOCK.findall(page.read_text())
        if marked is None or mark == marked
        for line in block.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_flag_is_known(page):
    targets = re.findall(r"^([a-z]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
    for line in commands(page):
        program, *words = shlex.split(line)
        if program == "hpctrain":
            _parse(cli.get_command(click.Context(cli), words[0]), words)
        elif program == "make":
            assert words[0] in targets, line
    for name in INLINE.findall(page.read_text()):
        assert name in COMMANDS, f"hpctrain {name}"


def test_every_command_of_the_readme_is_run_or_says_why_not():
    run = commands(TOP / "README.md", RUN)
    left = [line for line in commands(TOP / "README.md") if line not in run]

    assert run
    assert sorted(left) == sorted(NOT_RUN)


def test_the_readmes_loop_is_the_examples():
    snippet = re.search(r"```python\n(.*?)```", (TOP / "README.md").read_text(), re.DOTALL)
    example = [line.strip() for line in (TOP / "examples/own_loop.py").read_text().splitlines()]

    assert snippet is not None
    wanted = [line.strip() for line in snippet[1].splitlines()]
    assert [line for line in example if line in wanted] == wanted
    calls = [line for line in example if re.search(r"\brun\.\w+\(|hpctrain\.init", line)]
    assert calls == wanted, "the README shows every line that is hpctrain's"


@pytest.mark.check
@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_shown_session_runs(page, tmp_path):
    """Each command exits 0 where there is no sbatch; between them one waits as a person would."""
    (tmp_path / "hpctrain.toml").write_text(TINY)
    with _machine(tmp_path) as call:
        for line in commands(TOP / page, RUN):
            words = shlex.split(line)
            before = _status(call, words)
            done = call(*words)
            assert done.returncode == 0, f"$ {line}\n{done.stdout}{done.stderr}"
            if "--dry-run" not in words:
                _wait_for_its_effect(call, words, before)
        runs = json.loads(call("hpctrain", "status", "--json").stdout)
        status = json.loads(call("hpctrain", "status", "-", "--json").stdout)

    assert runs
    assert len(status["attempts"]) > 1
    assert status["steps_lost"] == 0 or page != "README.md"


@contextmanager
def _machine(folder):
    """Runs commands where there is no scheduler; ends what is left running."""
    bin_dir = folder / "bin"
    bin_dir.mkdir()
    for tool in ("hpctrain", "python"):
        (bin_dir / tool).symlink_to(Path(sys.executable).with_name(tool))
    dropped = ("HPCTRAIN_", "SLURM_", "SBATCH_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"PATH": str(bin_dir), "HPCTRAIN_LOCAL_DIR": str(folder / "local")}

    def call(*words):
        return subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, check=False
        )

    try:
        yield call
    finally:
        call("hpctrain", "cancel", "-")
        _until(lambda: not _is_alive(call), "the end of the run")


def _status(call, words):
    """The run's status before a command changes it."""
    if words[1] == "submit":
        return None
    return json.loads(call("hpctrain", "status", "-", "--json").stdout)


def _wait_for_its_effect(call, words, before):
    def now():
        return json.loads(call("hpctrain", "status", "-", "--json").stdout)

    def moves():
        attempts = now()["attempts"]
        fresh = len(attempts) > (len(before["attempts"]) if before else 0)
        return fresh and (attempts[-1]["last_step"] or 0) > (attempts[-1]["first_step"] or 0)

    if words[1] in {"submit", "resume"} or words[1:3] == ["local", "preempt"]:
        _until(moves, f"a step after {words}")
    elif words[1] == "cancel":
        _until(lambda: not _is_alive(call), f"the end after {words}")


def _is_alive(call):
    done = call("hpctrain", "status", "-", "--json")
    job = json.loads(done.stdout)["job"] if done.returncode == 0 else None
    return job is not None and job["alive"]


def _until(reached, what):
    patience.until(reached, what)


def _parse(command, words):
    """Parse as the command line does, without running anything."""
    assert command is not None, words
    if isinstance(command, click.Group):
        sub = command.get_command(click.Context(command), words[1])
        _parse(sub, words[1:])
        return
    command.make_context(words[0], words[1:])
