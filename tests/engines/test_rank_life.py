"""A rank's process: deaf to SLURM's signals, dead with its agent, gone when its program is."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal

import pytest

from hpctrain.core.base.records import RankTask
from hpctrain.node.agent import ranks
from hpctrain.node.agent.ranks import run_rank
from tests.support import patience
from tests.support.patience import PATIENCE_S
from tests.support.processes import alive, descendants, kill_all

pytestmark = pytest.mark.usefixtures("preloaded")

FORK = multiprocessing.get_context("fork")
CHILD = """
import multiprocessing, signal
multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True).start()
"""
READERS = """
import sys, warnings
from torch.utils.data import DataLoader
warnings.simplefilter("ignore")  # more workers than CPUs
sys.kept = iter(DataLoader(range(100), num_workers=8, multiprocessing_context="fork"))
print(next(sys.kept).item())
"""
STUCK = """
import signal, threading
threading.Thread(target=threading.Event().wait).start()
raise ValueError("mine")
"""
CRASH = """
import ctypes
def poke():
    ctypes.string_at(0)
poke()
"""
CRASH_BESIDE = """
import ctypes, signal
made = ctypes.c_ulong()  # a thread that runs from address 1 on, and has no Python
ctypes.CDLL(None).pthread_create(ctypes.byref(made), None, ctypes.c_void_p(1), None)
signal.pause()
"""
DEAF = """
import signal
names = ("SIGTERM", "SIGUSR2", "SIGUSR1", "SIGHUP")
print([signal.getsignal(getattr(signal, name)) is signal.SIG_IGN for name in names])
"""
PAUSE = """
import os, pathlib, signal
here = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
(here / "new").write_text(str(os.getpid()))
(here / "new").rename(here / "pid")
signal.pause()
"""


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Starts a rank with a script, as a child of this process."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("HPCTRAIN_ATTEMPT_DIR", str(tmp_path))
    monkeypatch.setattr(ranks, "EXIT_HANG_S", 0.2)
    begun = []

    def begin(script):
        (tmp_path / "script.py").write_text(script)
        task = RankTask("", str(tmp_path / "script.py"))
        begun.append(FORK.Process(target=run_rank, args=(task,)))
        begun[-1].start()
        return begun[-1]

    yield begin
    for process in begun:
        kill_all([*descendants(process.pid), process.pid])
        process.join()


def log(tmp_path):
    return (tmp_path / "rank-00000.log").read_text()


def test_a_child_that_no_signal_ends_does_not_keep_its_rank(rank):
    process = rank(CHILD)
    process.join(PATIENCE_S)

    assert process.exitcode == 0


@pytest.mark.parametrize("last", ["", "raise SystemExit(3)", "1 / 0"])
def test_what_a_program_leaves_to_its_exit_is_done(rank, tmp_path, last):
    hook = "import atexit, pathlib\natexit.register(pathlib.Path('hook').write_text, 'ran')\n"

    rank(hook.replace("'hook'", repr(str(tmp_path / "hook"))) + last).join(PATIENCE_S)

    assert (tmp_path / "hook").read_text() == "ran"


def test_what_the_agent_leaves_to_its_own_exit_is_not_done_by_a_rank(rank, tmp_path):
    atexit.register(of_agent := (tmp_path / "hook").write_text, "ran")
    try:
        rank("pass").join(PATIENCE_S)
    finally:
        atexit.unregister(of_agent)

    assert not (tmp_path / "hook").exists()


def test_a_program_that_ends_while_its_data_loader_still_reads_has_not_failed(rank, tmp_path):
    process = rank(READERS)
    process.join(PATIENCE_S)

    assert (process.exitcode, log(tmp_path)) == (0, "0\n")


def test_a_rank_that_raised_is_gone_though_its_threads_are_not(rank, tmp_path):
    process = rank(STUCK)
    process.join(PATIENCE_S)

    assert process.exitcode == 1
    assert "ValueError: mine" in log(tmp_path)


def test_a_script_that_knows_nothing_lives_through_slurms_signals(rank, tmp_path):
    process = rank(DEAF)
    process.join(PATIENCE_S)

    assert (process.exitcode, log(tmp_path)) == (0, "[True, True, True, True]\n")


def _agent(script, folder):
    os.environ.update(RANK="0", LOCAL_RANK="0", HPCTRAIN_ATTEMPT_DIR=str(folder))
    FORK.Process(target=run_rank, args=(RankTask("", str(script)),)).start()
    signal.pause()


def test_a_rank_dies_with_its_agent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PAUSE)
    agent = FORK.Process(target=_agent, args=(script, tmp_path))
    agent.start()
    patience.until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    try:
        assert alive(pid)
        agent.kill()
        agent.join()
        patience.until(lambda: not alive(pid), "its end with its agent's")
    finally:
        kill_all([pid])


@pytest.mark.parametrize("thread", ["main", "native"])
def test_a_rank_that_a_signal_kills_from_inside_says_where_it_was(rank, tmp_path, thread):
    process = rank(CRASH if thread == "main" else CRASH_BESIDE)

    process.join(PATIENCE_S)

    assert process.exitcode == -signal.SIGSEGV
    (report,) = ranks.collect(tmp_path, {0: process.exitcode}, "n1")
    lines = report.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "Fatal Python error: Segmentation fault"
    script = str(tmp_path / "script.py")
    frames = [line for line in lines if line.startswith("  File")]
    assert frames[0].startswith(f'  File "{script}", line ')
    assert ("in poke" in report.traceback) == (thread == "main")
