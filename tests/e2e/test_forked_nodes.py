"""Nodes of a local job are forked at every start: after a preemption, after a node's death."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cluster.scheduler.local import LocalJobRecord
from tests.support import processes
from tests.support.local_runs import await_end, events, hpctrain, start
from tests.support.slurm_boot import wait_for

PATIENCE_S = 150.0
FACTS_ALLOWED = """
import json, os, pathlib, random, signal, sys, time
import numpy, torch
import beside

attempt = json.loads(os.environ["HPCTRAIN_ATTEMPT"])["number"]
facts = {
    "agent": os.getppid(),
    "threads": torch.get_num_threads(),
    "numpy": numpy.random.random(),
    "restarts": os.environ["HPCTRAIN_RESTARTS"],
    "node": os.environ["HPCTRAIN_NODE"],
    "beside": beside.WORD,
}
output = pathlib.Path(os.environ["HPCTRAIN_OUTPUT_DIR"])

def leave(*_):
    raise SystemExit

signal.signal(signal.SIGTERM, leave)
new = output / f"new-{os.environ['RANK']}"
new.write_text(json.dumps(facts))
new.rename(output / f"{attempt}-{os.environ['RANK']}")
while attempt < 3:
    time.sleep(0.05)
"""


@pytest.mark.timeout(600)
def test_every_start_is_forked_through_a_preemption_and_a_nodes_death(tmp_path):
    (tmp_path / "tells.py").write_text(FACTS_ALLOWED)
    beside = tmp_path / "beside.py"
    beside.write_text("WORD = 'first'\n")
    run = start(tmp_path, "r", 2, 1, "--", "tells.py")

    first = facts_of(run, 1)
    controller = record(tmp_path).controller_pid
    titles = [(Path("/proc") / f"{node['agent']}" / "comm").read_text() for node in first]
    assert titles == ["hpctrain local0\n", "hpctrain local1\n"], said(run)
    beside.write_text("WORD = 'second'\n")  # the program's own modules are read at each start
    hpctrain(tmp_path, "local", "preempt", "r", "--leave=2", "--grace=60")
    second = facts_of(run, 2)
    assert [processes.parent(node["agent"]) for node in second] == [controller] * 2
    hpctrain(tmp_path, "local", "fail-node", "r", "--node=1")
    third = facts_of(run, 3)
    await_end(run, attempts=3)

    ends = events(run, "attempt_ended")
    assert [end["by"] for end in ends] == ["agent", "batch", "agent"]
    assert [ends[0]["reason"], ends[2]["reason"]] == ["preempted", "completed"]
    assert "exit code 9" in ends[1]["detail"]  # no agent outlives a dead node
    nodes = [*first, *second, *third]
    assert [node["node"] for node in nodes] == ["local0", "local1"] * 3
    assert [node["restarts"] for node in nodes] == ["0", "0", "1", "1", "2", "2"]
    assert [node["beside"] for node in nodes] == ["first"] * 2 + ["second"] * 4
    # As an agent has it; OpenMP has read it in the controller, which was started without.
    assert {node["threads"] for node in nodes} == {1}
    assert len({node["numpy"] for node in nodes}) == len({node["agent"] for node in nodes}) == 6
    wait_for(lambda: record(tmp_path).state == "COMPLETED", "the job's end")
    wait_for(lambda: not processes.alive(controller), "the controller's end")
    assert not [node for node in nodes if processes.alive(node["agent"])]
    assert "process of its own" not in said(run)


def facts_of(run, attempt):
    """What the two ranks of an attempt have told, once both have."""
    told = [run / "output" / f"{attempt}-{rank}" for rank in range(2)]
    wait_for(lambda: all(path.exists() for path in told), f"attempt {attempt}")
    return [json.loads(path.read_text()) for path in told]


def said(run):
    """What the controller and the agents have logged."""
    return "".join(path.read_text() for path in (run / "jobs").glob("*.out"))


def record(folder):
    """What the job's controller has written of it."""
    return LocalJobRecord(**json.loads((folder / "local" / "local-1" / "job.json").read_text()))
