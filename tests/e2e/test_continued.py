"""A run goes on with mended code, other arguments and more to do, as `resume` is told."""

from __future__ import annotations

import json
import subprocess

from tests.support.local_runs import await_end, events, hpctrain

CRASHES = "import sys\nprint({}['key'], sys.argv[1:])\n"
TRAINS = """
import sys, torch, hpctrain
run = hpctrain.init()
model = torch.nn.Linear(2, 2)
run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(int(sys.argv[1])):
    print("step", step, flush=True)
"""
WHERE = ("--cluster", "local", "--nodes", "1", "--ranks-per-node", "1")


def git(folder, *words):
    author = ["-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


def log(run, attempt):
    return (run / f"attempts/{attempt:04}/rank-00000.log").read_text()


def test_what_status_advises_after_a_bug_runs_the_mended_code(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text(CRASHES)
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-qm", "first")
    hpctrain(tmp_path, "submit", *WHERE, "--name", "bug", "--", "train.py", "--lr=1")
    run = tmp_path / "runs" / "bug"
    assert await_end(run)["reason"] == "user_error"

    (tmp_path / "train.py").write_text(CRASHES.replace("{}['key']", "'mended'"))
    told = json.loads(hpctrain(tmp_path, "resume", "bug", "--json"))

    assert await_end(run, attempts=2)["reason"] == "completed"
    assert "mended ['--lr=1']" in log(run, 2)
    assert told["code"].endswith("since the run's copy failed before its first step")
    assert events(run, "submitted")[1]["changed"] == told["code"]


def test_a_run_that_is_done_goes_on_from_its_checkpoint_with_more_to_do(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    hpctrain(tmp_path, "submit", *WHERE, "--name", "own", "--", "train.py", "3")
    run = tmp_path / "runs" / "own"
    assert await_end(run)["reason"] == "completed"
    hpctrain(tmp_path, "resume", "own", or_says="hpctrain resume own -- PROGRAM ARGS")

    hpctrain(tmp_path, "resume", "own", "--", "train.py", "5")

    assert await_end(run, attempts=2)["reason"] == "completed"
    lines = [line.rpartition("step ")[2] for line in log(run, 2).splitlines() if "step " in line]
    assert lines[-2:] == ["3", "4"]
    assert [event["step"] for event in events(run, "done")] == [3, 5]
