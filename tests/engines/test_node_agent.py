"""One verdict for all nodes: ranks start again only where every node's agent is there to do it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from hpctrain.agent.node import NodeAgent, RoundHooks
from hpctrain.agent.ranks import RankTask, run_rank
from hpctrain.agent.stopwatch import StopWatch
from hpctrain.records import JobContext
from hpctrain.rundir.fence import Attempt
from tests.support.processes import listening

SECRET = "the same on all nodes"  # noqa: S105 - of a test

SCRIPT = """
import os, pathlib, time
folder = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(0 if folder.name == "2" else 60)
"""


def _agent(node, port, folder):
    """The agent of one of two nodes, with one rank each; node 0 writes how it ended."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from hpctrain.agent.rendezvous import Rendezvous

    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.setpgid(0, 0)
    begun = []

    def begin(_world_size):
        begun.append(1)
        return Attempt(len(begun), "token", "1", 0, time.time())

    context = JobContext("1", 0, node, ["n0", "n1"], "127.0.0.1", port, "")
    watch = StopWatch(context, arrivals=list, ask=None)
    hooks = RoundHooks(begin, watch, lambda _failure: True) if node == 0 else None
    _note_forks(folder / f"forks-{node}")
    rendezvous = Rendezvous("127.0.0.1", port, node, ["n0", "n1"], run_id="test", timeout_s=60)
    spec = WorkerSpec(
        role="rank",
        local_world_size=1,
        entrypoint=run_rank,
        args=(RankTask("", str(folder / "script.py")),),
        rdzv_handler=rendezvous,
        max_restarts=1_000_000,
        master_addr="127.0.0.1",
        master_port=port,
    )
    agent = NodeAgent(
        spec,
        node=f"n{node}",
        attempt_dir=lambda number: folder / str(number),
        hooks=hooks,
        start_method="fork",
        before_ranks=lambda _number: None,
        secret=SECRET,
    )
    agent.run()
    rendezvous.close()
    if node == 0:
        end = agent.end
        (folder / "end.json").write_text(json.dumps([end.ending, end.silent_nodes, len(begun)]))
    os._exit(0)


def _note_forks(path):
    """At each fork of this process write down its threads, and the sockets it came to listen on."""
    mine = os.getpid()
    before = listening(mine)

    def note():
        if os.getpid() == mine:
            with path.open("a") as file:
                threads = len(list(Path("/proc/self/task").iterdir()))
                file.write(f"{threads} {len(listening(mine) - before)}\n")

    os.register_at_fork(before=note)


def _wait(path):
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.parametrize(
    ("dead", "expected"), [(False, ["left", [], 2]), (True, ["failed", [1], 1])]
)
def test_ranks_start_again_only_where_every_agent_answers(tmp_path, dead, expected):
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    agents = [fork.Process(target=_agent, args=(node, port, tmp_path)) for node in (0, 1)]
    for agent in agents:
        agent.start()
    ranks = [int(_wait(tmp_path / "1" / f"pid-{rank}")) for rank in (0, 1)]

    if dead:
        os.kill(agents[1].pid, signal.SIGSTOP)
    os.kill(ranks[0], signal.SIGKILL)
    end = json.loads(_wait(tmp_path / "end.json"))
    for agent in agents:
        agent.kill()

    assert end == expected
    # A lock that another thread holds at a fork is held for ever in the rank.
    forks = [(tmp_path / f"forks-{node}").read_text().splitlines() for node in (0, 1)]
    begun = expected[2]
    assert forks == [["1 0"] * (1 + begun), ["1 0"] * begun], "store and ranks; ranks"
