"""Real agents name a rank that is slower than the others, whatever ranks wait for each other in."""

from __future__ import annotations

import json

import pytest

from hpctrain.node.agent import slow_watch
from hpctrain.node.hangs.standing import HangLimits
from tests.support import patience
from tests.support.rank_agents import Agents

pytestmark = pytest.mark.usefixtures("preloaded")

RANKS = 4
LIMITS = HangLimits(60.0, stragglers="tell")
BEGIN = """
import pathlib, random, time
import torch, torch.distributed as dist
import hpctrain

run = hpctrain.init()
rank, stop = run.world.rank, pathlib.Path("FOLDER/stop")
noise = random.Random(rank)

def work(seconds):
    time.sleep(seconds * noise.gauss(1, 0.02) * (1 + BY * (rank in SLOW)))

torch.set_num_threads(1)
net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
for module in net:
    module.register_forward_pre_hook(lambda *_: work(0.012))
"""
LOOP = """
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in run.steps(5000):
    WRONG
    net(torch.ones(2, 8)).sum().backward()
    EXCHANGE
    optimizer.step()
    optimizer.zero_grad()
    left = torch.tensor(float(rank == 0 and stop.exists()))
    dist.all_reduce(left)
    if left:
        break
"""
ENGINES = {
    "all_reduce": "",
    "ddp": "net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0001)",
    "fsdp2": "from torch.distributed.fsdp import fully_shard\n"
    "for module in net: fully_shard(module)\nfully_shard(net)",
}


def program(folder, engine, by, slow=(2,), wrong="pass"):
    """A training that goes on until there is a file `stop`; `slow` ranks work longer by `by`."""
    exchange = "[dist.all_reduce(one.grad) for one in net.parameters()]"
    text = f"{BEGIN}\n{ENGINES[engine]}\n{LOOP}"
    text = text.replace("EXCHANGE", exchange if engine == "all_reduce" else "pass")
    text = text.replace("FOLDER", str(folder)).replace("BY", str(by)).replace("SLOW", str(slow))
    return text.replace("WRONG", wrong)


@pytest.fixture
def agents(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_watch, "EVERY_S", 1.0)
    agents = Agents(tmp_path, RANKS)
    yield agents
    agents.close()


def events(folder):
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told_of(folder, rank, kinds=("rank",)):
    """The event that names a rank; on a busy machine another one may be slow as well."""

    def told():
        facts = (fact for fact in events(folder) if rank in fact["ranks"])
        return next((fact for fact in facts if fact.get("kind_of") in kinds), None)

    fact = patience.until(told, lambda: events(folder))
    (folder / "stop").touch()
    return fact


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_works_longer_is_named_under_every_engine(agents, tmp_path, engine):
    agents.start(program(tmp_path, engine, 1.0), hangs=LIMITS, end_wait_s=30)
    fact = told_of(tmp_path, 2)
    assert (fact["kind"], fact["nodes"]) == ("straggler", ["n0"])
    assert 0.05 < fact["by"] < 1
    assert fact["lost_s"] > 0
    assert "on n0" in fact["summary"]
    assert "later than the others by" in fact["summary"]
    assert agents.ends()[0][0] == "left"


def test_ranks_of_another_node_are_compared_by_one_clock(agents, tmp_path):
    agents.start(program(tmp_path, "ddp", 1.0, slow=(4, 5, 6, 7)), nodes=2, hangs=LIMITS)
    fact = told_of(tmp_path, 5, kinds=("node", "rank"))  # all of its ranks, or first the slowest
    assert fact["nodes"] == ["n1"]
    assert set(fact["ranks"]) <= {4, 5, 6, 7}


def test_one_that_waits_for_its_data_is_said_to(agents, tmp_path):
    wrong = 'with run.timed("data"): time.sleep(0.1 * (rank == 2))'
    agents.start(program(tmp_path, "ddp", 0.0, wrong=wrong), hangs=LIMITS)
    fact = told_of(tmp_path, 2, kinds=("data",))
    assert "waiting for data" in fact["summary"]
