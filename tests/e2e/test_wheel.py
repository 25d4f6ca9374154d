"""The built wheel works outside the checkout, on a login node that has no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
NEEDED = ("click", "rich", "xxhash")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Call the `hpctrain` of a fresh environment with the wheel and what login commands need."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(TOP, source, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    shutil.copy(TOP / ".gitignore", source)  # the build leaves out what git leaves out
    _run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("hpctrain-*.whl")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    _run("-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (site_packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    for name in NEEDED:
        _copy_distribution(name, site_packages)
    work = folder / "work"
    work.mkdir()
    env = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder)}

    def call(*words):
        return subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, check=False)

    return call


def test_torch_is_not_there(installed):
    done = installed("python", "-c", "import hpctrain, torch")

    assert "No module named 'torch'" in done.stderr


def test_help_is_shown(installed):
    done = installed("hpctrain", "--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert "submit" in done.stdout


def test_a_dry_run_prints_a_whole_batch_script(installed):
    flags = ["--script", "--cluster", "slurm", "--nodes", "2-4"]
    done = installed("hpctrain", "submit", "--dry-run", *flags)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/bin/bash")
    assert "#SBATCH --nodes=2-4" in done.stdout
    assert "hpctrain.entry.slurm_batch after" in done.stdout, "the body came with the wheel"


def test_site_configs_come_with_the_wheel(installed):
    done = installed("hpctrain", "sites", "list", "--json")

    assert (done.returncode, done.stderr) == (0, "")
    paths = [file["path"] for site in json.loads(done.stdout) for file in site["files"]]
    assert any(path.endswith("_data/site-configs/local.toml") for path in paths)


def test_a_run_can_be_made_and_seen(installed):
    made = installed("hpctrain", "submit", "--cluster", "local", "--no-submit", "--name", "one")
    seen = installed("hpctrain", "status", "one")

    assert (made.returncode, made.stderr) == (0, "")
    assert (seen.returncode, seen.stderr) == (0, "")
    assert "one" in seen.stdout


def _run(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _copy_distribution(name, site_packages):
    """Put what is installed here there too: the test needs no package index."""
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file)))
        if ".." in file.parts or source.suffix == ".pyc":
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def test_the_reports_style_and_script_come_with_the_wheel(installed):
    script = "from importlib.resources import files; "
    script += "print(files('hpctrain.observe.report').joinpath('page.js').read_text())"
    installed("hpctrain", "submit", "--cluster", "local", "--no-submit", "--name", "two")
    told = json.loads(installed("hpctrain", "report", "two", "--json").stdout)

    style = (TOP / "hpctrain" / "observe" / "report" / "page.css").read_text()
    assert style in Path(told["pages"][0]).read_text()
    assert installed("python", "-c", script).stdout.strip() != ""


def test_the_pages_of_the_manual_come_with_the_wheel(installed):
    assert installed("hpctrain", "help", "watching").stdout.startswith("# Watch a run")
    assert "staying-alive" in installed("hpctrain", "help", "topics").stdout
    assert "wrong usage" in installed("hpctrain", "help", "exit-codes").stdout
