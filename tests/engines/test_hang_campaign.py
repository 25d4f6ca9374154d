"""Planted hangs are named, each time the right rank; runs that are only slow are left alone.

    HPCTRAIN_SEED=7 HPCTRAIN_DISTURBANCES=200 HPCTRAIN_HOURS=10 pytest -m soak \
        tests/engines/test_hang_campaign.py

The first campaign prints a table: what was planted, and as what it was named. The second lets ten
agents with two ranks each train beside each other, slowly in every way that a program may be: a
first step that computes for long, an evaluation in a section, a step in which one rank computes, a
pause shorter than the limit. tests/engines/test_hang_watch.py has the short form of both.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter

import pytest

from hpctrain.node.hangs.standing import HangLimits
from tests.support.rank_agents import Agents

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("preloaded"), pytest.mark.timeout(0)]

FAULTS = int(os.environ.get("HPCTRAIN_DISTURBANCES", "200"))
HOURS = float(os.environ.get("HPCTRAIN_HOURS", "10"))
RANKS = 4
LIMITS = HangLimits(1.5, first_step_s=60.0, save_s=30.0)
KINDS = {
    "sleeps": "behind",
    "holds_gil": "behind",
    "spins": "behind",
    "stopped": "stopped",
    "extra_collective": "mismatch",
    "wrong_collective": "mismatch",
    "crossed_groups": "deadlock",
    "returns": "returned",
}
PLANTS = """
import ctypes, os, pathlib, random, signal, sys, threading, time
import torch, torch.distributed as dist
import hpctrain

folder = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"])
draw = random.Random(f"{SEED}-{folder.name}")
scene = KINDS[int(folder.name) % len(KINDS)]
bad, at = draw.randrange(RANKS), draw.randrange(8, 16)
run = hpctrain.init()
rank = run.world.rank
if scene == "crossed_groups":
    bad = draw.randrange(1, RANKS)
    cross = dist.new_group([0, bad])
if rank == 0:
    (folder / "planted").write_text(f"{scene} {bad}")

def fetch_rows(step):
    if scene == "sleeps":
        time.sleep(1000)
    if scene == "holds_gil":
        readable, _ = os.pipe()
        ctypes.PyDLL(None).read(readable, ctypes.create_string_buffer(1), 1)
    while scene == "spins":
        pass
    if scene == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)

for step in run.steps(40):
    with run.timed("data"):
        if step == at and rank == bad:
            fetch_rows(step)
        time.sleep(0.03)
    if step == at and rank == bad:
        if scene == "extra_collective":
            dist.barrier()
        if scene == "wrong_collective":
            dist.all_gather([torch.empty(8) for _ in range(RANKS)], torch.ones(8))
        if scene == "returns":
            threading.Thread(target=time.sleep, args=(1000,)).start()  # keeps the process
            break
    if scene == "crossed_groups" and step == at and rank == 0:
        dist.all_reduce(torch.ones(3), group=cross)
    dist.all_reduce(torch.ones(4))
    if scene == "crossed_groups" and step == at and rank == bad:
        dist.all_reduce(torch.ones(3), group=cross)
else:
    sys.exit(5)
"""
SLOW = """
import os, random, time
import torch, torch.distributed as dist
import hpctrain

run = hpctrain.init()
both, own = random.Random(SEED), random.Random(f"{SEED}-{run.world.rank}")
until_s = time.monotonic() + LASTS_S

def computes(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        sum(range(200_000))
        time.sleep(0.02)

goes_on = torch.ones(1)
for step in run.steps(10**9):
    if step == 0:
        computes(20)
    with run.timed("data"):
        time.sleep(own.uniform(0.02, 0.6))
    what = both.random()
    if what < 0.01:
        with run.section("evaluation", limit_s=120):
            time.sleep(both.uniform(5, 25))
    elif what < 0.02 and run.world.rank == both.randrange(2):
        computes(own.uniform(2, 30))
    elif what < 0.03:
        time.sleep(both.uniform(0.5, PAUSE_S))
    goes_on[:] = time.monotonic() < until_s
    dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
    if not goes_on.item():
        break
"""


def say(capfd, text):
    with capfd.disabled():
        print(f"{time.strftime('%T')} {text}", flush=True)


def events(folder):
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def planted_and_named(folder):
    """(scene, its rank, the verdict on it or None), for each start."""
    told = {event["attempt"]: event for event in events(folder) if event["kind"] == "hang"}
    for path in sorted(folder.glob("*/planted"), key=lambda path: int(path.parent.name)):
        scene, bad = path.read_text().split()
        yield scene, int(bad), told.get(int(path.parent.name))


def right(scene, bad, hang):
    """Whether the verdict is what was planted."""
    ranks = [0, bad] if scene == "crossed_groups" else [bad]
    return hang is not None and (hang["kind_of"], hang["ranks"]) == (KINDS[scene], ranks)


def test_each_planted_hang_is_named(tmp_path, capfd):
    seed = int(os.environ.get("HPCTRAIN_SEED", time.time_ns() % 10**9))
    say(capfd, f"seed {seed}, {FAULTS} hangs")
    script = PLANTS.replace("KINDS", repr(tuple(KINDS))).replace("RANKS", str(RANKS))
    both = [tmp_path / "a", tmp_path / "b"]
    running = []
    for number, folder in enumerate(both):
        folder.mkdir()
        running.append(Agents(folder, RANKS))
        text = script.replace("SEED", repr(f"{seed}-{number}"))
        running[-1].start(text, starts=FAULTS // 2, hangs=LIMITS, end_wait_s=600.0)
    for agents in running:
        agents.ends(patience_s=60.0 * FAULTS)
        agents.close()

    table, wrong, stood_s = Counter(), [], []
    for folder in both:
        for scene, bad, hang in planted_and_named(folder):
            named = "not named" if hang is None else hang["kind_of"]
            table[scene, named, right(scene, bad, hang)] += 1
            if hang is not None:
                stood_s.append(hang["stood_s"])
            if not right(scene, bad, hang):
                wrong.append((scene, bad, hang and (hang["kind_of"], hang["ranks"])))
    for (scene, named, is_right), count in sorted(table.items()):
        say(capfd, f"{scene}: {count} times {named}{'' if is_right else ', WRONG'}")
    say(capfd, f"stood {min(stood_s):.1f} to {max(stood_s):.1f} s; limit {LIMITS.hang_s} s")
    assert sum(table.values()) >= FAULTS // 2 * 2
    assert wrong == []


def test_runs_that_are_only_slow_are_left_alone(tmp_path, capfd):
    seed = int(os.environ.get("HPCTRAIN_SEED", time.time_ns() % 10**9))
    agents_count = 10
    lasts_s = HOURS * 3600 / agents_count
    say(capfd, f"seed {seed}, {HOURS:g} hours on {agents_count} agents")
    running = []
    for number in range(agents_count):
        folder = tmp_path / str(number)
        folder.mkdir()
        is_strict = number % 2 == 0
        limits = HangLimits(5.0 if is_strict else 60.0)
        text = SLOW.replace("SEED", repr(f"{seed}-{number}")).replace("LASTS_S", repr(lasts_s))
        text = text.replace("PAUSE_S", "3.0" if is_strict else "50.0")
        running.append(Agents(folder, 2))
        running[-1].start(text, hangs=limits, end_wait_s=600.0)
    ended = [agents.ends(patience_s=lasts_s + 600)[0] for agents in running]
    for agents in running:
        agents.close()

    kinds = Counter(
        event["kind"] for number in range(agents_count) for event in events(tmp_path / str(number))
    )
    say(capfd, f"{dict(kinds)}")
    assert [end and end[0] for end in ended] == ["left"] * agents_count
    assert kinds["hang"] == 0
    assert kinds["hang_suspected"] == kinds["hang_cleared"]
