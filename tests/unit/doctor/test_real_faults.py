"""Logs of torchrun jobs that failed for real, by tests/data/doctor/faults/program.py."""

from __future__ import annotations

import pytest

from hpctrain.advise.doctor.faults import Certainty
from hpctrain.advise.doctor.files import inputs, scan
from hpctrain.advise.doctor.judge import judge
from tests.support.quoted_logs import FOLDER

FAULTS = FOLDER / "faults"
EXPECTED = {
    "chained": "code",
    "checkpoint_key": "checkpoint",
    "checkpoint_shape": "checkpoint",
    "desync_debug": "native",
    "disk_full": "storage_full",
    "exception": "code",
    "hang": "hang",
    "memory_error": "host_oom",
    "mismatch": "desync",
    "monitored": "hang",
    "nan": "nan",
    "no_launcher": "launch",
    "no_master": "rendezvous",
    "no_rank": "launch",
    "port_taken": "port_in_use",
    "python_memory": "host_oom",
    "segfault": "native",
    "shm": "shared_memory",
    "sigterm": "killed",
    "worker_killed": "data_worker",
    "worker_raises": "code",
}
UNTOLD = {"sigkill": "host_oom"}
"""By whom it was killed stands in no log: the usual one is named, as possible."""


def diagnosis_of(name):
    logs, notes = scan(inputs([str(FAULTS / f"{name}.log")]))
    assert notes == []
    return judge(logs)


def test_every_log_is_expected_to_say_something():
    assert {path.stem for path in FAULTS.glob("*.log")} == {*EXPECTED, *UNTOLD}


@pytest.mark.parametrize(("name", "kind"), EXPECTED.items())
def test_a_real_fault_is_named(name, kind):
    assert diagnosis_of(name).kind == kind


@pytest.mark.parametrize(("name", "kind"), UNTOLD.items())
def test_what_no_log_tells_is_no_more_than_possible(name, kind):
    diagnosis = diagnosis_of(name)

    assert (diagnosis.kind, diagnosis.certainty) == (kind, Certainty.POSSIBLE)


def test_the_programs_own_line_is_named_and_the_other_ranks_errors_follow():
    diagnosis = diagnosis_of("exception")

    assert "ValueError: the vocabulary has 50257 entries" in diagnosis.headline
    assert "program.py:" in diagnosis.headline
    assert diagnosis.evidence[0].rank == 1
    assert diagnosis.certainty is Certainty.CERTAIN
    followed = {follow.example.kind for follow in diagnosis.follow_ons}
    assert "transport" in followed


def test_a_worker_s_own_error_is_named_and_not_its_wrapper():
    diagnosis = diagnosis_of("worker_raises")

    assert "KeyError: 'label'" in diagnosis.headline
    assert "__getitem__" in diagnosis.headline
