"""A run whose program hangs on two nodes: named while it stands, started again, and completed."""

from __future__ import annotations

import json

from tests.support import patience
from tests.support.local_runs import await_end, events, hpctrain, start

HANGS = """
import os, pathlib, random, time
import torch, torch.distributed as dist
import hpctrain

run = hpctrain.init()
layer = torch.nn.Linear(4, 4)
run.track(model=layer)
first = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"]).name.endswith("1")

def fetch_rows(blocks):
    if blocks:
        return fetch_rows(blocks - 1)
    time.sleep(3600 if os.path.exists("looked_at") else 0.2)

for step in run.steps(12):
    with run.section("reading"):
        while first and step == 6 and run.world.rank == 1:
            fetch_rows(random.randrange(20))
    dist.all_reduce(torch.ones(4))
"""
"""Until somebody has looked, its stack changes from look to look: a sign of life, so that the hang
stays a suspicion for as long as the commands take on a busy machine."""
SET = ("--set", "alive.hang_s=6", "--set", "checkpoint.interval_steps=2")
TELL = ("--set", "notify.on=['incident']", "--set", "notify.command=tee -a heard")
WAITS = "1 rank waits for rank 1, which has not come to all_reduce"


def test_a_hang_is_named_while_it_stands_and_costs_no_more_than_a_restart(tmp_path):
    (tmp_path / "train.py").write_text(HANGS)
    run = start(tmp_path, "hangs", 2, 1, *SET, *TELL, "--", "train.py")

    patience.until(lambda: events(run, "hang_suspected"))
    status = " ".join(hpctrain(tmp_path, "status", "hangs").split())
    stacks = hpctrain(tmp_path, "stacks", "hangs")
    (tmp_path / "looked_at").touch()
    first, last = await_end(run, attempts=1), await_end(run, attempts=2)

    assert "fetch_rows (step 6, in reading)" in stacks
    assert f"it may hang: {WAITS}" in stacks
    assert "it may hang" in status or "it hangs" in status
    (hang,) = events(run, "hang")
    (failure,) = events(run, "failure")
    assert hang["summary"].startswith(WAITS)
    assert (hang["ranks"], hang["ended"], failure["kind_of"]) == ([1], True, "hang")
    assert (first["next"], last["reason"]) == ("restart", "completed")
    assert events(run, "restored")[-1]["step"] >= 2
    told = json.loads(hpctrain(tmp_path, "status", "hangs", "--json"))
    assert told["attempts"][0]["cause"] == "hang"
    heard = json.loads((tmp_path / "heard").read_text())
    assert (heard["what"], heard["reason"], heard["attempt"]) == ("incident", "hang", 1)
    assert heard["why"].startswith(f"it hangs: {WAITS}")
    assert "hangs; ended: 1 rank waits for rank 1" in hpctrain(tmp_path, "events", "hangs")
