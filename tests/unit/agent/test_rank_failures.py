"""What is told of a rank's failure: the program's lines, and ours only where they are the fault."""

from __future__ import annotations

import errno
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpctrain
from hpctrain.ledger.run.layout import failure_path
from hpctrain.node.agent import ranks

REFUSED = """
import hpctrain
from hpctrain.train.data.streams import TokenSequences

def open_data():
    return TokenSequences("missing.bin", 8)

open_data()
"""
FAULTY = """
import json

json.loads("{")
"""
HIDDEN = """
import json
from hpctrain.errors import UsageError

def own(text):
    try:
        json.loads(text)
    except ValueError as error:
        raise UsageError("no JSON") from error

own("{")
"""


@pytest.fixture
def fail(tmp_path, monkeypatch, capsys):
    """`fail(program)`: run it as a rank does; what its log shows, and the report."""
    monkeypatch.chdir(tmp_path)

    def run(text):
        (tmp_path / "train.py").write_text(text)
        attempt = tmp_path / "attempt"
        attempt.mkdir()
        with pytest.raises(Exception) as caught:  # noqa: PT011 - any
            runpy.run_path("train.py", run_name="__main__")
        ranks._report(attempt, 0, caught.value)
        return capsys.readouterr().err, json.loads(failure_path(attempt, 0).read_text())

    return run


def test_what_is_refused_shows_the_programs_lines_and_none_of_ours(fail):
    shown, report = fail(REFUSED)

    files = [line.split('"')[1] for line in shown.splitlines() if line.startswith("  File ")]
    assert len(files) >= 2
    assert set(files[-2:]) == {"train.py"}
    assert f'"{Path(hpctrain.__file__).parent}/' not in shown
    assert "in open_data" in shown
    assert shown.splitlines()[-2].startswith("hpctrain.errors.")
    assert "missing.bin" in report["summary"]
    assert report["traceback"].strip() == shown.strip()


def test_what_a_refusal_was_made_of_is_not_shown(fail):
    shown, _ = fail(HIDDEN)

    assert "JSONDecodeError" not in shown
    assert "in own" in shown
    assert shown.count("Traceback") == 1


def test_what_nobody_foresaw_is_shown_whole(fail):
    """As `on_rank_0` raises on every rank what rank 0 has met."""
    shown, _ = fail(HIDDEN.replace("UsageError", "HpctrainError"))

    assert "JSONDecodeError" in shown
    assert shown.count("Traceback") == 2


def test_the_programs_own_errors_are_shown_whole(fail):
    shown, report = fail(FAULTY)

    assert "json/decoder.py" in shown
    assert report["summary"].startswith("json.decoder.JSONDecodeError")


def test_a_rank_whose_log_has_no_room_is_reported_all_the_same(tmp_path, monkeypatch):
    """Else torch prints the second error's traceback into the job's output."""

    def full(*_text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=full, flush=full))
    ranks._report(tmp_path, 0, ValueError("the cause"))

    assert json.loads(failure_path(tmp_path, 0).read_text())["summary"] == "ValueError: the cause"
