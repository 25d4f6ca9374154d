"""Commands of the login node work, fast, where torch and numpy cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpctrain.cli.main import COMMANDS
from tests.support.refused_imports import refuse_imports


@pytest.fixture
def hpctrain(tmp_path):
    """Run `hpctrain` in an interpreter that refuses some imports."""

    def call(*argv, refused=("torch", "numpy")):
        refuse_imports(tmp_path, *refused)
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-W", "error", "-m", "hpctrain", *argv]
        return subprocess.run(
            command, cwd=work, env=env, capture_output=True, text=True, check=False
        )

    return call


def test_the_refusal_works(tmp_path, hpctrain):
    hpctrain("--version")
    code = "import torch"

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "torch is not to be imported on a login node" in done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_commands_help_works_without_torch(hpctrain, name):
    done = hpctrain(name, "--help")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: hpctrain {name} ")
    assert done.stderr == ""


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_dry_run_needs_neither_torch_nor_submitit_nor_what_is_slow_to_import(hpctrain, cluster):
    slow = ("torch", "numpy", "submitit", "rich", "asyncio", "subprocess", "filelock", "pydantic")
    own = (
        "hpctrain.ledger.history",
        "hpctrain.ledger.run.event_types",
        "hpctrain.advise.lint.rule",
    )

    done = hpctrain("submit", "--dry-run", "--cluster", cluster, refused=(*slow, *own))

    assert done.returncode == 0, done.stderr
    assert "hpctrain" in done.stdout


def test_making_a_run_works_without_torch(hpctrain, tmp_path):
    done = hpctrain("submit", "--cluster", "local", "--no-submit", "--name", "mine")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "runs" / "mine" / "spec.json").is_file()


def test_sites_are_shown_without_torch(hpctrain):
    assert "local" in hpctrain("sites", "list").stdout
    assert hpctrain("sites", "show", "local").returncode == 0
