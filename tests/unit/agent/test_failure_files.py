"""What a failed rank has left behind is read whole, or told as not whole."""

from __future__ import annotations

import errno
import json
import os

import pytest

from hpctrain.agent import ranks
from hpctrain.agent.node import NoRedirect
from hpctrain.agent.ranks import collect
from hpctrain.run.layout import failure_path, torch_error_path

RAISED = {
    "message": {
        "message": "ValueError: no such\nlayer",
        "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1763700000"},
    }
}
WHOLE = json.dumps(RAISED)


def only(tmp_path, code=3):
    (report,) = collect(tmp_path, {1: code}, "n1")
    return report


def test_without_any_file_the_exit_code_speaks(tmp_path):
    report = only(tmp_path)

    assert (report.rank, report.node, report.kind, report.summary) == (
        1,
        "n1",
        "exit",
        "exit code 3",
    )


def test_what_torchs_record_has_left_is_told(tmp_path):
    torch_error_path(tmp_path, 1).write_text(WHOLE)

    report = only(tmp_path, -6)

    assert report.summary == "killed by SIGABRT; ValueError: no such layer"
    assert (report.kind, report.traceback) == ("signal", "Traceback ...")


def test_a_plain_message_of_torchs_is_told(tmp_path):
    torch_error_path(tmp_path, 1).write_text(json.dumps({"message": "Signal 6 received"}))

    assert only(tmp_path).summary == "exit code 3; Signal 6 received"


@pytest.mark.parametrize(
    "text", [*(WHOLE[:cut] for cut in range(0, len(WHOLE), 7)), "[]", "3", "{}", '{"message": {}}']
)
def test_an_error_file_that_is_not_whole_is_told_as_that(tmp_path, text):
    torch_error_path(tmp_path, 1).write_text(text)

    assert only(tmp_path).summary == "exit code 3; its error file torch-error-1.json is not whole"


def test_an_error_file_that_cannot_be_read_is_told_as_that(tmp_path):
    torch_error_path(tmp_path, 1).mkdir()

    assert only(tmp_path).summary.endswith("torch-error-1.json is not whole")


@pytest.mark.parametrize("text", ["", "{", '{"rank": 1', "[]", '{"strange": 1}', '{"rank": 1}'])
def test_a_report_of_ours_that_is_not_whole_is_told_as_that(tmp_path, text):
    failure_path(tmp_path, 1).write_text(text)

    assert only(tmp_path).summary == "exit code 3; its own report failure-00001.json is not whole"


def test_a_whole_report_of_ours_is_the_one_that_counts(tmp_path):
    torch_error_path(tmp_path, 1).write_text(WHOLE)
    ranks._report(tmp_path, 1, ValueError("mine"))

    report = only(tmp_path)

    assert (report.kind, report.summary, report.exit_code) == ("exception", "ValueError: mine", 1)


def test_torchs_agent_is_shown_no_error_file(tmp_path):
    """It raises what it finds in one that is torn, and dies of it."""
    envs = {0: {"RANK": "4"}, 1: {"RANK": "5"}}

    shown = NoRedirect(tmp_path).reify(envs)

    assert set(shown.error_files.values()) == {os.devnull}
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == str(torch_error_path(tmp_path, 5))


def test_a_full_disk_costs_the_report_and_not_the_exit(tmp_path, monkeypatch, capsys):
    def full(path, _text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(ranks, "replace_text", full)

    ranks._report(tmp_path, 1, ValueError("mine"))

    told = capsys.readouterr().err
    assert "ValueError: mine" in told
    assert "no report of this failure: [Errno 28] No space left on device" in told
