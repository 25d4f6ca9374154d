"""What a failed rank has left behind is read whole, or told as not whole."""

from __future__ import annotations

import errno
import json
import os

import pytest

from hpctrain.ledger.run.layout import failure_path, rank_log_path, torch_error_path
from hpctrain.node.agent import ranks
from hpctrain.node.agent.node import NoRedirect
from hpctrain.node.agent.ranks import collect

RAISED = {
    "message": {
        "message": "ValueError: no such\nlayer",
        "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1763700000"},
    }
}
WHOLE = json.dumps(RAISED)
CRASHED = f"""step 3
Fatal Python error: Segmentation fault

Thread 0x00007f79769c1b80 (most recent call first):
  File "/python/threading.py", line 320 in wait

Current thread 0x00007f7976ac2c80 (most recent call first):
  File "/home/me/model.py", line 7 in forward
  File "/home/me/train.py", line 31 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "{ranks.__file__}", line 240 in _run_program
  File "/python/multiprocessing/process.py", line 108 in run
  File "<frozen runpy>", line 198 in _run_module_as_main

Extension modules: torch._C (total: 1)
"""
"""As faulthandler writes it, newest frame first."""
FIRST = "Traceback (most recent call last):"
WHERE = """Traceback (most recent call last):
  File "/home/me/train.py", line 31, in <module>
  File "/home/me/model.py", line 7, in forward
Fatal Python error: Segmentation fault
"""


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


def crashed(tmp_path, text, code=-11):
    path = rank_log_path(tmp_path, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return only(tmp_path, code)


def test_a_crash_in_native_code_is_told_as_any_other_traceback(tmp_path):
    report = crashed(tmp_path, CRASHED)

    assert (report.summary, report.traceback) == ("killed by SIGSEGV", WHERE)


def test_of_threads_with_frames_the_one_that_crashed_is_told(tmp_path):
    begin, other, crashing, end = CRASHED.split("\n\n")
    text = f"{begin}\n\n{crashing}\n\n{other}\n\n{end}"

    assert crashed(tmp_path, text).traceback == WHERE


def test_a_thread_without_python_is_told_by_what_the_main_thread_did(tmp_path):
    text = """Fatal Python error: Aborted

Current thread 0x00007f7976ac2c80 (most recent call first):
  <no Python frame>

Thread 0x00007f79769c1b80 (most recent call first):
  File "/home/me/train.py", line 31 in <module>
"""
    assert crashed(tmp_path, text, -6).traceback == (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 31, in <module>\n'
        "Fatal Python error: Aborted\n"
    )


def test_of_several_crashes_in_a_log_the_last_one_is_the_ranks(tmp_path):
    """A worker of its own may have crashed before."""
    worker = CRASHED.replace("Segmentation fault", "Bus error")

    assert crashed(tmp_path, worker + "step 4\n" + CRASHED).traceback == WHERE


@pytest.mark.parametrize(
    ("text", "code"), [("step 3\n", -11), ("", -11), (CRASHED, -9), (CRASHED, 3)]
)
def test_what_no_crash_of_the_rank_has_written_is_not_told(tmp_path, text, code):
    assert crashed(tmp_path, text, code).traceback == ""


def test_a_log_that_is_not_there_tells_no_crash(tmp_path):
    assert only(tmp_path, -11).traceback == ""


@pytest.mark.parametrize("cut", range(0, len(CRASHED), 9))
def test_a_crash_that_was_cut_off_is_told_as_far_as_it_goes(tmp_path, cut):
    traceback = crashed(tmp_path, CRASHED[:cut]).traceback

    first, *frames, title = traceback.splitlines() or [FIRST, ""]
    assert first == FIRST
    assert all(line.startswith('  File "/') for line in frames)
    assert "Fatal Python error: Segmentation fault".startswith(title)
