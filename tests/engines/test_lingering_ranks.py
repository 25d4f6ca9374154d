"""Some ranks return and others do not: those that do nothing any more are ended, no other."""

from __future__ import annotations

import pytest

from hpctrain.node.agent import ranks
from tests.support.rank_agents import Agents

pytestmark = [
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.realtime(proved_by="tests/unit/agent/test_simulated_rounds.py"),
]

RANKS = 2
LAST = """
import os, threading, time
rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
if rank != last:
    raise SystemExit(0)
"""
LOCK = f"{LAST}\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\n"
BUSY = f"{LAST}\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass\n"
PRINTS = f"{LAST}\nfor batch in range(15): print(batch, flush=True); time.sleep(0.2)\n"
CHILD = f"""{LAST}
import subprocess, sys
code = "import time; end = time.monotonic() + 3\\nwhile time.monotonic() < end: pass"
subprocess.run([sys.executable, "-c", code])
"""
THREAD = "import threading; threading.Thread(target=threading.Event().wait).start()\n"
ONE_THREAD = f"{LAST}\n{THREAD}"


@pytest.fixture
def ends(tmp_path):
    """Runs a script with RANKS ranks on each node; how each node's round ended."""
    agents = Agents(tmp_path, RANKS)
    yield agents.run
    agents.close()


def test_a_rank_that_waits_for_its_own_lock_is_ended_and_named(ends):
    [[ending, why, said, failure]] = ends(LOCK)

    assert (ending, failure) == ("hung", ["hang", 1, "n0"])
    assert "1 rank returned and rank 1 did not" in why
    assert said == [[1, [1], False], [1, [1], True]]


@pytest.mark.parametrize("script", [BUSY, PRINTS, CHILD], ids=["busy", "evaluates", "child"])
def test_one_that_computes_prints_or_waits_for_its_child_is_left_to_its_work(ends, script):
    [[ending, why, said, _]] = ends(script)
    assert (ending, why) == ("left", "")
    assert not any(ended for *_, ended in said)


def test_a_thread_that_never_ends_does_not_hold_a_program_that_has_come_to_its_end(ends):
    [[ending, why, said, failure]] = ends(ONE_THREAD)
    assert (ending, failure) == ("left", None)
    assert "processes of theirs do not end" in why
    assert said[-1] == [2, [], True]


def test_ranks_of_all_nodes_count_and_each_node_ends_its_own(ends):
    (first, second) = ends(LOCK, nodes=2)
    assert (first[0], second[0]) == ("hung", "hung")
    assert first[3] == ["hang", 3, "n1"]
    assert first[2] == [[3, [3], False], [3, [3], True]]


def test_where_it_is_switched_off_it_is_waited_for_ever(ends):
    assert ends(LOCK, end_wait_s=0.0, patience_s=4) == [None]


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("import os; os._exit(0)", "left"),
        (f"{THREAD}raise SystemExit(3)", "failed"),
        (f"{THREAD}raise ValueError('x')", "failed"),
        ("import os, time; time.sleep(int(os.environ['RANK'])); os._exit(4)", "failed"),
    ],
    ids=["os._exit", "exit code with a thread", "exception with a thread", "one os._exit"],
)
def test_however_a_program_ends_its_agent_hears_of_it(ends, monkeypatch, script, ending):
    monkeypatch.setattr(ranks, "EXIT_HANG_S", 0.3)
    [[now, *_]] = ends(script, end_wait_s=30.0)
    assert now == ending
