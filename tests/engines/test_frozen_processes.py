"""What it costs where a process of a node is stopped by SIGSTOP, as docs/reliability.md has it."""

from __future__ import annotations

import json
import signal

import pytest

from hpctrain.node.agent import rendezvous
from hpctrain.node.control import node_process
from hpctrain.node.hangs.standing import HangLimits
from tests.support import node_processes
from tests.support.patience import PATIENCE_S
from tests.support.rank_agents import Agents
from tests.support.scenario import copies_in_memory, submit

pytestmark = [
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.realtime(proved_by="tests/unit/agent/test_simulated_rounds.py"),
]

FREEZE = """
import os, pathlib, signal, time

def freeze(name):
    agent = os.getppid()
    for pid in pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == name:
            os.kill(int(pid), signal.SIGSTOP)
            return
    raise AssertionError(f"no {name}")

again = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"]).name != "1"
"""
TRAINS = (
    FREEZE
    + """
import hpctrain
run = hpctrain.init()
for step in run.steps(12):
    if step == 6 and run.world.rank == BAD and not again:
        freeze("hpctrain-contro")
    time.sleep(0.05)
"""
)
STAYS = (
    FREEZE
    + """
if not again:
    if os.environ["RANK"] == "0":
        freeze("hpctrain-store")
    signal.pause()
"""
)


@pytest.fixture
def agents(tmp_path, monkeypatch):
    monkeypatch.setattr(node_process, "BEGIN_S", 2.0)
    monkeypatch.setattr(rendezvous, "ANSWER_S", 2.0)
    agents = Agents(tmp_path, ranks=1)
    yield agents
    agents.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_control_process_costs_a_hang_and_the_next_round_has_another(
    agents, tmp_path, rank
):
    script = TRAINS.replace("BAD", str(rank))
    ends = agents.run(script, nodes=2, starts=2, hangs=HangLimits(1.0), end_wait_s=PATIENCE_S)

    assert [end[0] for end in ends] == ["left", "left"]
    told = [json.loads(line)["kind"] for line in (tmp_path / "events").read_text().splitlines()]
    assert told == ["hang_suspected", "hang"]


def test_a_stopped_store_ends_the_round_and_the_next_one_has_another(agents, tmp_path):
    ends = agents.run(STAYS, nodes=2, starts=2, end_wait_s=PATIENCE_S)

    assert [end[0] for end in ends] == ["left", "left"], "the new store lives until all have left"
    assert "store has ended, or does not answer" in (tmp_path / "failure-1").read_text()


def test_a_stopped_replica_server_costs_nothing_and_is_ended_with_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    nodes = ("--cluster=local", "--nodes=2", "--ranks-per-node=1")
    run = submit(None, tmp_path, *nodes, sets=copies_in_memory(20, 2), held={1: 10})
    run.gates[1].wait(2)
    servers = [node_processes.pick(run.job_id, "replica server", node) for node in (0, 1)]
    assert servers[1].signal(signal.SIGSTOP)
    run.let_go(1)

    run.wait_event("done")
    run.wait("the job's end", lambda: not node_processes.of_job(run.job_id))
    run.wait("the end of both", lambda: not any(one.signal(0) for one in servers))
    assert run.restored() == [0]
    assert run.ends() == [("completed", "stop")]
