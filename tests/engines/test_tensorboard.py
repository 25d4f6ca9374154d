"""One curve over all attempts: a resumed run shows no step twice."""

from __future__ import annotations

import signal

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.recipe import make_run, train


def test_a_resumed_run_logs_each_step_once(tmp_path):
    run = make_run(tmp_path / "run", checkpoint__interval_steps=4)
    train(run, 1, stop_at=5)
    newest = max(run.checkpoints.glob("step-*"))
    newest.rename(tmp_path / "lost")  # so that steps 5 and 6 are done twice

    train(run, 1)

    assert shown(run) == list(range(1, 13))


def test_a_killed_run_leaves_no_hole_before_its_checkpoint_and_no_step_twice(tmp_path):
    """Killed at once after steps beyond the checkpoint; nothing is closed or flushed any more."""
    run = make_run(tmp_path / "run", checkpoint__interval_steps=4, checkpoint__mode="sync")
    train(run, 1, stop_at=6, signum=signal.SIGKILL, kill_at=1_000_000)  # no save is disturbed
    assert shown(run)[:4] == [1, 2, 3, 4]

    train(run, 1)

    assert shown(run) == list(range(1, 13))
    assert len(list(run.tensorboard.iterdir())) == 2


def shown(run):
    events = EventAccumulator(str(run.tensorboard)).Reload()
    return [scalar.step for scalar in events.Scalars("loss")]
