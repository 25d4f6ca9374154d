"""`python3 -m tests.gpu` without a GPU: what did not run is never said to have passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import conftest
from tests.gpu.__main__ import PARTS, TOTAL_S, _lacks
from tests.gpu.recording import ON_CUDA, _row_of
from tests.gpu.results import FAILED, NOT_RUN, PASSED, REHEARSED, Results, Row
from tests.support.processes import alive

TOP = Path(__file__).parents[3]
FOLDER = TOP / "tests" / "gpu"
RUN = """
import sys
from pathlib import Path
from tests.gpu import __main__ as runner
runner.TOP = Path(FOLDER)
runner._about = lambda **_: {"torch": "none"}
runner.PARTS = tuple(runner.Part(name, limit, (file,)) for name, limit, file in PARTS)
sys.exit(runner.main(["--dry", "--out", OUT, *sys.argv[1:]]))
"""
GOOD = """
import pathlib, pytest, subprocess
def test_good():
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path(__file__).with_name("left").write_text(str(left.pid))
def test_lacks(): pytest.skip("no such library here")
"""
WRONG = "import no_such_module\ndef test_wrong(): pass\n"
CUT_OFF = """
import os, signal
def test_before(): pass
def test_cut():
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)
"""


def run(folder, parts, *words):
    """Run parts, given as name to (limit, text); the exit code, and what is written by then."""
    named = []
    for name, (limit, text) in parts.items():
        (folder / f"test_{name}.py").write_text(text)
        named.append((name, limit, str(folder / f"test_{name}.py")))
    code = RUN.replace("PARTS)", f"{named!r})").replace("OUT", repr(str(folder / "out")))
    code = code.replace("FOLDER", repr(str(folder)))
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=TOP,
        env={**os.environ, "PYTHONPATH": str(TOP), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, Results.read(folder / "out")


def outcomes(rows):
    return {name: row.outcome for name, row in rows.items()}


def test_each_outcome_is_told_and_what_did_not_run_fails_the_whole(tmp_path):
    parts = {"good": (300, GOOD), "wrong": (300, WRONG), "late": (0, GOOD)}
    done, results = run(tmp_path, parts)

    assert done.returncode == 1
    assert outcomes(results.parts) == {"good": REHEARSED, "wrong": FAILED, "late": FAILED}
    assert outcomes(results.tests) == {
        "test_good.py::test_good": REHEARSED,
        "test_good.py::test_lacks": NOT_RUN,
        "test_wrong.py": FAILED,
    }
    assert not alive(int((tmp_path / "left").read_text())), "it would hold the GPU's memory"
    table = (tmp_path / "out" / "gpu-results.md").read_text()
    assert "No module named 'no_such_module'" in table
    assert "its 0 s were up" in table
    assert "no such library here" in table
    assert table.strip() in done.stdout


def test_a_run_that_is_cut_off_leaves_what_it_has(tmp_path):
    _, results = run(tmp_path, {"cut": (300, CUT_OFF), "after": (300, GOOD)})

    assert outcomes(results.tests) == {
        "test_cut.py::test_before": REHEARSED,
        "test_cut.py::test_cut": NOT_RUN,
    }
    assert outcomes(results.parts) == {"cut": NOT_RUN, "after": NOT_RUN}
    assert json.loads((tmp_path / "out" / "gpu-results.json").read_text())["tests"]


def test_only_runs_parts_that_are_named_and_only_while_there_is_time(tmp_path):
    parts = {"cut": (300, CUT_OFF), "good": (300, GOOD)}
    done, results = run(tmp_path, parts, "--only", "good", "-k", "not lacks")
    assert (done.returncode, outcomes(results.tests)) == (
        0,
        {"test_good.py::test_good": REHEARSED},
    )

    done, results = run(tmp_path, parts, "--together", "--only", "good", "-k", "not lacks")
    assert (done.returncode, outcomes(results.parts)) == (0, {"together": REHEARSED})

    done, results = run(tmp_path, parts, "--seconds", "1")
    assert (done.returncode, results.tests) == (1, {})
    assert {row.why for row in results.parts.values()} == {"no time was left"}


@pytest.mark.parametrize("outcome", [FAILED, NOT_RUN])
def test_a_result_is_good_only_where_everything_ran(outcome):
    passed = Row(PASSED)
    assert Results({}, {"a": passed}, {"x": passed}).is_good
    assert not Results({}, {"a": passed}, {"x": passed, "y": Row(outcome)}).is_good
    assert not Results({}, {"a": Row(outcome)}, {"x": passed}).is_good
    assert not Results({}, {"a": passed}, {}).is_good


@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_number_that_misses_its_goal_fails_its_test_on_a_gpu_alone(is_cuda):
    notes = conftest.Notes(is_cuda, [])
    notes.at_most("in time", 1.0, 2.0)
    notes.at_most("shown only", 9.0)
    ended = conftest.pytest_pyfunc_call(SimpleNamespace(funcargs={"note": notes}))
    next(ended)
    with pytest.raises(StopIteration):
        ended.send(None)

    notes.at_most("too late", 3.0, 2.0, "s")
    notes.at_least("too little", 1.0, 2.0)
    ended = conftest.pytest_pyfunc_call(SimpleNamespace(funcargs={"note": notes}))
    next(ended)
    with pytest.raises(AssertionError if is_cuda else StopIteration) as caught:
        ended.send(None)
    if is_cuda:
        assert str(caught.value).startswith("too late: 3 s, goal <= 2; too little: 1 , goal >= 2")


@pytest.mark.parametrize("is_cuda", [True, False])
def test_what_ended_on_a_gpu_has_passed_and_elsewhere_it_says_what_it_left_out(is_cuda):
    notes = conftest.Notes(is_cuda, [(ON_CUDA, True)] if is_cuda else [])
    assert notes.on_gpu("kernels") is is_cuda
    report = SimpleNamespace(user_properties=notes.noted, failed=False, skipped=False)
    row = _row_of(report, 1.0)
    assert (row.outcome, row.needs_cuda) == ((PASSED, []) if is_cuda else (REHEARSED, ["kernels"]))


def test_only_what_a_machine_lacks_is_installed():
    assert not _lacks(Path("numpy-1.0-py3-none-any.whl"))
    assert _lacks(Path("no_such_package-1.0-py3-none-any.whl"))


def test_the_parts_have_every_file_of_tests_once_and_fit_into_eight_minutes():
    files = [name for part in PARTS for name in part.files]
    assert sorted(files) == sorted(path.name for path in FOLDER.glob("test_*.py"))
    assert sum(part.limit_s for part in PARTS) <= TOTAL_S == 480
