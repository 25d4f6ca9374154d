"""A real agent names ranks that hang, ends them and starts anew; slow ones it only looks at."""

from __future__ import annotations

import json
import time

import pytest

from hpctrain.node.agent import hang_watch
from hpctrain.node.control import board
from hpctrain.node.hangs import stacks
from hpctrain.node.hangs.standing import HangLimits
from tests.support import patience
from tests.support.rank_agents import Agents

pytestmark = [
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.realtime(proved_by="tests/unit/agent/test_simulated_rounds.py"),
]

RANKS = 4
LIMIT_S = 2.0
LIMITS = HangLimits(LIMIT_S, first_step_s=30.0, save_s=30.0)
TRAINS = """
import ctypes, os, pathlib, signal, time
import torch, torch.distributed as dist
import hpctrain

folder = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
run = hpctrain.init()
rank, again = run.world.rank, folder.name != "1"

def fetch_rows(step):
    pass

for step in run.steps(STEPS):
    with run.timed("data"):
        WRONG
        time.sleep(0.05)
    dist.all_reduce(torch.ones(4))
    AFTER
"""


def program(wrong="pass", after="pass", steps=30, at=10, bad=1):
    """A training in which rank `bad` does something at a step, at its first start."""
    when = f"if step == {at} and rank == {bad} and not again: fetch_rows(step)"
    text = TRAINS.replace("    pass\n", f"    {wrong}\n", 1)
    return text.replace("WRONG", when).replace("AFTER", after).replace("STEPS", str(steps))


@pytest.fixture
def agents(tmp_path):
    agents = Agents(tmp_path, RANKS)
    yield agents
    agents.close()


def events(folder):
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ("time.sleep(1000)", "behind", "3 ranks wait for rank 1, which has not come to all_reduce"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "stopped", "rank 1 is stopped (by a signal)"),
    ],
)
def test_a_hang_is_named_ended_and_started_again(agents, tmp_path, wrong, kind, words):
    [[ending, *_]] = agents.run(program(wrong), starts=2, hangs=LIMITS, end_wait_s=30)

    suspected, hang = events(tmp_path)
    assert (suspected["kind"], hang["kind"], hang["ended"]) == ("hang_suspected", "hang", True)
    assert (hang["kind_of"], hang["ranks"]) == (kind, [1])
    assert words in hang["summary"]
    assert LIMIT_S <= suspected["stood_s"] <= hang["stood_s"]
    told = json.loads((tmp_path / "1" / "hang.json").read_text())
    assert told["verdict"]["summary"] == hang["summary"]
    assert {row["rank"]: row["step"] for row in told["ranks"]} == dict.fromkeys(range(RANKS), 10)
    assert words in (tmp_path / "failure-1").read_text()
    assert ending == "left", "the second start has come to its end"


def test_work_that_takes_several_limits_is_looked_at_and_left_alone(agents, tmp_path):
    """Rank 0 evaluates, the others wait for it: as in most programs."""
    computes = "for number in range(60): time.sleep(0.1) if number % 2 else sum(range(2000000))"
    [[ending, why, *_]] = agents.run(program(computes, bad=0), hangs=LIMITS, end_wait_s=30)

    assert (ending, why) == ("left", "")
    kinds = [event["kind"] for event in events(tmp_path)]
    assert "hang" not in kinds
    assert kinds.count("hang_suspected") == kinds.count("hang_cleared") >= 1


def test_where_it_is_only_to_be_told_nothing_is_ended(agents, tmp_path):
    limits = HangLimits(0.5, ends_round=False)
    [[ending, *_]] = agents.run(program("time.sleep(10)", steps=100), hangs=limits, end_wait_s=30)

    assert ending == "left"
    told = [(event["kind"], event.get("ended")) for event in events(tmp_path)]
    while told[:2] == [("hang_suspected", None), ("hang_cleared", None)]:
        del told[:2]  # on a busy machine a step may take half a second as well
    assert told[:3] == [("hang_suspected", None), ("hang", False), ("hang_cleared", None)]
    assert [ended for kind, ended in told if kind == "hang"] == [False]


def test_the_first_step_and_a_named_section_have_their_own_limits(agents, tmp_path):
    limits = HangLimits(0.5, first_step_s=60.0)
    section = 'with run.section("evaluation", limit_s=60): time.sleep(3)'
    first = program("time.sleep(3)", at=0, after=section, steps=2)
    [[ending, *_]] = agents.run(first, hangs=limits, end_wait_s=30)
    assert (ending, events(tmp_path)) == ("left", [])


def test_a_user_is_told_where_the_ranks_are_at_any_time(agents, tmp_path):
    agents.start(program("time.sleep(1000)"))
    path = stacks.path_of(tmp_path / "1")
    rows, told = [], {}
    # Until all the others wait for it, too.
    while not any(row["at"].endswith("fetch_rows") for row in rows) or not told["verdict"]["ranks"]:
        stacks.ask(tmp_path / "stacks-request.json", "1", token := str(time.monotonic()))
        told = patience.until(lambda token=token: stacks.answer(path, token), "an answer")
        rows = told["ranks"]
    assert [row["rank"] for row in rows] == list(range(RANKS))
    assert told["verdict"]["ranks"] == [1]
    assert events(tmp_path) == [], "nobody watches"


def test_switched_off_nothing_is_looked_at(agents, tmp_path):
    assert agents.run(program("time.sleep(1000)"), patience_s=8) == [None]
    assert events(tmp_path) == []
    assert not (tmp_path / "1" / "hang.json").exists()


SKIPS = """
import time
import torch, torch.distributed as dist
import hpctrain

run = hpctrain.init()
for step in run.steps(STEPS):
    time.sleep(0.02)
    dist.all_reduce(torch.ones(4))
    if step == 60 and run.world.rank == 2 and LEAVES_OUT:
        continue
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize("desync", ["restart", "tell"])
def test_a_rank_that_is_out_of_step_is_named(agents, tmp_path, monkeypatch, desync):
    monkeypatch.setattr(board, "APART_NS", 20_000_000)  # of each step: the run is short
    leaves_out = "__import__('os').environ['HPCTRAIN_ATTEMPT_DIR'].endswith('1')"
    script = SKIPS.replace("LEAVES_OUT", leaves_out).replace("STEPS", "400")
    limits = HangLimits(60.0, desync=desync)
    patience_s = 90 if desync == "restart" else 14
    [end] = agents.run(script, hangs=limits, starts=2, patience_s=patience_s)

    (fact,) = events(tmp_path)
    assert (fact["kind"], fact["ranks"], fact["ended"]) == ("desync", [2], desync == "restart")
    assert "rank 2 has called 1 fewer collectives of all ranks than the others" in fact["summary"]
    assert end is None if desync == "tell" else end[0] == "left"


def test_nodes_say_their_counts_each_second_and_many_together_no_more_than_twenty_times():
    assert [hang_watch._counts_s(nodes) for nodes in (1, 20, 100, 1024)] == [1.0, 1.0, 5.0, 51.2]


def test_ranks_in_step_are_not_told_of(agents, tmp_path, monkeypatch):
    monkeypatch.setattr(hang_watch, "COUNTS_S", 0.2)
    monkeypatch.setattr(board, "APART_NS", 20_000_000)
    script = SKIPS.replace("LEAVES_OUT", "False").replace("STEPS", "150")
    [[ending, *_]] = agents.run(script, hangs=HangLimits(60.0, desync="restart"))
    assert (ending, events(tmp_path)) == ("left", [])
