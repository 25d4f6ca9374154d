"""The frozen run is resumed, and trains to its end."""

from __future__ import annotations

from hpctrain.ledger.run.event_types import AttemptStarted, CheckpointRestored, TrainingDone
from hpctrain.ledger.run.events import read
from hpctrain.ledger.run.layout import RunDir
from tests.support.frozen_run import copy_of_frozen_run
from tests.support.ledger_runs import local_job
from tests.support.local_runs import await_end, hpctrain


def test_the_frozen_run_goes_on_where_it_stopped(tmp_path):
    run = RunDir(copy_of_frozen_run(tmp_path))
    for job_id in ("local-1", "local-2"):  # its own: numbers are given once
        local_job(tmp_path / "local", job_id, state="COMPLETED")

    hpctrain(tmp_path, "resume", "gpt", "--nodes", "2")
    await_end(run.root, attempts=4)

    facts = [event.fact for event in read(run) if event.attempt == 4]
    started = next(fact for fact in facts if isinstance(fact, AttemptStarted))
    restored = next(fact for fact in facts if isinstance(fact, CheckpointRestored))
    assert (started.world_size, restored.step, restored.from_world_size) == (2, 67, 1)
    assert TrainingDone(step=80) in facts
    shown = hpctrain(tmp_path, "status", "gpt")
    assert "done" in shown.splitlines()[0]
    assert "4 attempts, 4 steps lost in all" in shown
