"""Logs of torchrun jobs that failed for real, by tests/data/doctor/faults/program.py."""

from __future__ import annotations

import pytest

from hpctrain.advise.doctor.faults import Certainty, FaultKind
from hpctrain.advise.doctor.files import inputs, scan
from hpctrain.advise.doctor.judge import judge
from tests.support.quoted_logs import FOLDER

FAULTS = FOLDER / "faults"
EXPECTED = {
    "chained": FaultKind.CODE,
    "checkpoint_key": FaultKind.CHECKPOINT,
    "checkpoint_shape": FaultKind.CHECKPOINT,
    "desync_debug": FaultKind.NATIVE,
    "disk_full": FaultKind.STORAGE_FULL,
    "exception": FaultKind.CODE,
    "hang": FaultKind.HANG,
    "memory_error": FaultKind.HOST_OOM,
    "mismatch": FaultKind.DESYNC,
    "monitored": FaultKind.HANG,
    "nan": FaultKind.NAN,
    "no_launcher": FaultKind.LAUNCH,
    "no_master": FaultKind.RENDEZVOUS,
    "no_rank": FaultKind.LAUNCH,
    "port_taken": FaultKind.PORT_IN_USE,
    "python_memory": FaultKind.HOST_OOM,
    "segfault": FaultKind.NATIVE,
    "shm": FaultKind.SHARED_MEMORY,
    "sigterm": FaultKind.KILLED,
    "worker_killed": FaultKind.DATA_WORKER,
    "worker_raises": FaultKind.CODE,
}
UNTOLD = {"sigkill": FaultKind.HOST_OOM}
"""By whom it was killed stands in no log: the usual one is named, as possible."""


def diagnosis_of(name):
    logs, notes = scan(inputs([str(FAULTS / f"{name}.log")]))
    assert notes == []
    return judge(logs)


def test_every_log_is_expected_to_say_something():
    assert {path.stem for path in FAULTS.glob("*.log")} == {*EXPECTED, *UNTOLD}


@pytest.mark.parametrize(("name", "kind"), EXPECTED.items())
def test_a_real_fault_is_named(name, kind):
    assert diagnosis_of(name).kind is kind


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
    assert FaultKind.TRANSPORT in followed


def test_a_worker_s_own_error_is_named_and_not_its_wrapper():
    diagnosis = diagnosis_of("worker_raises")

    assert "KeyError: 'label'" in diagnosis.headline
    assert "__getitem__" in diagnosis.headline
