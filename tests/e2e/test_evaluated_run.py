"""A run on the embedded cluster and the evaluations of its checkpoints, as a user starts them."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpctrain.checkpoint.store import find
from hpctrain.ledger.history.evaluations import due
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience
from tests.support.local_runs import await_end, events, start
from tests.support.recipe import TINY

EVALUATE = """#!/bin/sh
env > "$HPCTRAIN_RESULTS.env"
step=$(basename "$HPCTRAIN_CHECKPOINT" | sed 's/step-0*//')
echo "{\\"loss\\": $step}" > "$HPCTRAIN_RESULTS"
"""
SETTINGS = {
    **TINY,
    "train.steps": 12,
    "checkpoint.interval_steps": 2,
    "checkpoint.keep_last": 2,
    "checkpoint.keep_best": 1,
    "checkpoint.best_metric": "eval.loss",
    "evaluate.script": "./evaluate.sh",
    "evaluate.every": 3,
    "evaluate.nodes": 1,
    "evaluate.ranks_per_node": 1,
}


def test_checkpoints_are_evaluated_once_and_nothing_of_the_job_reaches_their_jobs(tmp_path):
    script = tmp_path / "evaluate.sh"
    script.write_text(EVALUATE)
    script.chmod(0o755)
    sets = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    run = start(tmp_path, "run", 2, 1, *sets)
    await_end(run)
    steps = due(RunHistory.read(RunDir(run)), 3, last=True)
    patience.until(
        lambda: len(events(run, "evaluated")) >= len(steps), (run / "events.jsonl").read_text
    )

    assert steps == [6, 12]
    told = events(run, "evaluated")
    assert sorted((fact["step"], fact["metrics"]["loss"]) for fact in told) == [(6, 6), (12, 12)]
    patience.until(  # the newest, and the best of the evaluated
        lambda: find.steps(RunDir(run)) == [12, 10, 6], lambda: find.steps(RunDir(run))
    )

    def shown():
        folder = run / "tensorboard" / "eval"
        board = EventAccumulator(str(folder)).Reload() if folder.is_dir() else None
        if board is None or "eval/loss" not in board.Tags()["scalars"]:
            return []
        return [(point.step, point.value) for point in board.Scalars("eval/loss")]

    # The curves follow the ledger, at the end of the evaluation that came second.
    patience.until(lambda: shown() == [(6, 6), (12, 12)], shown)
    child = RunDir(run).evaluation(6)
    lines = child.results.with_name("results.json.env").read_text().splitlines()
    assert f"HPCTRAIN_RUN_DIR={child.root}" in lines
    assert [line for line in lines if str(run) in line and str(child.root) not in line] == [
        f"HPCTRAIN_CHECKPOINT={run}/checkpoints/step-{6:010d}"
    ]
