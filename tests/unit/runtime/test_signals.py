"""Stop signals are heard in a rank, and its children are born deaf to them."""

from __future__ import annotations

import subprocess
import sys

from tests.support.patience import PATIENCE_S

RANK = """
import multiprocessing, os, signal, subprocess, sys
from multiprocessing import resource_tracker
from hpctrain.train.runtime.stops import RankSignals

def show(_=None):
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    print({signal.SIGTERM, signal.SIGUSR2} <= mask, flush=True)

if __name__ == "__main__":
    rank_signals = RankSignals()
    rank_signals.start()
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        lock = context.Lock()
        worker = context.Process(target=show, args=(lock,))
        worker.start()
        worker.join()
    tracker = resource_tracker._resource_tracker._pid
    for signum in (signal.SIGUSR2, signal.SIGTERM):
        for pid in (tracker, os.getpid()):
            os.kill(pid, signum)
    rank_signals.heard.wait()
    while not (rank_signals.term and rank_signals.warned):
        pass
    print(resource_tracker._resource_tracker._check_alive(), flush=True)
"""


def test_spawned_and_forked_children_have_the_stop_signals_blocked_and_the_rank_hears_them(
    tmp_path,
):
    script = tmp_path / "rank.py"  # spawned workers import their parent's main module
    script.write_text(RANK)

    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 3), done.stderr


def test_a_signal_is_told_on_while_the_main_thread_does_something_else():
    """In a process of its own: what is blocked here stays blocked."""
    program = """
import os, signal, threading
from hpctrain.train.runtime.stops import RankSignals
signals, told = RankSignals(), threading.Event()
signals.start()
signals.on_heard = told.set
os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(0 if told.wait(30) and signals.term else 1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_signal_that_an_older_thread_takes_is_told_on_as_soon():
    """Such as those of OpenBLAS, which an import starts: they do not block what a rank blocks."""
    program = """
import os, signal, threading
from hpctrain.train.runtime.stops import RankSignals
threading.Thread(target=threading.Event().wait, daemon=True).start()
signals, told = RankSignals(), threading.Event()
signals.start()
signals.on_heard = told.set
os.kill(os.getpid(), signal.SIGTERM)
if not told.wait(30) or not signals.term:
    raise SystemExit(1)
pid = os.fork()  # whose signals are no business of this process
if pid == 0:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    os.kill(os.getpid(), signal.SIGUSR2)
    os._exit(0)
os.waitpid(pid, 0)
told.clear()
os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(2 if not told.wait(30) or signals.warned else 0)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_programs_own_wakeup_descriptor_stays():
    """An event loop that was made before has it."""
    program = """
import os, signal
from hpctrain.train.runtime.stops import RankSignals
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
RankSignals().start()
raise SystemExit(0 if signal.set_wakeup_fd(-1) == write else 1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_fork_of_a_process_that_listens_hears_its_own_signals():
    """A launcher may have called `hpctrain.init()` before it forks its ranks."""
    program = """
import os, signal
from hpctrain.train.runtime.stops import RankSignals
RankSignals().start()
pid = os.fork()
signals = RankSignals()
signals.start()
os.kill(os.getpid(), signal.SIGTERM)
heard = signals.heard.wait(30) and signals.term
if pid == 0:
    os._exit(0 if heard else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or (0 if heard else 2))
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False)

    assert done.returncode == 0
