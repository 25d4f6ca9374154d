"""Some ranks return and others do not: those that do nothing any more are ended, no other."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time

import pytest

from hpctrain.agent import ranks, signals
from hpctrain.agent.node import NodeAgent, RoundHooks
from hpctrain.agent.ranks import run_rank
from hpctrain.agent.stop_deadline import StopDeadline
from hpctrain.base.records import JobContext, RankTask
from hpctrain.run.fence import Attempt

pytestmark = pytest.mark.usefixtures("preloaded")

RANKS = 2
WAIT_S = 1.0
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


def _agent(node, nodes, port, folder, end_wait_s):
    """The agent of a node; writes how its round ended, and what was said meanwhile."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from hpctrain.agent.rendezvous import Rendezvous

    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.setpgid(0, 0)
    signals.install()
    names = [f"n{number}" for number in range(nodes)]
    context = JobContext("1", 0, node, names, "127.0.0.1", port, "")
    awaited = []
    hooks = RoundHooks(
        lambda _: Attempt(1, "token", "1", 0, time.time()),
        StopDeadline(context, arrivals=list, ask=None),
        lambda _: False,
        awaited=awaited.append,
    )
    rendezvous = Rendezvous("127.0.0.1", port, node, names, run_id="test", timeout_s=60)
    spec = WorkerSpec(
        role="rank",
        local_world_size=RANKS,
        entrypoint=run_rank,
        args=(RankTask("", str(folder / "script.py")),),
        rdzv_handler=rendezvous,
        max_restarts=1_000_000,
        master_addr="127.0.0.1",
        master_port=port,
    )
    agent = NodeAgent(
        spec,
        node=names[node],
        attempt_dir=lambda number: folder / str(number),
        hooks=hooks if node == 0 else None,
        start_method="fork",
        before_ranks=lambda _: None,
        secret="of a test",
        end_wait_s=end_wait_s,
    )
    agent.run()
    rendezvous.close()
    end = agent.end
    said = [(fact.returned, fact.left, fact.ended) for fact in awaited]
    failure = end.failure and [end.failure.kind, end.failure.rank, end.failure.node]
    staged = folder / f"end-{node}.new"
    staged.write_text(json.dumps([end.ending, end.why, said, failure]))
    staged.rename(folder / f"end-{node}")
    os._exit(0)


@pytest.fixture
def ends(tmp_path):
    """Runs a script with RANKS ranks on each node; how each node's round ended."""
    agents = []

    def run(script, nodes=1, end_wait_s=WAIT_S, patience_s=60):
        (tmp_path / "script.py").write_text(script)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        for node in range(nodes):
            args = node, nodes, port, tmp_path, end_wait_s
            agents.append(fork.Process(target=_agent, args=args))
            agents[-1].start()
        began = time.monotonic()
        for agent in agents:
            agent.join(max(0.0, began + patience_s - time.monotonic()))
        told = [tmp_path / f"end-{node}" for node in range(nodes)]
        return [json.loads(path.read_text()) if path.exists() else None for path in told]

    yield run
    for agent in agents:
        if agent.is_alive():
            os.killpg(agent.pid, signal.SIGKILL)
        agent.join()


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
