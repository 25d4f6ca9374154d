"""A failed test runs again only with the mark, once, and its first failure is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
CONFTEST = """\
import pytest
from tests.support import second_run, tiers

def pytest_addoption(parser):
    parser.addoption("--second-run", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "realtime(proved_by): as in pyproject.toml")
    config.addinivalue_line("markers", "story(proved_by): as in pyproject.toml")
    if config.getoption("--second-run") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(second_run.SecondRun(config), "second-run")

def pytest_collection_modifyitems(items):
    if faults := list(tiers.unproved(items)):
        raise pytest.UsageError("; ".join(faults))
    for item in items:
        second_run.note(item)
"""
FAILS = """\
import pathlib, pytest

def attempt(name):
    path = pathlib.Path(name)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())
"""
MARK = "@pytest.mark.realtime(proved_by='test_it.py')\n"
ONCE = "def test_{0}():\n    assert attempt('{0}') == 2, 'a race in {0}'\n"
ALWAYS = "def test_{0}():\n    assert attempt('{0}') < 0, 'a fault in {0}'\n"


def run(folder, *tests, options=()):
    """Run tests in a project of their own, in which only `second_run` is ours."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(FAILS + "\n".join(tests))
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TOP}\naddopts = -p xdist.plugin\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--second-run", *options],
        cwd=folder,
        env=os.environ
        | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others cost a second each
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def attempts(folder, name):
    return len((folder / name).read_text())


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_marked_test_that_passes_alone_is_green_and_reported(tmp_path, options):
    done = run(tmp_path, MARK + ONCE.format("a"), options=options)

    assert done.returncode == 0, done.stdout
    assert "1 passed in a second run" in done.stdout
    assert "a race in a" in done.stdout, "the first failure is printed"
    assert "1 real-time tests needed a second run, 1 passed in it" in done.stdout
    (line,) = (tmp_path / "build/flakes.jsonl").read_text().splitlines()
    assert json.loads(line)["test"] == "test_it.py::test_a"
    assert len(json.loads(line)["load"]) == 3


def test_a_test_without_the_mark_never_runs_again(tmp_path):
    done = run(tmp_path, ONCE.format("a"))

    assert done.returncode == 1
    assert attempts(tmp_path, "a") == 1


def test_failing_twice_is_red_and_there_is_no_third_run(tmp_path):
    done = run(tmp_path, MARK + ALWAYS.format("a"), MARK + ONCE.format("b"))

    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert attempts(tmp_path, "a") == 2
    assert "2 real-time tests needed a second run, 1 passed in it" in done.stdout


def test_another_failure_stays_red_beside_a_forgiven_one(tmp_path):
    done = run(tmp_path, MARK + ONCE.format("a"), ALWAYS.format("b"))

    assert done.returncode == 1
    assert "1 failed" in done.stdout


def test_more_than_the_budget_do_not_run_again(tmp_path):
    done = run(tmp_path, *(MARK + ONCE.format(name) for name in "abcd"))

    assert done.returncode == 1
    assert "4 failed" in done.stdout
    assert "at most 3 run again" in done.stdout
    assert attempts(tmp_path, "a") == 1


@pytest.mark.parametrize(
    "mark",
    [
        "realtime",
        "realtime(proved_by='test_gone.py::test_a')",
        "realtime(proved_by='test_it.py::test_gone')",
        "story(proved_by=('test_it.py::test_a', 'test_gone.py'))",
    ],
)
def test_the_mark_must_name_a_test_that_is_there(tmp_path, mark):
    done = run(tmp_path, f"@pytest.mark.{mark}\n" + ONCE.format("a"))

    assert done.returncode == 4
    assert f"test_it.py::test_a: {mark.split('(')[0]}(proved_by=" in done.stderr
    assert "names no test" in done.stderr
