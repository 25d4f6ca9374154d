"""Errors of which a log only tells: behind other words, without their end, or handled."""

from __future__ import annotations

import pytest

from hpctrain.advise.doctor.faults import Certainty
from hpctrain.advise.doctor.judge import judge
from hpctrain.advise.doctor.lines import FORMS, LINES, plain
from hpctrain.advise.doctor.scan import LogScanner

BEGUN = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 24, in main']
CODE = ("code", Certainty.POSSIBLE)
NOTHING = ("unknown", Certainty.NOT_KNOWN)
FITS = {
    "escape": ("\x1b[31mred", "[31m"),
    "traceback": (BEGUN[0], "Traceback: none"),
    "frame": (BEGUN[1], 'the File "x.py", line 3'),
    "rich_frame": ("/home/u/train.py:24 in main", "train.py:24 in main"),
    "raises": ("    raise X", "    raised = 3"),
    "crashed": ("Current thread 0x00 (most recent call first):", "Thread 0x00 (most recent)"),
    "error": ("my.OwnError: no", "Error rate: 3"),
    "error_in_traceback": ("queue.Empty", "_1: no"),
    "uncaught": ("Uncaught exception: my.OwnError: no", "Uncaught: no"),
    "reported": ("main | OwnError: no", "main | OwnErrors: no"),
    "passed_on": ("Caught X in replica 0 on device 0.", "Caught X in the act"),
    "between": ("Exception ignored in: <x>", "it was ignored in: <x>"),
    "ends": ("my.ChildFailedError:", "ChildFailedError: no"),
    "table_rank": ("  rank      : 3 (local_rank: 1)", "  rank      : 3"),
    "of_attempt": ("2026-11-28 10:11:12 node attempt 3 began", "attempt 3 began"),
    "network": ("NCCL INFO NET/IB : Using [0]mlx5_0", "NCCL INFO NET/IB : No device found"),
    "rank_inside": ("[PG 0 Rank 3] x", "Rank 3"),
    "node_of_nccl": ("node-1:12:34 [0] NCCL INFO x", "12:34 [0] NCCL INFO x"),
    "rank_of_file": ("Rank_3.log", "train.log"),
}


HANDLED = "During handling of the above exception, another exception occurred:"


def diagnosed(*lines):
    scanner = LogScanner("train.log")
    scanner.feed("".join(f"{line}\n" for line in lines).encode())
    return judge([scanner.finish()])


def verdict(*lines):
    diagnosis = diagnosed(*lines)
    return diagnosis.kind, diagnosis.certainty


def shown(*lines):
    """The line on which the verdict rests."""
    return diagnosed(*lines).evidence[0].text


@pytest.mark.parametrize("form", LINES["forms"])
def test_each_form_of_a_line_is_known_by_its_row(form):
    line, near = FITS[form]

    assert FORMS[form].search(line)
    assert not FORMS[form].search(near)


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-28 10:11:12 | ERROR | train:main:12 - OwnError: no",
        "[main] failed: ValueError: no",
        "ray.exceptions.RayTaskError(ValueError): task failed (ValueError: no)",
        "ValueError                                Traceback (most recent call last)",
        "the run ended with requests.exceptions.HTTPError: no",
        "RuntimeError: Caught KeyError in DataLoader worker process 0.",
        "StopIteration: Caught StopIteration in replica 0 on device 0.",
    ],
)
def test_an_error_behind_other_words_is_told_where_nothing_else_is(line):
    assert verdict(line) == CODE


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-28 retries after ConnectionError: no",
        "it WARNs of ValueError: no",
        "FutureWarning after ValueError: no",
        "[INFO] ValueError: no",
        "[DEBUG] ValueError: no",
        "it ignores ValueError: no",
        "it skips ValueError: no",
    ],
)
def test_an_error_that_a_line_only_speaks_of_ended_nothing(line):
    assert verdict(line) == NOTHING


def test_an_error_that_passes_on_another_process_s_is_none_to_tell_of():
    assert verdict("ray.exceptions.RayTaskError(ChildFailedError): task failed") == NOTHING


def test_a_traceback_without_its_end_is_told_where_nothing_else_is():
    assert verdict(*BEGUN) == CODE
    assert verdict(*BEGUN, "    x()", "MemoryError")[0] != "code"
    assert verdict("Exception ignored in: <x>", *BEGUN) == NOTHING
    assert verdict(BEGUN[0], '  File "/opt/site-packages/x.py", line 3, in x') == CODE
    assert verdict(BEGUN[0], "without a line of its own") == NOTHING


def test_a_traceback_without_its_beginning_is_told_where_nothing_else_is():
    assert verdict(*BEGUN[1:]) == CODE
    assert verdict(*BEGUN[1:], "    x()", "MemoryError")[0] == "host_oom"
    assert verdict(BEGUN[1].replace("24,", "24")) == NOTHING  # as faulthandler prints it
    assert verdict(*BEGUN[1:], *[f"step {n}" for n in range(20)]) == NOTHING


def test_an_error_that_was_handled_is_told_where_what_came_of_it_is_missing():
    assert verdict(*BEGUN, "ValueError: no", "", HANDLED) == CODE
    assert verdict(*BEGUN, "ValueError: no", "", HANDLED, *BEGUN, "MemoryError")[0] == "host_oom"


def test_what_python_ignores_hides_no_error_behind_it():
    ignored = ["Exception ignored in: <x>", *BEGUN, "ValueError: at the end"]

    assert verdict(*ignored) == NOTHING
    assert verdict(*ignored, *BEGUN, "KeyError: 'no'")[0] == "code"


def test_training_that_goes_on_takes_away_what_was_told_but_no_overflow():
    losses = [f"loss: {2 - n / 10}" for n in range(6)]
    scale = "Attempted loss scale: {}, reducing to {}"

    assert verdict("main | OwnError: no", *losses) == NOTHING
    assert verdict(scale.format(2, 1), *losses) == ("fp16_overflow", Certainty.LIKELY)
    assert verdict(scale.format(65536, 32768), *losses) == NOTHING


def test_an_error_that_is_only_told_of_explains_less_than_a_death():
    assert verdict("main | OwnError: no", "Process 12 got signal: 15")[0] == "killed"


def test_of_what_is_told_an_error_of_its_own_line_comes_first_then_the_newest():
    told, left = "main | OwnError: {}", "Replica 3 exited with a non-zero status code 1"

    assert shown(*BEGUN, "ValueError: no", "", HANDLED, told.format(1)) == "ValueError: no"
    assert shown(told.format(1), told.format(2), left) == told.format(2)
    assert shown(left) == left


def test_a_library_s_exception_may_have_any_name_with_a_module():
    assert verdict(*BEGUN, "queue.Empty")[0] == "code"


def test_the_words_of_a_pod_of_tpus_are_read_behind_its_node():
    line = plain("2026-11-28 10:11:12 10.0.0.7 [3] ValueError: no")

    assert (line.text, line.node, line.rank) == ("ValueError: no", "10.0.0.7", None)


def test_a_name_of_c_plus_plus_is_no_exception():
    """A frame of XLA's stack: xla::util::ReportComputationError(tensorflow::Status const&)."""
    assert verdict("xla_util.cc:76] \txla::util::ReportComputationError(x)") == NOTHING
    assert verdict("main:util.ComputationError(x)") == CODE
