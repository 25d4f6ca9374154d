"""A DataLoader's worker that was killed is named, also where its connection broke before its death.

The kernel closes a process's files first, and tells its parent that it is dead later: on a busy
machine so much later that torch takes the worker for alive, and raises what the connection said.
"""

from __future__ import annotations

import json
import multiprocessing

import pytest

from hpctrain.core.base.records import FailureReport, RankTask
from hpctrain.ledger.history.run_state import EndCause, cause_in
from hpctrain.ledger.run.layout import failure_path
from hpctrain.node.agent.ranks import is_echo, run_rank
from tests.support.processes import descendants, kill_all

pytestmark = pytest.mark.usefixtures("preloaded")

FORK = multiprocessing.get_context("fork")
ROWS = """
import os, signal, socket, sys
from multiprocessing import resource_sharer
import torch
from torch.utils.data import DataLoader, Dataset

(told, tell), (closed, close) = os.pipe(), os.pipe()

class Rows(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 1:
            os.read(told, 1)
            # What the kernel does first where a process is killed: nobody answers there any more.
            resource_sharer._resource_sharer._listener._listener._socket.shutdown(socket.SHUT_RDWR)
            os.write(close, b"1")
            os.read(told, 1)
            DIES
        return torch.zeros(4)

batches = iter(DataLoader(Rows(), num_workers=1, multiprocessing_context="fork"))
assert batches._data_queue._reader.poll(30)
os.write(tell, b"1")
os.read(closed, 1)
"""
BREAKS = """
try:
    next(batches)
except OSError:
    os.write(tell, b"1")  # only now it dies
    raise
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
LEAVES = "os._exit(3)"
STAYS = "signal.pause()"
AS_IT_IS_TOLD = """
class Slow:
    def write(self, text):
        pid = batches._workers[0].pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    def flush(self):
        pass

sys.stderr = Slow()
raise ValueError("mine")
"""


@pytest.fixture
def failure(tmp_path, monkeypatch):
    """Runs a script as a rank that fails; what it has left of its failure."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HPCTRAIN_ATTEMPT_DIR", str(tmp_path))
    begun = []

    def failure(script):
        (tmp_path / "script.py").write_text(script)
        task = RankTask("", str(tmp_path / "script.py"))
        begun.append(FORK.Process(target=run_rank, args=(task,)))
        begun[-1].start()
        begun[-1].join(60)
        assert begun[-1].exitcode == 1
        return FailureReport(**json.loads(failure_path(tmp_path, 0).read_text()))

    yield failure
    for process in begun:
        kill_all([*descendants(process.pid), process.pid])


@pytest.mark.parametrize(
    ("dies", "words"),
    [(KILLED, "is killed by signal: Killed"), (LEAVES, "exited unexpectedly with exit code 3")],
)
def test_a_worker_that_is_known_to_be_dead_too_late_is_named(failure, dies, words):
    report = failure(ROWS.replace("DIES", dies) + BREAKS)

    assert words in report.summary
    assert "RuntimeError: DataLoader worker (pid" in report.summary
    assert cause_in(report.summary) is EndCause.DATA_WORKER
    assert not is_echo(report)
    assert "Connection refused" in report.traceback  # what the program was told


def test_a_connection_that_breaks_while_all_workers_live_stays_what_it_is(failure, monkeypatch):
    monkeypatch.setattr("hpctrain.node.agent.ranks.DEATH_S", 0.1)
    report = failure(ROWS.replace("DIES", STAYS) + BREAKS)
    assert "Connection refused" in report.summary


def test_a_worker_that_dies_while_a_failure_is_told_does_not_take_the_report_with_it(failure):
    assert failure(ROWS + AS_IT_IS_TOLD).summary == "ValueError: mine"
