"""Imports are tried by a real interpreter, whose end is not ours."""

from __future__ import annotations

import os
import sys

import pytest

from hpctrain.advise.check.gather import try_imports
from hpctrain.launch.program import WantedImport


@pytest.fixture
def tried(tmp_path):
    def run(*modules, python=sys.executable, patience_s=60.0, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        wanted = [
            WantedImport(module, tuple(names), "train.py", 1, is_sure=True)
            for module, *names in modules
        ]
        return try_imports(
            python,
            wanted,
            cwd=tmp_path,
            folders=[str(tmp_path)],
            environ=os.environ,
            patience_s=patience_s,
        )

    return run


def why(answer):
    return [(one.module, text) for one, text in answer.failed]


def test_what_works_is_counted_and_what_does_not_has_its_reason(tried):
    answer = tried(["json", "loads"], ["nosuch"], ["os.path", "join"], ["email", "message"])

    assert why(answer) == [("nosuch", "No module named 'nosuch'")]
    assert (answer.tried, answer.trouble) == (4, "")


def test_a_name_that_this_version_lacks_is_told_with_the_version(tried):
    answer = tried(["other", "new"], other="__version__ = '1.2'\n")

    assert why(answer) == [("other", "has no new (version 1.2)")]


def test_an_import_that_raises_prints_or_reads_harms_nothing(tried):
    answer = tried(
        ["loud"],
        ["json"],
        loud="import atexit, sys\natexit.register(print, '[1, \"printed\"]')\nsys.stdin.read()\n"
        "raise RuntimeError('no\\nGPU')\n",
    )

    assert why(answer) == [("loud", "RuntimeError: no GPU")]
    assert answer.tried == 2


def test_an_import_that_leaves_python_is_no_success(tried):
    answer = tried(["leaves"], leaves="raise SystemExit(0)\n")

    assert why(answer) == [("leaves", "SystemExit: 0")]


def test_an_import_that_ends_its_interpreter_is_named(tried):
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"

    answer = tried(["json"], ["ends"], ["os"], ends=text)

    assert why(answer) == [("ends", "its import ends the interpreter by SIGKILL")]
    assert answer.tried == 1


def test_an_import_that_hangs_is_given_up_and_named(tried):
    answer = tried(["hangs"], hangs="import threading\nthreading.Event().wait()\n", patience_s=1.0)

    assert answer.failed == []
    assert answer.trouble == "import hangs: it had not ended after 1 s"


def test_an_interpreter_that_is_not_there_is_trouble(tried):
    answer = tried(["json"], python="/nosuch/python")

    assert answer.trouble == "/nosuch/python cannot be started: No such file or directory"
