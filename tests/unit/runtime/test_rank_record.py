"""What a rank leaves of its run: rank 0 of a run writes, everybody else writes nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.tensors.save import SavePlace
from hpctrain.core.base.records import StopCause
from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.ledger.run.event_types import TrainingDone
from hpctrain.ledger.run.fence import Attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.train.runtime.trackers import RankRecord


def world(rank):
    return SimpleNamespace(rank=rank, world_size=2)


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    return run


def place(run):
    return SavePlace(run, Attempt(3, "token", "1", 0, 1e9), CheckpointSettings())


def written(run):
    return sorted(str(path.relative_to(run.root)) for path in run.root.rglob("*.*"))


def fill(record):
    record.event(TrainingDone(step=7))
    record.outcome("stopped", 7, StopCause.TERM)
    record.log(7, {"loss": 0.5})
    record.flush()
    record.close()


def test_rank_0_writes_events_and_the_outcome_for_the_agent(run):
    record = RankRecord(world(0), place(run), None)

    fill(record)

    (event,) = map(json.loads, run.events.read_text().splitlines())
    assert (event["kind"], event["step"], event["attempt"]) == ("done", 7, 3)
    assert json.loads(run.outcome(3).read_text()) == {
        "outcome": "stopped",
        "step": 7,
        "cause": StopCause.TERM.value,
    }


@pytest.mark.parametrize(("rank", "has_run"), [(1, True), (0, False)])
def test_nobody_else_writes(run, rank, has_run):
    record = RankRecord(world(rank), place(run) if has_run else None, None)

    record.start_trackers(0)
    fill(record)

    assert written(run) == []


def test_the_newest_value_of_each_scalar_is_kept_on_every_rank(run):
    record = RankRecord(world(1), place(run), None)

    record.log(1, {"loss": 2.0, "tokens": 8.0})
    record.log(2, {"loss": 1.0})

    assert record.metrics == {"loss": 1.0, "tokens": 8.0}


def test_scalars_reach_tensorboard_once_trackers_run(run):
    record = RankRecord(world(0), place(run), None)
    record.start_trackers(5)

    record.log(6, {"loss": 0.5})
    record.flush()
    record.close()

    assert any("tfevents" in name for name in written(run))
