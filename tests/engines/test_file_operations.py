"""What ranks and agents ask of the file system that all nodes share: counted on real ones."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.file_operations import LOGIN, METADATA, of, tally, trace
from tests.support.local_runs import SCRIPTS, await_end, events

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.file_operations import Operation

pytestmark = pytest.mark.strace
NODES, RANKS = 2, 4
TRAIN_S = 2.0
BY_TIME = {"stop-request.json", "profile-request.json", "heartbeat.json"}
"""Looked at or written so many times a second; how often in a start depends on how busy all are."""
OTHERS = [f"rank {rank}" for rank in range(1, RANKS)]
DATA = ("read", "write", "flush")


def hpctrain(*words: str) -> list[str]:
    return [sys.executable, "-m", "hpctrain", *words]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("counted") / "runs" / "counted"


@pytest.fixture(scope="module")
def asked(run) -> list[Operation]:
    """Of a run of two nodes with two ranks each: started, trained, saved, failed and resumed."""
    folder = run.parents[1]
    where = ["--cluster", "local", "--no-snapshot", "--name", run.name]
    size = ["--nodes", f"{NODES}", "--ranks-per-node", f"{RANKS // NODES}"]
    saves = ["--set", "checkpoint.interval_steps=6"]
    command = [*where, *size, *saves, "--", str(SCRIPTS / "phases.py"), f"{TRAIN_S}"]
    operations = trace(
        hpctrain("submit", *command),
        folder / "trace",
        cwd=folder,
        env={**os.environ, "HPCTRAIN_LOCAL_DIR": str(folder / "local")},
    )
    await_end(run, attempts=2)
    assert [end["reason"] for end in events(run, "attempt_ended")] == ["crashed", "completed"]
    return operations


def test_a_start_is_one_operation_for_each_rank(run, asked):
    told = tally(asked, phase="start", below=run)

    assert [told[rank] for rank in OTHERS] == [{"open": 1}] * len(OTHERS)  # its log
    assert not [one for rank in OTHERS for one in of(asked, phase="start", below=run, owner=rank)
                if one.kind == "read"]  # fmt: skip
    assert _once(asked, run, "rank 0") <= 76
    assert _once(asked, run, "agent 1") <= 15
    assert _once(asked, run, "agent 0") <= 55


def _once(asked: list[Operation], run: Path, owner: str) -> int:
    """What is asked at a start, however long that takes."""
    start = of(asked, phase="start", below=run, owner=owner)
    names = [one.path.rpartition("/")[2] for one in start if one.kind in METADATA]
    return len([name for name in names if name not in BY_TIME])


def test_training_asks_nothing_of_the_file_system_but_on_rank_0(run, asked):
    told = tally(asked, phase="train", below=run, kinds=[*METADATA, *DATA])

    assert told.keys() <= {"rank 0", "agent 0"}
    assert told["rank 0"]["open"] <= 8 * (TRAIN_S + 1)  # is a stop asked for, or a profile?
    assert told["agent 0"].total() <= 4 * (TRAIN_S + 1)


@pytest.mark.parametrize("phase", ["save", "save-behind"])
def test_a_save_is_one_file_of_each_rank(run, asked, phase):
    told = tally(asked, phase=phase, below=run, kinds=[*METADATA, *DATA])

    assert [told[rank] for rank in OTHERS] == [{"open": 1, "write": 3, "flush": 1}] * len(OTHERS)
    assert "agent 1" not in told
    assert told["rank 0"]["list"] <= 5


def test_a_resume_is_two_files_of_each_rank(run, asked):
    told = tally(asked, phase="resume", below=run)

    assert all(told[rank].total() <= 4 for rank in OTHERS)
    assert all(told[rank].keys() == {"open"} for rank in OTHERS)


def test_status_looks_at_no_file_of_a_rank(run, asked, tmp_path):
    del asked
    operations = trace(hpctrain("status", str(run), "--json"), tmp_path / "trace")
    paths = {one.path for one in of(operations, phase="start", below=run, owner=LOGIN)}

    assert paths
    assert not [path for path in paths if "rank-" in path]


def test_bytes_that_ranks_read_at_a_start_do_not_grow_with_their_number(run, asked):
    attempt = json.loads((run / "attempt.json").read_text())

    assert attempt["number"] == 2
    read = [one.nbytes for one in of(asked, phase="start", below=run) if one.owner in OTHERS]
    assert sum(read) == 0
