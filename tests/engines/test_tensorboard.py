"""One curve over all attempts: a resumed run shows no step twice."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.recipe import make_run, train


def test_a_resumed_run_logs_each_step_once(tmp_path):
    run = make_run(tmp_path / "run", checkpoint__interval_steps=4)
    train(run, 1, stop_at=5)
    newest = max(run.checkpoints.glob("step-*"))
    newest.rename(tmp_path / "lost")  # so that steps 5 and 6 are done twice

    train(run, 1)

    events = EventAccumulator(str(run.tensorboard), purge_orphaned_data=True).Reload()
    steps = [scalar.step for scalar in events.Scalars("loss")]
    assert steps == list(range(1, 13))
