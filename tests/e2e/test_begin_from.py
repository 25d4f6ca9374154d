"""A new run begins with another's checkpoint: all of it, or its weights alone, on other ranks."""

from __future__ import annotations

import json

from tests.support.local_runs import await_end, events, hpctrain

TRAINS = """
import sys, torch, hpctrain
run = hpctrain.init()
torch.manual_seed(run.world.rank)
model = torch.nn.Linear(4, 4)
with torch.no_grad():
    model.weight.fill_(0.0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
samples = run.loader(list(range(64)), global_batch=4, shuffle=False)
for step in run.steps(int(sys.argv[1])):
    x = next(samples)
    seen = len(optimizer.state), scheduler.last_epoch, model.weight[0, 0].item() != 0
    if run.world.rank == 0:
        print("step", step, "seen", *seen, "first", float(x.min()), flush=True)
    optimizer.zero_grad()
    model(x.float().mean().expand(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
"""
WHERE = ("--cluster", "local", "--nodes", "1")


def seen(run, attempt=2):
    """What the first step of a run saw: its number, optimizer state, scheduler, weights, data."""
    text = (run / f"attempts/{attempt:04}/rank-00000.log").read_text()
    line = next(line for line in text.splitlines() if line.startswith("step "))
    _, step, _, *values, _, first = line.split()
    return int(step), *values, float(first)


def test_a_run_begins_with_what_it_is_given_of_another_and_leaves_that_as_it_is(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    hpctrain(tmp_path, "submit", *WHERE, "--ranks-per-node=2", "--name", "a", "--", "train.py", "5")
    first = tmp_path / "runs" / "a"
    assert await_end(first)["reason"] == "completed"
    before = sorted((p, p.stat().st_mtime_ns) for p in (first / "checkpoints").rglob("*"))

    given = json.loads(
        hpctrain(
            tmp_path,
            *("submit", *WHERE, "--ranks-per-node=1", "--name", "b", "--from", "a", "--json"),
            *("--", "train.py", "8"),
        )
    )
    whole = tmp_path / "runs" / "b"
    assert await_end(whole)["reason"] == "completed"
    hpctrain(
        tmp_path,
        *("submit", *WHERE, "--ranks-per-node=1", "--name", "c", "--from", "a@5"),
        *("--without=optimizer", "--without=data", "--", "train.py", "2"),
    )
    weights = tmp_path / "runs" / "c"
    assert await_end(weights)["reason"] == "completed"

    assert seen(first, 1) == (0, "0", "0", "False", 0.0)
    step, optimizer, scheduler, trained, sample = seen(whole)
    assert (step, optimizer, scheduler, trained) == (5, "2", "5", "True")
    assert sample == 20.0  # five batches of four behind the beginning
    assert seen(weights) == (0, "0", "0", "True", 0.0)
    assert given["from"] == "step 5 of a; the first step is 6"
    (imported,) = events(whole, "imported")
    assert imported["source"] == str(first / "checkpoints" / "step-0000000005")
    assert sorted((p, p.stat().st_mtime_ns) for p in (first / "checkpoints").rglob("*")) == before
